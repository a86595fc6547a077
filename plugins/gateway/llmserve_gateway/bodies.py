"""Reading of request bodies, with limits on size, pieces, depth and time."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from typing import Any, NoReturn

from llmserve.runtime.contract import parse_json
from llmserve_gateway.errors import ApiError, bad_request

Receive = Callable[[], Awaitable[Any]]

MAX_BYTES = 4 << 20
MAX_PIECES = 65_536
MAX_DEPTH = 64
_MAX_DIGITS = 18
_TIMEOUT_SECONDS = 30.0
# A client that writes its whole body before it reads would see a reset instead of the refusal.
_MAX_DISCARDED = 64 << 20
_DISCARD_SECONDS = 10.0


class ClientDisconnected(Exception):
    """The client closed the connection before its response was complete."""


async def read_json(receive: Receive, headers: Mapping[str, str]) -> dict[str, Any]:
    """Read a JSON object; refuse a body that would be too expensive to read."""
    encoding = headers.get("content-encoding", "identity")
    if encoding != "identity":
        what = f"content-encoding {encoding[:40]!r} is not supported: send the body uncompressed"
        raise ApiError(415, what)
    await check_length(receive, headers, MAX_BYTES, _too_large())
    try:
        body = await asyncio.wait_for(_read(receive), _TIMEOUT_SECONDS)
    except asyncio.TimeoutError:
        raise ApiError(408, f"the request did not arrive within {_TIMEOUT_SECONDS:g} s") from None
    try:
        content = parse_json(body)
    except RecursionError:
        raise _too_deep() from None
    except ValueError as error:
        # If the bytes are not even text, this is the decoder's message about them.
        raise bad_request(f"the request cannot be read as JSON: {str(error)[:200]}") from None
    if not isinstance(content, dict):
        raise bad_request("the request is not a JSON object")
    check_depth(content)
    return content


async def check_length(
    receive: Receive, headers: Mapping[str, str], most: int, error: ApiError
) -> None:
    """Refuse a body that says that it has more bytes."""
    length = headers.get("content-length", "")
    # Python makes no number of very many digits.
    if length.isdecimal() and (len(length) > _MAX_DIGITS or int(length) > most):
        await refuse(receive, headers, error)


async def refuse(receive: Receive, headers: Mapping[str, str], error: ApiError) -> NoReturn:
    """Refuse a body that has not been read."""
    # A client that expects an answer first sends nothing to a refusal.
    if "expect" not in headers:
        await discard(receive)
    raise error


async def _read(receive: Receive) -> bytes:
    pieces: list[bytes] = []
    size = count = 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientDisconnected
        piece = message.get("body", b"")
        size += len(piece)
        count += 1
        if size > MAX_BYTES or count > MAX_PIECES:
            if message.get("more_body"):
                await discard(receive)
            raise _too_large()
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


def _too_large() -> ApiError:
    return ApiError(413, f"the request is over {MAX_BYTES >> 20} MB", code="request_too_large")


def _too_deep() -> ApiError:
    return bad_request(f"the request is nested more than {MAX_DEPTH} levels deep")
