"""Reads the header of a GGUF file: its facts and the list of its tensors, not their weights.

The file comes from anywhere. Every count and length in it is compared with the file's size before
anything is read by it, so a damaged or hostile file costs neither memory nor time.
"""

from __future__ import annotations

import mmap
import re
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from llmserve.builder.reading import damaged
from llmserve.errors import ModelSourceError

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_STRING, _ARRAY = 8, 9
_NUMBERS = {
    0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d",
}  # fmt: skip
_LARGEST_HEADER = 100_000_000
"""Ten times that of the largest vocabularies."""
_MOST_DIMENSIONS = 4
_MOST_ENTRIES = 100_000
"""Of facts, of tensors, and of a list that is kept; the vocabulary is longer and is skipped."""
KINDS = {
    0: "F32", 1: "F16", 2: "Q4_0", 3: "Q4_1", 6: "Q5_0", 7: "Q5_1", 8: "Q8_0", 12: "Q4_K",
    13: "Q5_K", 14: "Q6_K", 30: "BF16",
}  # fmt: skip
"""The names of the GGML types that may stay as they are, for those who do not have ``gguf``."""
_ARCHITECTURE = re.compile(r"[a-z0-9][a-z0-9_.-]{0,63}")


@dataclass(frozen=True)
class GgufTensor:
    """A tensor: ``shape`` in torch's order, ``kind`` the number of its GGML type."""

    name: str
    shape: tuple[int, ...]
    kind: int
    offset: int

    @property
    def elements(self) -> int:
        return prod(self.shape)


@dataclass(frozen=True)
class GgufHeader:
    """What a GGUF file says of itself; long lists and those of strings are None."""

    path: Path
    facts: Mapping[str, Any]
    tensors: tuple[GgufTensor, ...]
    data: int
    """Where the tensors' data begins."""

    @property
    def architecture(self) -> str:
        return str(self.facts["general.architecture"])

    def own(self, name: str) -> Any:
        """Return a fact of this architecture, such as ``block_count``."""
        return self.facts.get(f"{self.architecture}.{name}")

    def tensor(self, name: str) -> GgufTensor | None:
        return next((tensor for tensor in self.tensors if tensor.name == name), None)


def read_header(path: Path) -> GgufHeader:
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            start = file.read(8)
            _check_start(path, start)
            limit = min(size, _LARGEST_HEADER)
            with mmap.mmap(file.fileno(), size, access=mmap.ACCESS_READ) as content:
                return _read(path, _Reader(content, limit, size))
    except (struct.error, ValueError, OSError) as error:
        raise damaged(path, str(error)) from None


def _check_start(path: Path, start: bytes) -> None:
    if start[:4] != _MAGIC:
        raise ValueError("it does not begin as a GGUF file does")
    if len(start) < 8:
        raise ValueError("it ends within its header")
    (version,) = struct.unpack("<I", start[4:])
    if version in _VERSIONS:
        return
    if int.from_bytes(start[4:], "big") in _VERSIONS:
        raise ModelSourceError(
            f"{path} is for processors with another byte order",
            hint="name the little-endian file of this model",
        )
    raise ModelSourceError(
        f"{path} is in version {version} of GGUF",
        hint="versions 2 and 3 are read: convert it again",
    )


class _Reader:
    """Reads one value after the other, and never beyond the header's limit."""

    def __init__(self, content: mmap.mmap, limit: int, size: int) -> None:
        self._content, self._limit, self._size = content, limit, size
        self.position = len(_MAGIC) + 4

    def take(self, length: int) -> bytes:
        end = self._end(length)
        taken = self._content[self.position : end]
        self.position = end
        return taken

    def skip(self, length: int) -> None:
        self.position = self._end(length)

    def _end(self, length: int) -> int:
        end = self.position + length
        if end <= self._limit:
            return end
        if self._limit < self._size:
            raise ValueError(f"its header has more than {self._limit // 1_000_000} MB")
        raise ValueError("it ends within its header")

    def number(self, form: str) -> Any:
        (value,) = struct.unpack(f"<{form}", self.take(struct.calcsize(f"<{form}")))
        return value

    def numbers(self, form: str, count: int) -> list[Any]:
        # Compared with what is left first: the count may be anything.
        return list(
            struct.unpack(f"<{count}{form}", self.take(struct.calcsize(f"<{form}") * count))
        )

    def string(self) -> str:
        return self.take(self.number("Q")).decode("utf-8", "replace")

    def count(self, what: str) -> int:
        count: int = self.number("Q")
        if count > _MOST_ENTRIES:
            raise ValueError(f"it claims to have {count} {what}")
        return count

    def value(self, kind: int) -> Any:
        if kind in _NUMBERS:
            return self.number(_NUMBERS[kind])
        if kind == _STRING:
            return self.string()
        if kind == _ARRAY:
            return self._array()
        raise ValueError(f"it has a fact of an unknown type, {kind}")

    def _array(self) -> list[Any] | None:
        kind, count = self.number("I"), self.number("Q")
        if kind in _NUMBERS and count <= _MOST_ENTRIES:
            return self.numbers(_NUMBERS[kind], count)
        if kind in _NUMBERS:
            self.skip(struct.calcsize(f"<{_NUMBERS[kind]}") * count)
        elif kind == _STRING:
            for _ in range(count):
                self.skip(self.number("Q"))
        else:
            raise ValueError(f"it has a list of an unknown type, {kind}")
        return None


def _read(path: Path, reader: _Reader) -> GgufHeader:
    tensor_count, fact_count = reader.count("tensors"), reader.count("facts")
    facts = dict(_facts(reader, fact_count))
    tensors = tuple(_tensors(reader, tensor_count))
    alignment = facts.get("general.alignment", 32)
    if not isinstance(alignment, int) or alignment < 1 or alignment & (alignment - 1):
        raise ValueError(f"its alignment cannot be {alignment}")
    if not _ARCHITECTURE.fullmatch(str(facts.get("general.architecture"))):
        raise ValueError("it names no architecture")
    names = {tensor.name for tensor in tensors}
    if len(names) < len(tensors):
        raise ValueError("it has two tensors of one name")
    return GgufHeader(path, facts, tensors, -(-reader.position // alignment) * alignment)


def _facts(reader: _Reader, count: int) -> Iterator[tuple[str, Any]]:
    for _ in range(count):
        yield reader.string(), reader.value(reader.number("I"))


def _tensors(reader: _Reader, count: int) -> Iterator[GgufTensor]:
    for _ in range(count):
        name, dimensions = reader.string(), reader.number("I")
        if dimensions > _MOST_DIMENSIONS:
            raise ValueError(f"its tensor {name[:64]!r} has {dimensions} dimensions")
        shape = tuple(reversed(reader.numbers("Q", dimensions)))
        yield GgufTensor(name, shape, reader.number("I"), reader.number("Q"))
