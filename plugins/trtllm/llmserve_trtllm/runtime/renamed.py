"""A request whose tensors have other names than the contract's."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


class Renamed:
    """Shows a request to the core's reader under the names that it knows.

    ``names`` leads from the tensors' own names to the contract's; others stay as they are.
    """

    def __init__(self, raw: Any, names: Mapping[str, str]) -> None:
        self._raw = raw
        self._names = names

    def inputs(self) -> list[Any]:
        """Return the input tensors."""
        return [_Named(t, self._names.get(t.name(), t.name())) for t in self._raw.inputs()]

    def parameters(self) -> Any:
        """Return the request's parameters."""
        return self._raw.parameters()


class _Named:
    def __init__(self, tensor: Any, name: str) -> None:
        self._tensor, self._name = tensor, name

    def name(self) -> str:
        return self._name

    def as_numpy(self) -> Any:
        return self._tensor.as_numpy()
