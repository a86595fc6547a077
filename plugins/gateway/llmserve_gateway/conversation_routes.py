"""The endpoints of conversations that are kept, and of their items."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from llmserve_gateway.bodies import read_json
from llmserve_gateway.errors import bad_request
from llmserve_gateway.fields import Body, Field, check_mapping, ignored, needed
from llmserve_gateway.gateway import Gateway
from llmserve_gateway.kept_items import Item
from llmserve_gateway.keys import Key
from llmserve_gateway.openai_answers import json_response
from llmserve_gateway.response_routes import kept_by, page_content, read_page
from llmserve_gateway.responses import ITEMS, read_items
from llmserve_gateway.stored_conversations import StoredConversation, StoredConversations, items_of
from llmserve_gateway.stored_responses import owner_of

_PAIRS, _LONGEST_NAME, _LONGEST_VALUE = 16, 64, 512


def _metadata(value: Any, name: str) -> dict[str, Any]:
    content = check_mapping(value, name)
    fits = len(content) <= _PAIRS and all(
        len(key) <= _LONGEST_NAME and isinstance(text, str) and len(text) <= _LONGEST_VALUE
        for key, text in content.items()
    )
    if not fits:
        what = f"{name} has at most {_PAIRS} texts of {_LONGEST_VALUE} characters"
        raise bad_request(f"{what}, by names of {_LONGEST_NAME}", name)
    return content


_SCHEMA = {
    "type": "object",
    "maxProperties": _PAIRS,
    "propertyNames": {"maxLength": _LONGEST_NAME},
    "additionalProperties": {"type": "string", "maxLength": _LONGEST_VALUE},
}
_METADATA: Field[dict[str, Any] | None] = Field(
    "metadata", "What is said of the conversation.", _metadata, _SCHEMA
)
_NEW_METADATA: Field[dict[str, Any]] = needed(_METADATA)
_ITEMS: Field[list[Item] | None] = Field("items", "What is said in it.", read_items, ITEMS)
_NEW_ITEMS: Field[list[Item]] = needed(_ITEMS)

NEW_CONVERSATION = Body(_METADATA, _ITEMS)
DESCRIPTION = Body(_NEW_METADATA)
NEW_ITEMS = Body(_NEW_ITEMS, *ignored("include"))


class ConversationRoutes:
    """The endpoints of a gateway that may keep no conversations."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway

    @property
    def _kept(self) -> StoredConversations:
        return kept_by(self._gateway).conversations

    def _to_write(self, key: Key | None) -> StoredConversations:
        """Return what keeps conversations, for a key of which anything may be kept."""
        kept = self._kept
        if key and key.stateless:
            raise bad_request("this key keeps nothing, and so adds to no conversation")
        return kept

    async def create(self, request: Request, key: Key | None) -> Response:
        kept = self._to_write(key)
        values = NEW_CONVERSATION.read(await read_json(request.receive, request.headers))
        given, metadata = values[_ITEMS], values[_METADATA]
        return _said(await kept.add(owner_of(key), metadata or {}, items_of(given or ())))

    async def get(self, request: Request, key: Key | None) -> Response:
        return _said(await self._kept.find(owner_of(key), _id(request)))

    async def update(self, request: Request, key: Key | None) -> Response:
        kept = self._to_write(key)
        values = DESCRIPTION.read(await read_json(request.receive, request.headers))
        return _said(await kept.describe(owner_of(key), _id(request), values[_NEW_METADATA]))

    async def remove(self, request: Request, key: Key | None) -> Response:
        id = _id(request)
        await self._kept.remove(owner_of(key), id)
        return json_response({"id": id, "object": "conversation.deleted", "deleted": True})

    async def items(self, request: Request, key: Key | None) -> Response:
        query = read_page(request.query_params)
        return page_content(await self._kept.page(owner_of(key), _id(request), query))

    async def append(self, request: Request, key: Key | None) -> Response:
        kept = self._to_write(key)
        values = NEW_ITEMS.read(await read_json(request.receive, request.headers))
        items = items_of(values[_NEW_ITEMS])
        await kept.append(owner_of(key), _id(request), items)
        ids = {"first_id": items[0]["id"], "last_id": items[-1]["id"]}
        return json_response({"object": "list", "data": items, **ids, "has_more": False})

    async def item(self, request: Request, key: Key | None) -> Response:
        name = request.path_params["item"]
        return json_response(await self._kept.item(owner_of(key), _id(request), name))

    async def remove_item(self, request: Request, key: Key | None) -> Response:
        name = request.path_params["item"]
        return _said(await self._kept.remove_item(owner_of(key), _id(request), name))


def _id(request: Request) -> str:
    return str(request.path_params["id"])


def _said(conversation: StoredConversation) -> Response:
    return json_response(conversation.content)
