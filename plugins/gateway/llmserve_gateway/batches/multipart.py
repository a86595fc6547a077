"""A form with files as it arrives, in pieces of any size; nothing of it is kept in memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from email.message import Message
from typing import NamedTuple

from llmserve_gateway.errors import bad_request

_MAX_HEAD = 8 << 10
_MAX_PARTS = 32
_MAX_BOUNDARY = 70
"""As RFC 2046 has it."""
_MAX_TYPE = 1 << 10
"""Of the headers with parameters: reading its parameters takes the square of its length."""


class Part(NamedTuple):
    """The beginning of a part of the form."""

    name: str
    filename: str | None
    """None for a field that is no file."""


class Form:
    """Reads a form; ``content_type`` is the header of the request."""

    def __init__(self, content_type: str) -> None:
        boundary = ""
        if len(content_type) <= _MAX_TYPE:
            boundary = _parameter(content_type, "boundary")
        if not boundary or len(boundary) > _MAX_BOUNDARY or not boundary.isascii():
            raise bad_request("the body must be a form: multipart/form-data with a boundary")
        self._delimiter = b"\r\n--" + boundary.encode()
        # The first delimiter may be the beginning of the body.
        self._rest = b"\r\n"
        self._next: Callable[[], tuple[Part | bytes | None, bool]] = self._preamble
        self._parts = 0
        self._is_over = False

    def feed(self, data: bytes) -> Iterator[Part | bytes]:
        """Yield what a piece of the body brings: beginnings of parts, and the data between them."""
        self._rest += data
        waits = False
        while not (waits or self._is_over):
            found, waits = self._next()
            if found:
                yield found
        if self._is_over:
            self._rest = b""

    def end(self) -> None:
        """Refuse a form that ends too early."""
        if not self._is_over:
            raise bad_request("the form is cut off: its last boundary is missing")

    # Each of these returns what it has found, and whether it needs more of the body to go on.

    def _preamble(self) -> tuple[bytes, bool]:
        _, waits = self._content()
        return b"", waits

    def _content(self) -> tuple[bytes, bool]:
        found, delimiter, rest = self._rest.partition(self._delimiter)
        if delimiter:
            self._rest, self._next = rest, self._after_delimiter
            return found, False
        # Its end may be the beginning of a delimiter.
        kept = len(self._delimiter) - 1
        found, self._rest = self._rest[:-kept], self._rest[-kept:]
        return found, True

    def _after_delimiter(self) -> tuple[None, bool]:
        padding = len(self._rest) - len(self._rest.lstrip(b" \t"))
        mark = self._rest[padding : padding + 2]
        if len(mark) < 2:
            self._check_head()
            return None, True
        if mark == b"--":
            self._is_over = True
        elif mark == b"\r\n":
            # The end of this line may be that of the headers too, if there are none.
            self._rest, self._next = self._rest[padding:], self._head
        else:
            raise bad_request("the form has something after a boundary")
        return None, False

    def _head(self) -> tuple[Part | None, bool]:
        head, end, rest = self._rest.partition(b"\r\n\r\n")
        if not end:
            self._check_head()
            return None, True
        if len(head) > _MAX_HEAD:
            raise _too_long()
        self._parts += 1
        if self._parts > _MAX_PARTS:
            raise bad_request(f"the form has more than {_MAX_PARTS} parts")
        self._rest, self._next = rest, self._content
        return _part(head), False

    def _check_head(self) -> None:
        if len(self._rest) > _MAX_HEAD:
            raise _too_long()


def _too_long() -> Exception:
    return bad_request(f"the headers of a part of the form are over {_MAX_HEAD >> 10} KB")


def _part(head: bytes) -> Part:
    disposition = ""
    for line in head.decode("utf-8", errors="replace").split("\r\n"):
        name, _, value = line.partition(":")
        if name.strip().lower() == "content-disposition":
            disposition = value.strip()
    if len(disposition) > _MAX_TYPE:
        raise _too_long()
    return Part(_parameter(disposition, "name"), _filename(disposition))


def _filename(disposition: str) -> str | None:
    message = Message()
    message["content-disposition"] = disposition
    with _readable():
        return message.get_filename()


def _parameter(header: str, name: str) -> str:
    """Return a parameter of a header, with what quotes and encodings of it mean."""
    message = Message()
    message["x"] = header
    with _readable():
        value = message.get_param(name, "", header="x")
        return value[2] if isinstance(value, tuple) else str(value)


@contextmanager
def _readable() -> Iterator[None]:
    """Refuse what the standard library's reader has an error of its own for."""
    try:
        yield
    except (TypeError, ValueError):
        raise bad_request("a header of the form has parameters that cannot be read") from None
