"""The batching ``scaffold`` as it runs in Triton."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from llmserve.runtime import BatchDriver, Parts


class ScaffoldDriver:
    """Which requests run when; a :class:`llmserve.runtime.Driver`."""

    def __init__(self, settings: Mapping[str, Any], folder: Path) -> None:
        self._width = int(settings["width"])
        # It reads, answers and refuses requests; what is decided here is their order.
        self._inner = BatchDriver(settings, folder)

    def start(self, parts: Parts) -> None:
        self._inner.start(parts)

    def execute(self, requests: Sequence[Any]) -> None:
        """Answer what Triton hands over; each request is answered when it is done."""
        waiting = sorted(requests, key=_length)
        for first in range(0, len(waiting), self._width):
            self._inner.execute(waiting[first : first + self._width])

    def finalize(self) -> None:
        """Let go of everything; the model is being unloaded."""
        self._inner.finalize()


def _length(request: Any) -> int:
    """Return how many bytes the prompts of a request have."""
    tensors = {tensor.name(): tensor.as_numpy() for tensor in request.inputs()}
    texts = tensors.get("text_input")
    return 0 if texts is None else sum(len(text) for text in texts.reshape(-1))
