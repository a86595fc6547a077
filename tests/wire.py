"""HTTP/1.1 and HTTP/2 as an attacker writes them: by the byte, with nothing checked on the way.

Client libraries refuse to send much that a server accepts, so what a server refuses can only be
found out with its own bytes.
"""

from __future__ import annotations

import socket
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

TIMEOUT = 20.0
_UNFINISHED = 0.5
"""Seconds after which a server that was sent odd headers still waits for their end."""
_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_DATA, _HEADERS, _RESET, _SETTINGS, _PING, _GOAWAY, _CONTINUATION = 0, 1, 3, 4, 6, 7, 9
_END_STREAM, _END_HEADERS, _ACK = 1, 4, 1
# Without a table, the server's answers have every header in full.
_NO_TABLE = bytes([0, 1, 0, 0, 0, 0])


def over_http(port: int, path: str, headers: bytes = b"", *, body: bytes = b"") -> bytes:
    """Send a request whose header lines are these bytes; return the answer, empty if refused."""
    verb = b"POST" if body else b"GET"
    head = b"%s /%s HTTP/1.1\r\nHost: x\r\nConnection: close\r\n" % (verb, path.encode())
    head += b"Content-Length: %d\r\n" % len(body) if body else b""
    answer = b""
    with socket.create_connection(("127.0.0.1", port), timeout=_UNFINISHED) as connection:
        try:
            connection.sendall(head + headers + b"\r\n" + body)
            while received := connection.recv(65536):
                answer += received
        except (ConnectionError, TimeoutError):
            pass
    return answer


def integer(value: int, prefix: int, first: int = 0) -> bytes:
    """Encode an integer as HPACK does, in the last ``prefix`` bits of a first byte."""
    most = (1 << prefix) - 1
    if value < most:
        return bytes([first | value])
    encoded, value = [first | most], value - most
    while value >= 128:
        encoded.append(value % 128 | 128)
        value //= 128
    return bytes([*encoded, value])


def string(value: bytes) -> bytes:
    return integer(len(value), 7) + value


PLAIN, ADDED, NEVER = 0x00, 0x40, 0x10
"""Representations of a field: not in the table, added to it, and never in any table."""


def header(name: bytes, value: bytes, kind: int = PLAIN) -> bytes:
    """Encode a field as a literal, whatever bytes it has."""
    return bytes([kind]) + string(name) + string(value)


_CODES = dict(
    zip(
        b"012aceiost %-./3456789=A_bdfghlmnpru:BCDEFGHIJKLMNOPQRSTUVWYjkqvwxyz",
        [(n, 5) for n in range(10)]
        + [(n, 6) for n in range(0x14, 0x2E)]
        + [(n, 7) for n in range(0x5C, 0x7C)],
        strict=True,
    )
)
"""The codes of RFC 7541, Appendix B, that have up to seven bits, and their lengths."""


def coded(name: bytes, value: bytes) -> bytes:
    """Encode a field as a literal whose name is in Huffman's code."""
    bits = "".join(f"{_CODES[byte][0]:0{_CODES[byte][1]}b}" for byte in name)
    bits += "1" * (-len(bits) % 8)
    size = len(bits) // 8
    return b"\0" + integer(size, 7, 0x80) + int(bits, 2).to_bytes(size, "big") + string(value)


def newest(value: bytes | None = None) -> bytes:
    """Refer to the newest field of the table: all of it, or its name with another value."""
    return integer(62, 7, 0x80) if value is None else integer(62, 4) + string(value)


@dataclass
class Reply:
    """What a server answered to one call."""

    headers: dict[bytes, bytes] = field(default_factory=dict)
    messages: bytes = b""
    closed: str = ""
    """How the server ended the stream or the connection, if not with its trailers."""

    @property
    def accepted(self) -> bool:
        return self.headers.get(b"grpc-status") == b"0"

    @property
    def error(self) -> str:
        return self.headers.get(b"grpc-message", b"").decode(errors="replace") or self.closed


