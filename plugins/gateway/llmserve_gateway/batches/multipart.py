"""A form with files as it arrives, in pieces of any size; nothing of it is kept in memory."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from email.message import Message
from typing import NamedTuple

from python_multipart import MultipartParser
from python_multipart.exceptions import FormParserError

from llmserve_gateway.errors import bad_request

_MAX_HEAD = 8 << 10
_MAX_PARTS = 32
_MAX_BOUNDARIES = 2 * _MAX_PARTS
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
        self._found: list[Part | bytes] = []
        self._parts = self._head_size = self._boundaries = 0
        self._name, self._value = bytearray(), bytearray()
        self._disposition = b""
        self._is_over = False
        self._boundary = b"\r\n--" + boundary.encode()
        self._parser = MultipartParser(
            boundary,
            {
                "on_part_begin": self._begin,
                "on_header_begin": self._begin_header,
                "on_header_field": self._add_to_name,
                "on_header_value": self._add_to_value,
                "on_header_end": self._end_header,
                "on_headers_finished": self._end_head,
                "on_part_data": self._add_data,
                "on_end": self._end,
            },
        )
        # It would print a line about each form that is wrong.
        self._parser.logger = logging.Logger("form", logging.CRITICAL)

    def feed(self, data: bytes) -> Iterator[Part | bytes]:
        """Yield what a piece of the body brings: beginnings of parts, and the data between them."""
        # What only begins like one is read byte by byte, a thousand times slower than the rest.
        self._boundaries += data.count(self._boundary)
        if self._boundaries > _MAX_BOUNDARIES:
            raise bad_request(f"the form has more than {_MAX_BOUNDARIES} boundaries")
        try:
            self._parser.write(data)
        except FormParserError:
            raise _unreadable() from None
        found, self._found = self._found, []
        yield from found

    def end(self) -> None:
        """Refuse a form that ends too early."""
        if not self._is_over:
            raise bad_request("the form is cut off: its last boundary is missing")

    def _begin(self) -> None:
        self._parts += 1
        if self._parts > _MAX_PARTS:
            raise bad_request(f"the form has more than {_MAX_PARTS} parts")
        self._head_size = 0
        self._disposition = b""

    def _begin_header(self) -> None:
        self._name.clear()
        self._value.clear()

    def _add_to_name(self, data: bytes, start: int, end: int) -> None:
        self._count(end - start)
        self._name += data[start:end]

    def _add_to_value(self, data: bytes, start: int, end: int) -> None:
        self._count(end - start)
        self._value += data[start:end]

    def _end_header(self) -> None:
        if self._name.lower() == b"content-disposition":
            self._disposition = bytes(self._value)

    def _count(self, size: int) -> None:
        self._head_size += size
        if self._head_size > _MAX_HEAD:
            raise _unreadable()

    def _end_head(self) -> None:
        if len(self._disposition) > _MAX_TYPE:
            raise _unreadable()
        disposition = self._disposition.decode("utf-8", errors="replace").strip()
        self._found.append(Part(_parameter(disposition, "name"), _filename(disposition)))

    def _add_data(self, data: bytes, start: int, end: int) -> None:
        self._found.append(data[start:end])

    def _end(self) -> None:
        self._is_over = True


def _unreadable() -> Exception:
    return bad_request(
        "the form cannot be read: a boundary or a header is wrong, the headers of a part are over "
        f"{_MAX_HEAD >> 10} KB, or content-disposition is over {_MAX_TYPE >> 10} KB"
    )


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
