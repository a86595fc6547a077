"""Tensors, errors and responses of Triton's Python backend, without Triton."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt


class FakeTensor:
    """A named array."""

    def __init__(self, name: str, values: npt.NDArray[Any]) -> None:
        self._name = name
        self._values = values

    def name(self) -> str:
        """Return the tensor's name."""
        return self._name

    def as_numpy(self) -> npt.NDArray[Any]:
        """Return its values."""
        return self._values

    def is_cpu(self) -> bool:
        """Say that it is in the CPU's memory."""
        return True


class FakeError:
    """A ``TritonError``."""

    INTERNAL = 1
    INVALID_ARG = 2

    def __init__(self, message: str, code: int = INTERNAL) -> None:
        self._message = message
        self._code = code

    def message(self) -> str:
        """Return what it says."""
        return self._message

    def code(self) -> int:
        """Return its code."""
        return self._code


class FakeResponse:
    """An ``InferenceResponse``."""

    def __init__(
        self, output_tensors: Sequence[FakeTensor] = (), error: FakeError | None = None
    ) -> None:
        self.tensors = {tensor.name(): tensor.as_numpy() for tensor in output_tensors}
        self.error = error

    @property
    def texts(self) -> list[str]:
        """What ``text_output`` says, a text per row."""
        return [value.decode() for value in self.tensors["text_output"].reshape(-1)]


class FakeModelException(Exception):
    """A ``TritonModelException``."""


def as_array(values: Any) -> npt.NDArray[Any]:
    """Return values as Triton hands them over: a row each, texts as bytes."""
    if isinstance(values, np.ndarray):
        return values
    rows = [value.encode() if isinstance(value, str) else value for value in values]
    kind: Any = np.object_ if rows and isinstance(rows[0], bytes) else None
    return np.array(rows, dtype=kind).reshape(len(rows), 1)
