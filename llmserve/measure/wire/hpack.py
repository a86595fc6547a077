"""As much of HPACK (RFC 7541) as gRPC's headers need.

We write literals only and allow the server no table, so that there is none to keep. Of what it
sends, only literal names matter: those of gRPC's status are in no static table.
"""

from __future__ import annotations

from collections.abc import Iterable

_STATIC = 61
_KNOWN = 64


class UnreadableError(Exception):
    """The server uses a table that it was not allowed."""


def encode(headers: Iterable[tuple[str, str]]) -> bytes:
    """Write headers as literals that are not to be remembered."""
    return b"".join(_literal(name, value) for name, value in headers)


def decode(block: bytes) -> dict[str, str]:
    """Read the headers whose names and values are plain; others are left out."""
    found: dict[str, str] = {}
    at = 0
    while at < len(block):
        first = block[at]
        if first & 0x80:
            index, at = _read_integer(block, at, 7)
            _check(index)
            continue
        if first & 0xE0 == 0x20:
            _, at = _read_integer(block, at, 5)
            continue
        index, at = _read_integer(block, at, 6 if first & 0x40 else 4)
        _check(index)
        name: str | None = None
        if not index:
            name, at = _read_text(block, at)
        value, at = _read_text(block, at)
        if name is not None and value is not None:
            found[name] = value
    return found


class Reader:
    """Reads headers, which are the same for nearly all answers, once."""

    def __init__(self) -> None:
        self._known: dict[bytes, dict[str, str]] = {}

    def read(self, block: bytes) -> dict[str, str]:
        """Do as :func:`decode` does."""
        found = self._known.get(block)
        if found is None:
            if len(self._known) >= _KNOWN:
                self._known.clear()
            found = self._known[block] = decode(block)
        return found


def _literal(name: str, value: str) -> bytes:
    written = b"\0"
    for text in (name.encode(), value.encode()):
        written += _integer(len(text), 7) + text
    return written


def _integer(value: int, bits: int) -> bytes:
    most = (1 << bits) - 1
    if value < most:
        return bytes([value])
    written = bytearray([most])
    value -= most
    while value >= 0x80:
        written.append(value & 0x7F | 0x80)
        value >>= 7
    written.append(value)
    return bytes(written)


def _read_integer(block: bytes, at: int, bits: int) -> tuple[int, int]:
    most = (1 << bits) - 1
    value = block[at] & most
    at += 1
    if value < most:
        return value, at
    shift = 0
    while True:
        byte = block[at]
        at += 1
        value += (byte & 0x7F) << shift
        shift += 7
        if not byte & 0x80:
            return value, at


def _read_text(block: bytes, at: int) -> tuple[str | None, int]:
    packed = bool(block[at] & 0x80)
    length, at = _read_integer(block, at, 7)
    raw = block[at : at + length]
    return (None if packed else raw.decode("latin-1")), at + length


def _check(index: int) -> None:
    if index > _STATIC:
        raise UnreadableError(f"header {index} of a table that was not allowed")
