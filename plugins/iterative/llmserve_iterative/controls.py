"""What Triton says of a sequence beside each of its requests."""

from __future__ import annotations

from collections.abc import Container
from typing import Any

from llmserve.runtime.errors import RequestError

NOBODY = 0
"""The number of what fills a direct slot that has no request."""

_NAMES = ("CORRID", "START")
_OWN_IDS = 1 << 16
_END = 2


def read_controls(raw: Any) -> tuple[int, bool]:
    """Return the number that Triton gave a request's sequence, and whether it begins with it."""
    found = {tensor.name(): tensor for tensor in raw.inputs() if tensor.name() in _NAMES}
    number, start = (int(found[name].as_numpy().reshape(-1)[0]) for name in _NAMES)
    return number, bool(start)


class Numbers:
    """Tells Triton's numbers, which count up, from a client's own."""

    def __init__(self) -> None:
        self._latest = 0

    def take(self, raw: Any, number: int, in_use: Container[int]) -> None:
        """Refuse a client's own number, which would mix two requests up."""
        by_itself = number - self._latest < _OWN_IDS and number not in in_use
        if isinstance(raw.correlation_id(), str) or raw.flags() & _END or not by_itself:
            raise RequestError(
                "this model makes a sequence of every request by itself: send it without a "
                "sequence id"
            )
        self._latest = max(self._latest, number)
