"""Responses that are kept: read, listed by their items, and deleted."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from llmserve_gateway.errors import ApiError, bad_request
from llmserve_gateway.gateway import Gateway
from llmserve_gateway.keys import Key
from llmserve_gateway.openai_answers import json_response
from llmserve_gateway.stored_responses import StoredResponse, StoredResponses, owner_of

_PAGE, _LARGEST_PAGE = "20", 100


class ResponseRoutes:
    """The endpoints of a gateway that may keep no responses."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway

    @property
    def _kept(self) -> StoredResponses:
        if self._gateway.responses is None:
            what = "this gateway keeps no responses: start it with --responses FOLDER"
            raise ApiError(404, what, code="not_found")
        return self._gateway.responses

    async def get(self, request: Request, key: Key | None) -> Response:
        if request.query_params.get("stream") == "true":
            raise bad_request("stream: a response is kept as a whole", "stream")
        return json_response((await self._find(request, key)).response)

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
        """Return the items of the input, the newest first unless a request says otherwise."""
        items, query = _items(await self._find(request, key)), request.query_params
        if query.get("order", "desc") == "desc":
            items.reverse()
        limit, after = query.get("limit", _PAGE), query.get("after")
        if not (limit.isascii() and limit.isdecimal() and len(limit) < len("1000")
                and 1 <= int(limit) <= _LARGEST_PAGE):  # fmt: skip
            raise bad_request(f"limit must be an integer from 1 to {_LARGEST_PAGE}", "limit")
        if after is not None:
            ids = [item["id"] for item in items]
            if after not in ids:
                raise bad_request(f"after: there is no item {after[:80]!r}", "after")
            items = items[ids.index(after) + 1 :]
        page = items[: int(limit)]
        first, last = (page[0]["id"], page[-1]["id"]) if page else (None, None)
        more = {"first_id": first, "last_id": last, "has_more": len(page) < len(items)}
        return json_response({"object": "list", "data": page, **more})

    def _stop(self, id: str) -> None:
        if self._gateway.background is not None:
            self._gateway.background.stop(id)

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
