"""Values to tensor bytes and back, as Triton lays them out: little-endian, texts by length."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from typing import Any

from llmserve.errors import ClientError, UsageError

_FORMATS = {
    "BOOL": "?",
    "INT8": "b",
    "INT16": "h",
    "INT32": "i",
    "INT64": "q",
    "UINT8": "B",
    "UINT16": "H",
    "UINT32": "I",
    "UINT64": "Q",
    "FP16": "e",
    "FP32": "f",
    "FP64": "d",
}


def pack_texts(texts: Iterable[str]) -> bytes:
    """Pack texts into the bytes of a STRING tensor."""
    parts: list[bytes] = []
    for text in texts:
        try:
            raw = text.encode()
        except UnicodeEncodeError as error:
            raise UsageError(
                f"the text has a character that UTF-8 cannot carry, at {error.start}",
                mend="give text that was read as UTF-8",
            ) from None
        parts += (struct.pack("<I", len(raw)), raw)
    return b"".join(parts)


def unpack_texts(raw: bytes) -> list[str]:
    """Read what :func:`pack_texts` wrote; anything else is the model's mistake.

    >>> unpack_texts(pack_texts(["so", "", "gut wie möglich"]))
    ['so', '', 'gut wie möglich']
    """
    texts: list[str] = []
    at = 0
    while at < len(raw):
        start = at + 4
        end = start + int.from_bytes(raw[at:start], "little")
        if start > len(raw) or end > len(raw):
            raise ClientError("the server sent a text that is cut off")
        try:
            texts.append(raw[start:end].decode())
        except UnicodeDecodeError as error:
            raise ClientError(
                f"the server sent text that is not UTF-8 (byte {raw[start + error.start]:#04x} "
                f"at {error.start})",
                mend="the model must hold back a character until it is whole",
            ) from None
        at = end
    return texts


def pack_numbers(datatype: str, values: Sequence[Any]) -> bytes:
    """Pack numbers or booleans; ValueError where one does not fit the type."""
    code = _FORMATS.get(datatype)
    if code is None:
        raise ValueError(f"a tensor of type {datatype} cannot be sent")
    kinds = (bool,) if code == "?" else (int, float) if code in "efd" else (int,)
    for value in values:
        if not isinstance(value, kinds) or (code != "?" and isinstance(value, bool)):
            raise ValueError(f"takes {datatype}, not {value!r}")
    try:
        return struct.pack(f"<{len(values)}{code}", *values)
    except (struct.error, OverflowError):
        raise ValueError(f"does not fit into {datatype}: {values[0]!r}") from None


def unpack_numbers(datatype: str, raw: bytes) -> list[Any]:
    """Read the numbers of a tensor."""
    code = _FORMATS.get(datatype)
    if code is None or len(raw) % struct.calcsize(f"<{code}"):
        raise ClientError(f"the server sent a tensor of type {datatype} that cannot be read")
    return list(struct.unpack(f"<{len(raw) // struct.calcsize(f'<{code}')}{code}", raw))
