"""Reads an answer of HTTP/1.1 from the bytes of a connection, whoever receives them.

The standard library reads answers in threads alone, and without limits. This is one reader for
threads and for asyncio, in a tenth of the processor time of a whole client for asyncio, which
would show in the times of a load generator.
"""

from __future__ import annotations

import re
from collections.abc import Callable

MOST_HEAD = 64 << 10
MOST_BODY = 256 << 20
"""Embeddings of a request are the largest answers: 2,048 of 4,096 numbers are 160 MB of text."""
MOST_LINE = 16 << 20
"""Of a stream; nothing else of one is kept."""
_MOST_SIZE = 4 << 10
"""Of the line before a chunk."""
_BLANK = re.compile(rb"\r?\n\r?\n")
_STATUS = re.compile(rb"HTTP/1\.([01]) ([1-5][0-9]{2})(?: .*)?")
_NAME = re.compile(rb"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
_SIZE = re.compile(rb"[0-9A-Fa-f]{1,15}")
_WITHOUT_BODY = (204, 304)


class BrokenAnswerError(ConnectionError):
    """The connection was made, and what came on it is no whole answer, or too much."""


class AnswerReader:
    """What has arrived of one answer."""

    def __init__(self) -> None:
        self.status = 0
        """0 until the head has arrived."""
        self.headers: dict[str, str] = {}
        self.is_complete = False
        self.has_begun = False
        self.keeps_connection = False
        """Whether another request may be sent on the connection when the answer is complete."""
        self._rest = b""
        self._left: int | None = None
        """The bytes to come of the body, or of a chunk; None is until the connection ends."""
        self._read_line: Callable[[bytes], None] | None = None
        """What reads the next line between chunks, if the body has any."""
        self._trailers = 0

    def feed(self, data: bytes) -> bytes:
        """Return what the bytes have of the body."""
        self.has_begun = True
        if self._rest:
            data, self._rest = self._rest + data, b""
        if not self.status:
            data = self._take_head(data)
            if not self.status:
                return b""
        if self.is_complete:
            # Nothing was asked for that this could be the answer to.
            self.keeps_connection = self.keeps_connection and not data
            return b""
        if self._read_line is not None:
            return self._take_chunks(data)
        if self._left is None:
            return data
        body = data[: self._left]
        self._left -= len(body)
        if not self._left:
            self._complete(data[len(body) :])
        return body

    def end(self) -> None:
        """Note the end of the connection, which is that of some answers."""
        self.keeps_connection = False
        if not self.status:
            raise BrokenAnswerError("the server closed the connection without an answer")
        if not self.is_complete and (self._left is not None or self._read_line is not None):
            raise BrokenAnswerError("the server closed the connection before the answer was whole")
        self.is_complete = True

    def _complete(self, more: bytes = b"") -> None:
        self.is_complete = True
        self.keeps_connection = self.keeps_connection and not more

    def _take_head(self, data: bytes) -> bytes:
        """Read the head if it is there, and return what follows it."""
        while found := _BLANK.search(data, 0, MOST_HEAD):
            head, data = data[: found.start()], data[found.end() :]
            self._read_head(head)
            if self.status >= 200:
                return data
            # An interim answer: another one follows.
            self.status = 0
        if len(data) >= MOST_HEAD:
            raise BrokenAnswerError(f"the head of the answer is over {MOST_HEAD >> 10} KB")
        self._rest = data
        return b""

    def _read_head(self, head: bytes) -> None:
        first, *lines = head.split(b"\n")
        match = _STATUS.fullmatch(first.rstrip(b"\r"))
        if match is None:
            raise BrokenAnswerError(f"this is no answer of HTTP: {first[:60].decode('latin-1')}")
        headers: dict[str, str] = {}
        for line in lines:
            name, colon, value = line.partition(b":")
            if not colon or not _NAME.fullmatch(name):
                raise BrokenAnswerError("the answer has a header that cannot be read")
            key, text = name.decode().lower(), value.strip().decode("latin-1")
            headers[key] = f"{headers[key]}, {text}" if key in headers else text
        self.status, self.headers = int(match[2]), headers
        wish = headers.get("connection", "").lower()
        self.keeps_connection = "keep-alive" in wish if match[1] == b"0" else "close" not in wish
        self._find_end(headers)

    def _find_end(self, headers: dict[str, str]) -> None:
        """Find out how the end of the body is known."""
        self._left, self._read_line = None, None
        coding = headers.get("transfer-encoding", "").lower()
        if self.status < 200 or self.status in _WITHOUT_BODY:
            self.is_complete = self.status >= 200
        elif coding == "chunked":
            self._left, self._read_line = 0, self._read_size
        elif coding:
            raise BrokenAnswerError("the answer has an encoding that nobody asked for")
        elif (length := headers.get("content-length")) is not None:
            # Twice the same is one.
            lengths = {text.strip() for text in length.split(",")}
            text = lengths.pop()
            if lengths or not (text.isascii() and text.isdigit() and len(text) < 16):
                raise BrokenAnswerError("the answer has a length that cannot be read")
            self._left = int(text)
            self.is_complete = self._left == 0
        else:
            self.keeps_connection = False

    def _take_chunks(self, data: bytes) -> bytes:
        found: list[bytes] = []
        at, end = 0, len(data)
        while at < end and not self.is_complete:
            if self._left:
                piece = data[at : at + self._left]
                found.append(piece)
                at += len(piece)
                self._left -= len(piece)
                continue
            stop = data.find(b"\n", at)
            if stop < 0:
                if end - at > _MOST_SIZE:
                    raise BrokenAnswerError("the answer has a chunk whose size cannot be read")
                self._rest = data[at:]
                break
            assert self._read_line is not None  # noqa: S101
            self._read_line(data[at:stop].rstrip(b"\r"))
            at = stop + 1
        if self.is_complete:
            self._complete(data[at:])
        return found[0] if len(found) == 1 else b"".join(found)

    def _read_size(self, line: bytes) -> None:
        size = line.partition(b";")[0].strip()
        if not _SIZE.fullmatch(size):
            raise BrokenAnswerError("the answer has a chunk whose size cannot be read")
        self._left = int(size, 16)
        self._read_line = self._read_end_of_chunk if self._left else self._read_trailer

    def _read_end_of_chunk(self, line: bytes) -> None:
        if line:
            raise BrokenAnswerError("the answer has a chunk that is longer than it says")
        self._read_line = self._read_size

    def _read_trailer(self, line: bytes) -> None:
        self._trailers += len(line)
        if self._trailers > MOST_HEAD:
            raise BrokenAnswerError(f"the end of the answer is over {MOST_HEAD >> 10} KB")
        self.is_complete = not line


class LineReader:
    """The lines of a stream, each as soon as it is whole."""

    def __init__(self) -> None:
        self._rest: list[bytes] = []
        self._size = 0

    def feed(self, data: bytes) -> list[bytes]:
        first, *others = data.split(b"\n")
        self._rest.append(first)
        self._size += len(first)
        if self._size > MOST_LINE:
            raise BrokenAnswerError(f"the stream has a line of over {MOST_LINE >> 20} MB")
        if not others:
            return []
        whole = [b"".join(self._rest), *others[:-1]]
        self._rest, self._size = [others[-1]], len(others[-1])
        return whole

    def end(self) -> list[bytes]:
        """Return the last line, which has no end of its own."""
        last = b"".join(self._rest)
        return [last] if last else []


class BodyReader:
    """The whole body of an answer."""

    def __init__(self) -> None:
        self._pieces: list[bytes] = []
        self._size = 0

    def feed(self, data: bytes) -> None:
        self._size += len(data)
        if self._size > MOST_BODY:
            raise BrokenAnswerError(f"the answer is over {MOST_BODY >> 20} MB")
        self._pieces.append(data)

    def end(self) -> bytes:
        return self._pieces[0] if len(self._pieces) == 1 else b"".join(self._pieces)
