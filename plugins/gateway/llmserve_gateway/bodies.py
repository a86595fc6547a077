"""Reading of request bodies, with limits on size, pieces, depth and time.

Only what looks like images may be more than a few megabytes. It is cut out before the rest is
parsed, which takes three times as long as looking for it, and while nothing else is answered.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AbstractContextManager, ExitStack, suppress
from dataclasses import dataclass
from secrets import token_hex
from typing import Any, NoReturn

from llmserve.runtime.contract import parse_json
from llmserve_gateway.errors import ApiError, bad_request

Receive = Callable[[], Awaitable[Any]]

MAX_BYTES = 4 << 20
MAX_IMAGE_BYTES = 64 << 20
"""What all images of a request may take beside the rest, whatever its model allows."""
MAX_PIECES = 65_536
MAX_DEPTH = 64
_TOO_LARGE = "request_too_large"
_LONG_BYTES = 32 << 10
"""What is shorter is parsed with the rest."""
_STEP = 1 << 20
_ESCAPES = (
    (b"\\/", b"/"), (b"\\u002B", b"+"), (b"\\u002b", b"+"), (b"\\u002F", b"/"),
    (b"\\u002f", b"/"), (b"\\u003D", b"="), (b"\\u003d", b"="),
)  # fmt: skip
"""How libraries of other languages write what base64 has."""
_IMAGE_PLACES = ("url", "image_url", "data", "images")
"""What the APIs call an image, or the list that has it."""
_MAX_DIGITS = 18
_TIMEOUT_SECONDS = 30.0
# A client that writes its whole body before it reads would see a reset instead of the refusal.
_MAX_DISCARDED = 64 << 20
_DISCARD_SECONDS = 10.0


class ClientDisconnected(Exception):
    """The client closed the connection before its response was complete."""


@dataclass(frozen=True, eq=False)
class ImageRoom:
    """What the images of a request may take beside the rest of its body."""

    most: Callable[[], Awaitable[int]]
    """Returns how many bytes the models that are offered allow."""
    hold: Callable[[int], AbstractContextManager[None]]
    """Counts bytes while they are read, or refuses them."""


async def read_json(
    receive: Receive, headers: Mapping[str, str], images: ImageRoom | None = None
) -> dict[str, Any]:
    """Read a JSON object; refuse a body that would be too expensive to read."""
    encoding = headers.get("content-encoding", "identity")
    if encoding != "identity":
        what = f"content-encoding {encoding[:40]!r} is not supported: send the body uncompressed"
        raise ApiError(415, what)
    most = MAX_BYTES
    if images is not None and _is_longer(headers, MAX_BYTES):
        most += await images.most()
    await check_length(receive, headers, most, _too_large(most))
    with ExitStack() as held:
        try:
            reading = _read(receive, images, held)
            body = await asyncio.wait_for(reading, _TIMEOUT_SECONDS)
        except asyncio.TimeoutError:
            what = f"the request did not arrive within {_TIMEOUT_SECONDS:g} s"
            raise ApiError(408, what) from None
        return _parsed(body)


def _parsed(body: bytes) -> dict[str, Any]:
    cut = _Cut(body) if len(body) > MAX_BYTES else None
    if cut is not None and len(cut.rest) > MAX_BYTES:
        raise _too_large_beside()
    try:
        content = parse_json(body if cut is None else cut.rest)
    except RecursionError:
        raise _too_deep() from None
    except ValueError as error:
        # If the bytes are not even text, this is the decoder's message about them.
        raise bad_request(f"the request cannot be read as JSON: {str(error)[:200]}") from None
    if not isinstance(content, dict):
        raise bad_request("the request is not a JSON object")
    check_depth(content)
    if cut is not None:
        cut.put_back(content)
    return content


class _Cut:
    """A body without its long base64, of which none is parsed."""

    # A quote that opens a text never comes after a backslash, and one that ends a text never before
    # base64: so this is always the whole of one.
    _LONG = re.compile(rb'(?<!\\)"((?:data:[^",]{0,128},)?[A-Za-z0-9+/=\\]{%d,})"' % _LONG_BYTES)

    def __init__(self, body: bytes) -> None:
        # Which nobody can have written.
        self._mark = token_hex(16)
        self._texts: list[str] = []
        self.rest = self._LONG.sub(self._kept, body)

    def _kept(self, found: re.Match[bytes]) -> bytes:
        text = found[1]
        if b"\\" in text:
            for written, sign in _ESCAPES:
                text = text.replace(written, sign)
        if b"\\" in text:
            return found[0]
        self._texts.append(text.decode("latin-1"))
        return b'"%s:%d"' % (self._mark.encode(), len(self._texts) - 1)

    def put_back(self, content: dict[str, Any]) -> None:
        """Put the texts where they were; refuse one where no API has an image."""
        nodes: list[tuple[Any, Any]] = [(content, "")]
        while nodes:
            node, name = nodes.pop()
            for at, child in node.items() if isinstance(node, dict) else enumerate(node):
                place = at if isinstance(node, dict) else name
                if isinstance(child, (dict, list)):
                    nodes.append((child, place))
                elif isinstance(child, str) and child.startswith(self._mark):
                    if place not in _IMAGE_PLACES:
                        raise _too_large_beside()
                    node[at] = self._texts[int(child.rpartition(":")[2])]


async def check_length(
    receive: Receive, headers: Mapping[str, str], most: int, error: ApiError
) -> None:
    """Refuse a body that says that it has more bytes."""
    if _is_longer(headers, most):
        await refuse(receive, headers, error)


def _is_longer(headers: Mapping[str, str], most: int) -> bool:
    length = headers.get("content-length", "")
    # Python makes no number of very many digits.
    return length.isdecimal() and (len(length) > _MAX_DIGITS or int(length) > most)


async def refuse(receive: Receive, headers: Mapping[str, str], error: ApiError) -> NoReturn:
    """Refuse a body that has not been read."""
    # A client that expects an answer first sends nothing to a refusal.
    if "expect" not in headers:
        await discard(receive)
    raise error


async def _read(receive: Receive, images: ImageRoom | None, held: ExitStack) -> bytes:
    pieces: list[bytes] = []
    size = count = 0
    most = room = MAX_BYTES
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientDisconnected
        piece = message.get("body", b"")
        size += len(piece)
        count += 1
        try:
            if size > most == MAX_BYTES and images is not None:
                most += await images.most()
            if size > most or count > MAX_PIECES:
                raise _too_large(most)
            while size > room and images is not None:
                # As it grows, not as it says: who sends nothing takes no room of others.
                held.enter_context(images.hold(_STEP))
                room += _STEP
        except ApiError:
            if message.get("more_body"):
                await discard(receive)
            raise
        pieces.append(piece)
        if not message.get("more_body"):
            return b"".join(pieces)


async def discard(receive: Receive) -> None:
    """Read the rest of a refused body, as far as that costs little."""

    async def read() -> None:
        left = _MAX_DISCARDED
        while left > 0:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise ClientDisconnected
            left -= len(message.get("body", b""))
            if not message.get("more_body"):
                return

    with suppress(asyncio.TimeoutError):
        await asyncio.wait_for(read(), _DISCARD_SECONDS)


def check_depth(content: Any) -> None:
    """Refuse what is nested too deeply for what reads it later."""
    level = [content]
    for _ in range(MAX_DEPTH):
        level = [
            child
            for node in level
            for child in (node.values() if isinstance(node, dict) else node)
            if isinstance(child, (dict, list))
        ]
        if not level:
            return
    raise _too_deep()


def _too_large(most: int) -> ApiError:
    return ApiError(413, f"the request is over {most >> 20} MB", code=_TOO_LARGE)


def _too_large_beside() -> ApiError:
    what = f"without its images, the request is over {MAX_BYTES >> 20} MB"
    return ApiError(413, what, code=_TOO_LARGE)


def _too_deep() -> ApiError:
    return bad_request(f"the request is nested more than {MAX_DEPTH} levels deep")
