"""The tensors of TensorRT-LLM's engine backend, and the stand-in that answers them with PyTorch.

What answers an engine's tensors by other means than an engine reads requests with
:func:`read_rows`, keeps each as a :class:`Flight` and lets it tell what is new::

    flight = Flight(request, tensors, settings, pb_utils)
    flight.rows = read_rows(tensors, context_length, flight.is_cancelled)
    flight.rows[0].push(token_id)
    flight.tell()
"""

from __future__ import annotations

from llmserve.server.backends.tensorrtllm.backend import StandIn
from llmserve.server.backends.tensorrtllm.flight import Flight
from llmserve.server.backends.tensorrtllm.reading import read_rows
from llmserve.server.backends.tensorrtllm.settings import Settings
from llmserve.server.backends.tensorrtllm.tokens import Tokens

__all__ = ["Flight", "Settings", "StandIn", "Tokens", "read_rows"]
