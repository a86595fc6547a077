"""What a file of weights says that it holds, and whether that is numbers."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmserve.builder.reading import damaged, read_object

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

_LARGEST_HEADER = 100_000_000
"""The limit of the safetensors library itself."""
_BLOCK = 1 << 20

# The unsigned type of the same size, the bits without the sign, and those of infinity: what is
# above that is no number. The last type has no infinity.
_FLOATS = {
    "F64": ("<u8", 0x7FFF_FFFF_FFFF_FFFF, 0x7FF0_0000_0000_0000),
    "F32": ("<u4", 0x7FFF_FFFF, 0x7F80_0000),
    "F16": ("<u2", 0x7FFF, 0x7C00),
    "BF16": ("<u2", 0x7FFF, 0x7F80),
    "F8_E5M2": ("u1", 0x7F, 0x7C),
    "F8_E4M3": ("u1", 0x7F, 0x7E),
}


@dataclass(frozen=True)
class Stored:
    """A tensor in a file; ``begin`` and ``end`` are positions in the file."""

    file: Path
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int

    def is_nowhere_a_number(self) -> bool:
        """Return whether each value is NaN. The first number that is found ends the search."""
        import numpy as np

        if self.dtype not in _FLOATS or not prod(self.shape):
            return False
        kind, magnitude, infinity = _FLOATS[self.dtype]
        size, left = 1 << 12, self.end - self.begin
        with self.file.open("rb", buffering=0) as stream:
            stream.seek(self.begin)
            while left > 0:
                block = stream.read(min(size, left))
                bits: npt.NDArray[np.unsignedinteger[Any]]
                bits = np.frombuffer(block, kind, count=len(block) // np.dtype(kind).itemsize)
                if not len(bits) or ((bits & magnitude) <= infinity).any():
                    return False
                left -= len(block)
                size = _BLOCK
        return True


def read_stored(path: Path) -> dict[str, Stored]:
    """Read the header of a safetensors file, which gives each tensor's position and shape."""
    try:
        with path.open("rb") as stream:
            prefix = stream.read(8)
            length = int.from_bytes(prefix, "little")
            # A Git LFS pointer or an error page instead of the file is text: its first bytes give a
            # number beyond the limit.
            if len(prefix) < 8 or length > _LARGEST_HEADER:
                raise ValueError("it does not begin as a safetensors file does")
            header = json.loads(stream.read(length))
        tensors = {
            name: _stored(path, 8 + length, described)
            for name, described in header.items()
            if name != "__metadata__"
        }
        expected = max((tensor.end for tensor in tensors.values()), default=8 + length)
        size = path.stat().st_size
        if size < expected:
            raise ValueError(f"it has {size} bytes of {expected}")
    except (KeyError, TypeError, IndexError, AttributeError):
        raise damaged(path, "its header describes no tensors") from None
    except (OSError, ValueError, RecursionError) as error:
        raise damaged(path, str(error)) from None
    return tensors


def _stored(path: Path, start: int, described: Mapping[str, Any]) -> Stored:
    begin, end = described["data_offsets"]
    shape = tuple(described["shape"])
    numbers = (begin, end, *shape)
    if not all(type(number) is int and number >= 0 for number in numbers) or end < begin:
        raise TypeError
    return Stored(path, str(described["dtype"]), shape, start + begin, start + end)


INDEX = ".index.json"
WHOLE = "model.safetensors"
"""The file of a model that is not in several."""


def loaded_files(folder: Path, whole: str, pattern: str) -> list[Path]:
    """Return the files that are loaded: one, or those of an index, or else all."""
    if (folder / whole).is_file():
        return [folder / whole]
    if index := index_in(folder, whole):
        return shards_of(index)
    return sorted(path for path in folder.glob(pattern) if path.is_file())


def index_in(folder: Path, whole: str) -> Path | None:
    """Return what names the shards of a model that is in several files instead of a whole one."""
    name = index_of([file.name for file in folder.glob(f"*{INDEX}")], whole)
    return folder / name if name else None


def index_of(names: Collection[str], whole: str) -> str | None:
    """Return which of these indices is read instead of a whole file.

    Some models have others beside the usual one, for shards in other types or for other programs.
    """
    usual = f"{whole}{INDEX}"
    fitting = [name for name in names if name.endswith(f"{whole.rpartition('.')[2]}{INDEX}")]
    return usual if usual in names else min(fitting, default=None)


def shards_of(index: Path) -> list[Path]:
    """Return the files that an index of shards names; each has to be beside it."""
    named = read_object(index).get("weight_map")
    if not isinstance(named, dict) or not all(isinstance(name, str) for name in named.values()):
        raise damaged(index, "its weight_map does not give a file for each tensor")
    names = sorted(set(named.values()))
    for name in names:
        # transformers would open whatever path this is.
        if Path(name).name != name or "\0" in name:
            raise damaged(index, f"it names {name[:100]!r}, which is no file beside it")
    return [index.parent / name for name in names]
