"""What a stand-in needs of the library behind it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy.typing as npt

Array = npt.NDArray[Any]


class Engine(Protocol):
    """A loaded graph. Its values are whatever the library keeps tensors in, on its device."""

    name: str
    """What runs here, for the log."""
    inputs: frozenset[str]
    """What the graph takes."""

    def value(self, array: Array) -> Any:
        """Bring an array to where the graph runs."""

    def array(self, value: Any) -> Array:
        """Bring a value back."""

    def shape(self, value: Any) -> tuple[int, ...]:
        """Return a value's shape."""

    def row(self, value: Any, index: int) -> Any:
        """Return one row of a value, as something that :meth:`join` takes."""

    def join(self, rows: Sequence[Any]) -> Any:
        """Make one value of rows."""

    def run(self, feeds: Mapping[str, Any], outputs: Sequence[str]) -> dict[str, Any]:
        """Run the graph."""
