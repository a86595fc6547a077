"""The weights of LoRA adapters, checked against their model, and whose columns are whose.

The first matrices of all loaded adapters stand side by side, and so do the second ones. A row gets
what its own adapter adds because the columns of the others are zeros between the two.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from llmserve.runtime.lora import Lora, LoraError

ProductShapes: TypeAlias = Mapping[str, tuple[int, int]]
"""The numbers of inputs and of outputs of a model's products, by the names of their modules."""
Array: TypeAlias = npt.NDArray[Any]

_REFUSED = ("lm_head", "experts")
"""Modules that do not get each token of a pass once."""
_TYPES = {"F64": "<f8", "F32": "<f4", "F16": "<f2", "BF16": "<u2"}
_LARGEST = float(np.finfo(np.float32).max)


def check_lora(lora: Lora, shapes: ProductShapes) -> None:
    """Raise :class:`LoraError` if an adapter adds to what is no product of its model."""
    for name, shape in lora.shapes.items():
        if any(part in _REFUSED for part in name.split(".")):
            raise LoraError(f"adds to {name}, which is not supported")
        if (own := shapes.get(name)) is None:
            raise LoraError(f"adds to {name}, which is no product of this model")
        if shape != own:
            raise LoraError(f"has {shape} for {name}, which has {own} here: is it of this model?")


def read_lora_weights(lora: Lora, largest: float = _LARGEST) -> Iterator[tuple[str, Array, Array]]:
    """Read each module's matrices: ``[rank, inputs]``, and ``[rank, outputs]`` with the scale.

    They are in float32; no number is beyond ``largest``, which is that of the model's type.
    """
    from safetensors import SafetensorError, deserialize

    try:
        # It has no types; the file was looked at without its numbers before.
        stored = dict(deserialize(lora.file.read_bytes()))  # type: ignore[no-untyped-call]
    except (OSError, SafetensorError):
        raise LoraError("has files that cannot be read") from None
    for name, (inputs, outputs) in lora.shapes.items():
        first = _matrix(stored, name, "A", (lora.rank, inputs))
        second = _matrix(stored, name, "B", (outputs, lora.rank)).T
        with np.errstate(all="ignore"):
            second = second * np.float32(lora.scale)
        for part in (first, second):
            # What is no number is not at most anything.
            if not np.abs(part).max() <= largest:
                raise LoraError(f"has weights of {name} that are no numbers here")
        yield name, first, second


def _matrix(stored: Mapping[str, Any], name: str, kind: str, shape: tuple[int, int]) -> Array:
    tensor = stored.get(f"base_model.model.{name}.lora_{kind}.weight")
    if tensor is None or tuple(tensor["shape"]) != shape:
        raise LoraError("has files that have changed")
    if (dtype := _TYPES.get(tensor["dtype"])) is None:
        raise LoraError(f"has weights of {name} in {tensor['dtype']}, which are no numbers here")
    values = np.frombuffer(tensor["data"], dtype).reshape(shape)
    if tensor["dtype"] == "BF16":
        return (values.astype(np.uint32) << 16).view(np.float32)
    with np.errstate(over="ignore"):
        return values.astype(np.float32)


class LoraColumns:
    """The columns of each of several adapters, by their keys, in the order of their ranks."""

    def __init__(self, ranks: Mapping[str, int]) -> None:
        self._of: dict[str, slice] = {}
        self.count = 0
        for key, rank in ranks.items():
            self._of[key] = slice(self.count, self.count + rank)
            self.count += rank

    def __getitem__(self, key: str) -> slice:
        return self._of[key]

    def of_rows(self, keys: Sequence[str]) -> tuple[slice, npt.NDArray[np.bool_]]:
        """Return the columns that rows need, and which of these are each row's own.

        A row with an empty key has none.
        """
        used = [self._of[key] for key in {*keys} if key]
        first = min((columns.start for columns in used), default=0)
        last = max((columns.stop for columns in used), default=0)
        own = np.zeros((len(keys), last - first), np.bool_)
        for row, key in enumerate(keys):
            if key:
                own[row, self._of[key].start - first : self._of[key].stop - first] = True
        return slice(first, last), own
