"""Reads an answer of HTTP/1.1 from the bytes of a connection, whoever receives them.

The standard library reads answers in threads alone, and without limits. This is one reader for
threads and for asyncio, around the parser of httptools. That leaves open what is too much, and what
the end of a connection means.
"""

from __future__ import annotations

import httptools

MOST_HEAD = 64 << 10
"""Of what is no body: a head, the sizes of chunks, and what follows the last one."""
MOST_BODY = 256 << 20
"""Embeddings of a request are the largest answers: 2,048 of 4,096 numbers are 160 MB of text."""
MOST_LINE = 16 << 20
"""Of a stream; nothing else of one is kept."""
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
        self._parser = httptools.HttpResponseParser(_Parsed(self))
        self._body: list[bytes] = []
        self._without_body = 0
        """The bytes that have come since the last ones of the body."""
        self._ends_with_connection = False

    def feed(self, data: bytes) -> bytes:
        """Return what the bytes have of the body."""
        self.has_begun = True
        if self.is_complete:
            # Nothing was asked for that this could be the answer to.
            self.keeps_connection = self.keeps_connection and not data
            return b""
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            refusal = error.__context__ if error.__context__ is not None else error
            if not self.is_complete:
                raise BrokenAnswerError(f"this is no answer of HTTP: {refusal}") from None
            self.keeps_connection = False
        body = b"".join(self._body)
        self._body.clear()
        self._without_body = 0 if body else self._without_body + len(data)
        if self._without_body > MOST_HEAD and not self.is_complete:
            raise BrokenAnswerError(f"the answer has over {MOST_HEAD >> 10} KB that are no body")
        return body

    def end(self) -> None:
        """Note the end of the connection, which is that of some answers."""
        self.keeps_connection = False
        if not self.status:
            raise BrokenAnswerError("the server closed the connection without an answer")
        if not self.is_complete and not self._ends_with_connection:
            raise BrokenAnswerError("the server closed the connection before the answer was whole")
        self.is_complete = True

    def note_head(self, headers: dict[str, str]) -> None:
        status = self._parser.get_status_code()
        if status < 200 or self.is_complete:
            # An interim answer, which another one follows; or one that nobody asked for.
            return
        coding = headers.get("transfer-encoding", "")
        if coding.lower() not in ("", "chunked"):
            raise BrokenAnswerError(f"nobody asked for the encoding {coding[:60]!r}")
        self.status, self.headers = status, headers
        is_sized = coding or "content-length" in headers or status in _WITHOUT_BODY
        self._ends_with_connection = not is_sized

    def note_body(self, data: bytes) -> None:
        if not self.is_complete:
            self._body.append(data)

    def note_end(self) -> None:
        # What comes after the end is another answer, which nobody asked for.
        self.keeps_connection = not self.is_complete and self._parser.should_keep_alive()
        self.is_complete = bool(self.status)


class _Parsed:
    """What the parser tells of an answer, by the names that it asks for."""

    def __init__(self, reader: AnswerReader) -> None:
        self._reader = reader
        self._headers: dict[str, str] = {}

    def on_message_begin(self) -> None:
        self._headers = {}
        if self._reader.is_complete:
            self._reader.keeps_connection = False

    def on_header(self, name: bytes, value: bytes) -> None:
        key, text = name.decode("latin-1").lower(), value.decode("latin-1")
        headers = self._headers
        headers[key] = f"{headers[key]}, {text}" if key in headers else text

    def on_headers_complete(self) -> None:
        self._reader.note_head(dict(self._headers))

    def on_body(self, data: bytes) -> None:
        self._reader.note_body(data)

    def on_message_complete(self) -> None:
        self._reader.note_end()


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
