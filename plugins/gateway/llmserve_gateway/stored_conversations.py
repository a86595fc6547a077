"""Conversations that are kept: their items are what requests and answers have said in them."""

from __future__ import annotations

import re
import secrets
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, TypeVar

from llmserve_gateway.errors import ApiError, bad_request
from llmserve_gateway.kept_items import Item, missing

T = TypeVar("T")

_ID = re.compile(r"conv_[0-9a-f]{48}")
_PREFIXES = {"message": "msg", "function_call": "fc", "function_call_output": "fco",
             "reasoning": "rs"}  # fmt: skip


@dataclass(frozen=True)
class StoredConversation:
    id: str
    owner: str
    created: int
    metadata: Mapping[str, Any]

    @property
    def content(self) -> dict[str, Any]:
        """What its client sees of it."""
        said = {"created_at": self.created, "metadata": self.metadata}
        return {"id": self.id, "object": "conversation", **said}


@dataclass(frozen=True)
class PageQuery:
    """Which items of a list are asked for."""

    limit: int
    after: str | None
    is_descending: bool

    def no_such_item(self) -> ApiError:
        return bad_request(f"after: there is no item {str(self.after)[:80]!r}", "after")


@dataclass(frozen=True)
class ItemPage:
    items: Sequence[Item]
    has_more: bool


class ConversationStore(Protocol):
    """Keeps conversations; those of an owner are nobody else's. All calls may block."""

    def add(self, conversation: StoredConversation, items: Sequence[Item]) -> None: ...
    def get(self, owner: str, id: str) -> StoredConversation | None: ...
    def describe(self, owner: str, id: str, metadata: Mapping[str, Any]) -> bool: ...
    def remove(self, owner: str, id: str) -> bool: ...
    def append(self, owner: str, id: str, items: Sequence[Item]) -> bool: ...
    def items(self, owner: str, id: str) -> list[Item] | None: ...
    def page(self, owner: str, id: str, query: PageQuery) -> ItemPage | None: ...
    def item(self, owner: str, id: str, name: str) -> Item | None: ...
    def remove_item(self, owner: str, id: str, name: str) -> bool: ...


class StoredConversations:
    """What the gateway asks of a store of conversations, which answers in a thread."""

    def __init__(
        self,
        store: ConversationStore,
        in_thread: Callable[[Callable[[], Any]], Awaitable[Any]],
    ) -> None:
        self._store = store
        self._in_thread = in_thread

    async def add(
        self, owner: str, metadata: Mapping[str, Any], items: Sequence[Item]
    ) -> StoredConversation:
        id = f"conv_{secrets.token_hex(24)}"
        new = StoredConversation(id, owner, int(time.time()), metadata)
        await self._in_thread(partial(self._store.add, new, items))
        return new

    async def find(self, owner: str, id: str) -> StoredConversation:
        return await self._ask(id, self._store.get, owner, id)

    async def describe(
        self, owner: str, id: str, metadata: Mapping[str, Any]
    ) -> StoredConversation:
        await self._ask(id, self._store.describe, owner, id, metadata)
        return await self.find(owner, id)

    async def remove(self, owner: str, id: str) -> None:
        await self._ask(id, self._store.remove, owner, id)

    async def append(self, owner: str, id: str, items: Sequence[Item]) -> None:
        await self._ask(id, self._store.append, owner, id, items)

    async def items(self, owner: str, id: str) -> list[Item]:
        return await self._ask(id, self._store.items, owner, id)

    async def page(self, owner: str, id: str, query: PageQuery) -> ItemPage:
        return await self._ask(id, self._store.page, owner, id, query)

    async def item(self, owner: str, id: str, name: str) -> Item:
        await self.find(owner, id)
        found: Item | None = await self._in_thread(partial(self._store.item, owner, id, name))
        if found is None:
            raise missing("item", name)
        return found

    async def remove_item(self, owner: str, id: str, name: str) -> StoredConversation:
        conversation = await self.find(owner, id)
        if not await self._in_thread(partial(self._store.remove_item, owner, id, name)):
            raise missing("item", name)
        return conversation

    async def _ask(self, id: str, call: Callable[..., T | None], *args: Any) -> T:
        """Return what a store says of a conversation; to all but its owner there is none."""
        found = await self._in_thread(partial(call, *args)) if _ID.fullmatch(id) else None
        if found is None or found is False:
            raise missing("conversation", id)
        answer: T = found
        return answer


def items_of(given: Sequence[Item]) -> list[Item]:
    """Return what a client has said as items of a conversation, each with a new id."""
    found: list[Item] = []
    for item in given:
        kind = str(item.get("type", "message"))
        name = f"{_PREFIXES.get(kind, 'item')}_{secrets.token_hex(24)}"
        new = {**item, "type": kind, "id": name, "status": "completed"}
        if isinstance(text := item.get("content"), str):
            is_answer = item.get("role") == "assistant"
            part: dict[str, Any] = {"type": "output_text" if is_answer else "input_text"}
            part |= {"text": text, **({"annotations": []} if is_answer else {})}
            new["content"] = [part]
        found.append(new)
    return found