class Http2:
    """A connection to a gRPC server; ``call`` sends one request after the other on it."""

    def __init__(self, port: int) -> None:
        self._socket = socket.create_connection(("127.0.0.1", port), timeout=TIMEOUT)
        self._stream = -1
        self._socket.sendall(_PREFACE + _frame(_SETTINGS, 0, 0, _NO_TABLE))

    def call(
        self,
        method: str,
        message: bytes = b"",
        fields: Iterable[bytes] = (),
        *,
        before: Iterable[bytes] = (),
        pieces: int = 1,
    ) -> Reply:
        """Call a method of Triton's service with these encoded fields among the headers.

        ``before`` comes ahead of the pseudo-headers; the block is sent in as many frames as
        ``pieces``.
        """
        self._stream += 2
        block = b"".join([
            *before,
            header(b":method", b"POST"),
            header(b":scheme", b"http"),
            header(b":path", f"/inference.GRPCInferenceService/{method}".encode()),
            header(b":authority", b"localhost"),
            header(b"te", b"trailers"),
            header(b"content-type", b"application/grpc"),
            *fields,
        ])  # fmt: skip
        size = -(-len(block) // pieces)
        frames = b""
        for start in range(0, len(block), size):
            kind = _CONTINUATION if start else _HEADERS
            flags = 0 if start + size < len(block) else _END_HEADERS
            frames += _frame(kind, flags, self._stream, block[start : start + size])
        body = b"\0" + len(message).to_bytes(4, "big") + message
        frames += _frame(_DATA, _END_STREAM, self._stream, body)
        try:
            self._socket.sendall(frames)
            return self._reply()
        except (ConnectionError, TimeoutError) as error:
            return Reply(closed=type(error).__name__)

    def close(self) -> None:
        self._socket.close()

    def _reply(self) -> Reply:
        reply, block = Reply(), b""
        while True:
            kind, flags, stream, payload = self._read()
            if kind == _SETTINGS and not flags & _ACK:
                self._socket.sendall(_frame(_SETTINGS, _ACK, 0, b""))
            elif kind == _PING and not flags & _ACK:
                self._socket.sendall(_frame(_PING, _ACK, 0, payload))
            elif kind == _GOAWAY:
                return Reply(closed=f"GOAWAY {payload[8:].decode(errors='replace')}".strip())
            elif stream != self._stream:
                continue
            elif kind == _RESET:
                return Reply(reply.headers, reply.messages, f"RST {int.from_bytes(payload, 'big')}")
            elif kind == _DATA:
                reply.messages += payload
            elif kind in (_HEADERS, _CONTINUATION):
                block += payload
                if flags & _END_HEADERS:
                    reply.headers |= dict(_decoded(block))
                    block = b""
            if flags & _END_STREAM and kind in (_HEADERS, _DATA):
                return reply

    def _read(self) -> tuple[int, int, int, bytes]:
        head = self._receive(9)
        payload = self._receive(int.from_bytes(head[:3], "big"))
        return head[3], head[4], int.from_bytes(head[5:], "big") & 0x7FFFFFFF, payload

    def _receive(self, size: int) -> bytes:
        data = b""
        while len(data) < size:
            if not (received := self._socket.recv(size - len(data))):
                raise ConnectionResetError
            data += received
        return data


@contextmanager
def over_grpc(port: int) -> Iterator[Http2]:
    connection = Http2(port)
    try:
        yield connection
    finally:
        connection.close()


def _frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    head = len(payload).to_bytes(3, "big") + bytes([kind, flags])
    return head + stream.to_bytes(4, "big") + payload


def _decoded(block: bytes) -> Iterator[tuple[bytes, bytes]]:
    """Decode the fields that have a literal name; gRPC's servers use no Huffman codes for them."""
    position = 0

    def number(prefix: int) -> int:
        nonlocal position
        value, shift = block[position] & ((1 << prefix) - 1), 0
        position += 1
        if value == (1 << prefix) - 1:
            while True:
                byte = block[position]
                position += 1
                value += (byte & 127) << shift
                shift += 7
                if byte < 128:
                    break
        return value

    def text() -> bytes:
        nonlocal position
        size = number(7)
        position += size
        return block[position - size : position]

    while position < len(block):
        first = block[position]
        if first & 0x80:
            number(7)
        elif first & 0xE0 == 0x20:
            number(5)
        else:
            index = number(6 if first & 0x40 else 4)
            name = text() if index == 0 else b""
            value = text()
            if name:
                yield name, value


def message(fields: Mapping[int, bytes]) -> bytes:
    """Encode a message of protocol buffers whose fields are short byte strings."""
    return b"".join(
        bytes([number << 3 | 2, len(value)]) + value for number, value in fields.items()
    )
