"""The batching ``scaffold`` as it runs in Triton."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from llmserve.runtime import BatchDriver, Parts


class ScaffoldDriver:
    """Decides which requests run when; a :class:`llmserve.runtime.Driver`."""

    def __init__(self, settings: Mapping[str, Any], folder: Path) -> None:
        self._width = int(settings["width"])
        # It reads, answers and refuses requests; this class only decides their order.
        self._inner = BatchDriver(settings, folder)

    def start(self, parts: Parts) -> None:
        self._inner.start(parts)

    def execute(self, requests: Sequence[Any]) -> None:
        """Answer the requests that Triton passes, each when it is done."""
        waiting = sorted(requests, key=_length)
        for first in range(0, len(waiting), self._width):
            self._inner.execute(waiting[first : first + self._width])

    def finalize(self) -> None:
        """Release all resources; the model is being unloaded."""
        self._inner.finalize()


def _length(request: Any) -> int:
    """Return the number of bytes in a request's prompts."""
    tensors = {tensor.name(): tensor.as_numpy() for tensor in request.inputs()}
    texts = tensors.get("text_input")
    return 0 if texts is None else sum(len(text) for text in texts.reshape(-1))
