"""Responses that are kept: read, listed by their items, and deleted."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from llmserve.runtime.contract import INT32
from llmserve_gateway.errors import ApiError, bad_request
from llmserve_gateway.gateway import Gateway
from llmserve_gateway.kept_events import EventReaders
from llmserve_gateway.keys import Key
from llmserve_gateway.openai_answers import json_response
from llmserve_gateway.reply import EVENTS
from llmserve_gateway.stored_conversations import ItemPage, PageQuery
from llmserve_gateway.stored_responses import StoredResponse, StoredResponses, owner_of

_PAGE, _LARGEST_PAGE = "20", 100
_STREAM_HEADERS = {"cache-control": "no-cache", "x-accel-buffering": "no"}


def kept_by(gateway: Gateway) -> StoredResponses:
    """Return what a gateway keeps; one that keeps nothing says how it would."""
    if gateway.responses is None:
        what = "this gateway keeps no responses: start it with --responses FOLDER, or a database"
        raise ApiError(404, what, code="not_found")
    return gateway.responses


def read_page(query: Mapping[str, str]) -> PageQuery:
    """Return which items are asked for: the newest first unless a request says otherwise."""
    limit = query.get("limit", _PAGE)
    if not (limit.isascii() and limit.isdecimal() and len(limit) < len("1000")
            and 1 <= int(limit) <= _LARGEST_PAGE):  # fmt: skip
        raise bad_request(f"limit must be an integer from 1 to {_LARGEST_PAGE}", "limit")
    return PageQuery(int(limit), query.get("after"), query.get("order", "desc") == "desc")


def _starting_after(query: Mapping[str, str]) -> int:
    """Return the number of the last event that a client has."""
    if (number := query.get("starting_after")) is None:
        return -1
    if not (number.isascii() and number.isdecimal() and len(number) < len(str(INT32))):
        raise bad_request("starting_after must be the number of an event", "starting_after")
    return int(number)


def page_content(page: ItemPage) -> Response:
    first, last = (page.items[0]["id"], page.items[-1]["id"]) if page.items else (None, None)
    more = {"first_id": first, "last_id": last, "has_more": page.has_more}
    return json_response({"object": "list", "data": page.items, **more})


class ResponseRoutes:
    """The endpoints of a gateway that may keep no responses."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        self._readers = EventReaders()

    @property
    def _kept(self) -> StoredResponses:
        return kept_by(self._gateway)

    async def get(self, request: Request, key: Key | None) -> Response:
        after = _starting_after(request.query_params)
        found = await self._find(request, key)
        if request.query_params.get("stream") != "true":
            return json_response(found.response)
        if not found.is_of_background:
            what = "stream: only a response that was asked with background: true is streamed again"
            raise bad_request(what, "stream")
        timeout = self._gateway.settings.request_timeout
        events = self._readers.read(self._kept, found, after, timeout)
        return StreamingResponse(events, media_type=EVENTS.media_type, headers=_STREAM_HEADERS)

    async def remove(self, request: Request, key: Key | None) -> Response:
        name = request.path_params["id"]
        await self._kept.remove(owner_of(key), name)
        self._stop(name)
        return json_response({"id": name, "object": "response", "deleted": True})

    async def cancel(self, request: Request, key: Key | None) -> Response:
        cancelled = await self._kept.cancel(owner_of(key), request.path_params["id"])
        if cancelled.status == "cancelled":
            self._stop(cancelled.id)
        return json_response(cancelled.response)

    async def items(self, request: Request, key: Key | None) -> Response:
        items, query = _items(await self._find(request, key)), read_page(request.query_params)
        if query.is_descending:
            items.reverse()
        if query.after is not None:
            ids = [item["id"] for item in items]
            if query.after not in ids:
                raise query.no_such_item()
            items = items[ids.index(query.after) + 1 :]
        return page_content(ItemPage(items[: query.limit], len(items) > query.limit))

    def _stop(self, id: str) -> None:
        if self._gateway.later is not None:
            self._gateway.later.stop(id)

    async def _find(self, request: Request, key: Key | None) -> StoredResponse:
        return await self._kept.find(owner_of(key), request.path_params["id"])


def _items(stored: StoredResponse) -> list[dict[str, Any]]:
    """Return the input with an id for each item, as OpenAI's server gives them."""
    found = []
    for index, item in enumerate(stored.input):
        content = item.get("content")
        parts = {"content": [{"type": "input_text", "text": content}]}
        is_text = isinstance(content, str) and item.get("role") != "assistant"
        name = f"in_{stored.id.removeprefix('resp_')}_{index}"
        found.append({"type": "message", "id": name, **item, **(parts if is_text else {})})
    return found
