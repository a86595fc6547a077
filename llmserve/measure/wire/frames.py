"""Frames of HTTP/2 (RFC 9113): the few that a client of gRPC meets."""

from __future__ import annotations

import struct

DATA, HEADERS, RST_STREAM, SETTINGS, PING, GOAWAY, WINDOW_UPDATE, CONTINUATION = (
    0, 1, 3, 4, 6, 7, 8, 9,
)  # fmt: skip
END_STREAM, ACK, END_HEADERS, PADDED, PRIORITY = 0x1, 0x1, 0x4, 0x8, 0x20
HEADER_TABLE_SIZE, ENABLE_PUSH, MAX_STREAMS, INITIAL_WINDOW, MAX_FRAME = 1, 2, 3, 4, 5
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
WIDEST = 2**31 - 1
"""The largest window: we take what comes as fast as it comes."""
CANCEL = struct.pack(">I", 8)
HEAD = struct.Struct(">HBBBI")
_SIZE = HEAD.size


Frame = tuple[int, int, int, bytes]
"""A frame, without its padding: kind, flags, stream and payload."""


def pack(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    """Write a frame."""
    size = len(payload)
    return HEAD.pack(size >> 8, size & 0xFF, kind, flags, stream) + payload


def pack_settings(settings: dict[int, int]) -> bytes:
    """Write what we ask of the server."""
    body = b"".join(struct.pack(">HI", key, value) for key, value in settings.items())
    return pack(SETTINGS, 0, 0, body)


def unpack_settings(payload: bytes) -> dict[int, int]:
    """Read what the server asks of us."""
    return dict(struct.iter_unpack(">HI", payload))


def pack_window(stream: int, more: int) -> bytes:
    """Allow the server to send so much more."""
    return pack(WINDOW_UPDATE, 0, stream, struct.pack(">I", more))


class Splitter:
    """Cuts what comes from a connection into frames."""

    def __init__(self) -> None:
        self.rest = b""
        """What came of a frame that is not complete."""

    def feed(self, data: bytes) -> list[Frame]:
        """Give the frames that are complete now."""
        if self.rest:
            data = self.rest + data
        found = []
        at, size = 0, len(data)
        while size - at >= _SIZE:
            high, low, kind, flags, stream = HEAD.unpack_from(data, at)
            begin = at + _SIZE
            end = begin + (high << 8 | low)
            if end > size:
                break
            payload = data[begin:end]
            if flags & (PADDED | PRIORITY):
                payload = _unwrapped(kind, flags, payload)
            found.append((kind, flags, stream & WIDEST, payload))
            at = end
        self.rest = data[at:]
        return found


def _unwrapped(kind: int, flags: int, payload: bytes) -> bytes:
    if flags & PADDED and kind in (DATA, HEADERS):
        payload = payload[1 : len(payload) - payload[0]]
    if flags & PRIORITY and kind == HEADERS:
        payload = payload[5:]
    return payload
