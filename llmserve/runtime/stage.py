"""What the Python parts of an ensemble share: every request is answered, each for itself."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy.typing as npt

from llmserve.runtime.errors import panics_as_errors
from llmserve.runtime.protocols import Parts
from llmserve.runtime.responder import failure

Tensors = Mapping[str, npt.NDArray[Any]]


def respond(requests: Sequence[Any], answer: Callable[[Any], Tensors], parts: Parts) -> list[Any]:
    """Return a response to every request of a part that is not decoupled.

    ``answer`` returns a request's output tensors. What it raises becomes that request's error, as
    :func:`~llmserve.runtime.failure` says.
    """
    return [_response(raw, answer, parts) for raw in requests]


def tensors_of(raw: Any) -> dict[str, npt.NDArray[Any]]:
    return {tensor.name(): tensor.as_numpy() for tensor in raw.inputs()}


def _response(raw: Any, answer: Callable[[Any], Tensors], parts: Parts) -> Any:
    pb = parts.pb_utils
    try:
        with panics_as_errors():
            tensors = answer(raw)
    except Exception as error:
        return pb.InferenceResponse(output_tensors=[], error=failure(error, parts))
    outputs = [pb.Tensor(name, values) for name, values in tensors.items()]
    return pb.InferenceResponse(output_tensors=outputs)
