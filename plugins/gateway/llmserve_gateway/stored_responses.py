"""Responses that are kept, so that later requests may go on from them."""

from __future__ import annotations

import asyncio
import json
import logging
import re
import secrets
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol, TypeVar

from llmserve_gateway.batches.folder import EVERYONE
from llmserve_gateway.errors import ApiError, bad_request
from llmserve_gateway.kept_items import Item, StoreError, missing, too_long
from llmserve_gateway.keys import Key
from llmserve_gateway.stored_conversations import ConversationStore, StoredConversations

log = logging.getLogger("llmserve.gateway")

T = TypeVar("T")
_DAY = 86400
_UNFINISHED, _ANSWERED = ("queued", "in_progress"), ("completed", "incomplete")
INTERRUPTED = ApiError(
    503, "the gateway ended before it had answered: ask again", code="interrupted"
)
CANCELLED = ApiError(503, "the response was cancelled", code="cancelled")
_ID = re.compile(r"resp_[0-9a-f]{48}")
_ITEM = re.compile(r"[a-z]{2,3}_([0-9a-f]{48})(?:_[0-9]{1,9})?")


@dataclass(frozen=True)
class StoredResponse:
    """A response as its client got it, with what this request added to the conversation."""

    id: str
    owner: str
    input: Sequence[Item]
    response: Mapping[str, Any]
    previous: str | None = None

    @property
    def items(self) -> list[Item]:
        """What the request and its answer add to a conversation."""
        return [*self.input, *self.response["output"]]

    @property
    def status(self) -> str:
        return str(self.response.get("status", "completed"))

    @property
    def is_unfinished(self) -> bool:
        """Whether it is still to be answered, in the background."""
        return self.status in _UNFINISHED

    @property
    def is_of_background(self) -> bool:
        return self.response.get("background") is True

    @property
    def conversation(self) -> str | None:
        """The conversation that what was asked and answered is added to."""
        said = self.response.get("conversation")
        is_answered = self.status in _ANSWERED
        return said["id"] if said and is_answered else None

    def ended(self, status: str, error: Mapping[str, Any] | None = None) -> StoredResponse:
        return replace(self, response={**self.response, "status": status, "error": error})

    def failed(self, error: ApiError) -> StoredResponse:
        code = error.code or error.type
        return self.ended("failed", {"code": code, "message": error.message})


@dataclass(frozen=True)
class ResponseState:
    """What a request says of responses that are kept, and what becomes of its own."""

    input: Sequence[Item]
    previous: str | None = None
    instructions: str | None = None
    wanted: bool | None = None
    """Whether the response is to be kept; None if the request leaves that to the gateway."""
    id: str = ""
    """Under which id it is kept; "" if it is not."""
    owner: str = ""
    created: int = 0
    """When it was asked for, if it is kept."""
    conversation: str | None = None
    """The conversation that it goes on with, and adds to."""
    background: bool = False
    """Whether nobody waits for the answer."""

    @property
    def refers_by(self) -> str | None:
        """The field by which the request refers to what is kept."""
        if self.conversation:
            return "conversation"
        if self.previous:
            return "previous_response_id"
        is_reference = (item.get("type") == "item_reference" for item in self.input)
        return "input" if any(is_reference) else None


@dataclass(frozen=True)
class StoreLimits:
    age: float = 30 * _DAY
    """After how many seconds a response is removed."""
    bytes_per_key: int = 256 << 20
    """When a key has more, its oldest are removed."""
    conversation: int = 16 << 20
    """How large the responses are together that a request goes on from."""
    turns: int = 10_000
    unfinished: int = 100
    """How many responses of a key wait for their answer, or get it, in the background."""


class ResponseStore(Protocol):
    """Keeps responses; those of an owner are nobody else's. All calls may block."""

    @property
    def conversations(self) -> ConversationStore: ...

    def add(self, stored: StoredResponse) -> None: ...

    def begin(self, stored: StoredResponse) -> bool:
        """Add one that this gateway is to finish, unless its owner has too many of them.

        Of what a gateway has not finished before it ended, others say that it has failed.
        """

    def update(self, stored: StoredResponse) -> bool:
        """Change what a response says; return whether it was unfinished until now."""

    def unfinished(self) -> set[str]:
        """Return the ids of those that this gateway has to finish."""

    def add_events(self, stored: StoredResponse, number: int, events: bytes) -> None:
        """Keep events of a stream for an hour, of which the last has a number."""

    def events(self, owner: str, id: str, after: int) -> list[bytes]:
        """Return what is kept of a stream, with all that has a higher number."""

    def get(self, owner: str, id: str) -> StoredResponse | None: ...
    def remove(self, owner: str, id: str) -> bool: ...
    def close(self) -> None: ...


class StoredResponses:
    """What the gateway asks of a store, which answers in a thread of its own."""

    def __init__(self, store: ResponseStore, limits: StoreLimits | None = None) -> None:
        self._store = store
        self._limits = limits or StoreLimits()
        self._thread = ThreadPoolExecutor(1, "llmserve-responses")
        self.conversations = StoredConversations(store.conversations, self._in_thread)

    async def close(self) -> None:
        await self._in_thread(self._store.close)
        self._thread.shutdown(wait=False)

    async def add(self, stored: StoredResponse) -> None:
        await self._in_thread(partial(self._store.add, stored))

    async def begin(self, stored: StoredResponse) -> None:
        """Keep a response that is to be answered in the background."""
        if not await self._in_thread(partial(self._store.begin, stored)):
            what = "too many responses of this key wait in the background: cancel some, or wait"
            raise ApiError(429, what, code="too_many_in_background", headers={"retry-after": "5"})

    async def update(self, stored: StoredResponse) -> bool:
        """Change a response that is being answered; there is none if it has been cancelled."""
        return await self._in_thread(partial(self._store.update, stored))

    async def add_events(self, stored: StoredResponse, number: int, events: bytes) -> None:
        await self._in_thread(partial(self._store.add_events, stored, number, events))

    async def events(self, owner: str, id: str, after: int) -> list[bytes]:
        return await self._in_thread(partial(self._store.events, owner, id, after))

    async def unfinished(self) -> set[str]:
        return await self._in_thread(self._store.unfinished)

    async def cancel(self, owner: str, id: str) -> StoredResponse:
        """Return a response as it is when it has been cancelled; what has ended stays as it is."""
        found = await self.find(owner, id)
        if not found.is_of_background:
            raise bad_request("only a response that was asked with background: true is cancelled")
        if found.is_unfinished:
            await self.update(found.ended("cancelled"))
            return await self.find(owner, id)
        return found

    async def find(self, owner: str, id: str) -> StoredResponse:
        """Return a response of an owner; to all others there is none."""
        found = None
        if _ID.fullmatch(id):
            found = await self._in_thread(partial(self._store.get, owner, id))
        if found is None:
            raise missing("response", id)
        return found

    async def remove(self, owner: str, id: str) -> None:
        is_id = _ID.fullmatch(id) is not None
        if not is_id or not await self._in_thread(partial(self._store.remove, owner, id)):
            raise missing("response", id)

    async def conversation(self, owner: str, last: str) -> list[Item]:
        """Return all items up to the answer of a response, as requests went on from one another."""
        try:
            return await self._in_thread(partial(self._conversation, owner, last))
        except KeyError:
            what = f"previous_response_id: there is no response {last[:80]!r}, or not all before it"
            code = "previous_response_not_found"
            raise ApiError(400, what, param="previous_response_id", code=code) from None

    def _conversation(self, owner: str, last: str) -> list[Item]:
        turns: list[list[Item]] = []
        size = 0
        name: str | None = last
        while name is not None:
            found = self._store.get(owner, name) if _ID.fullmatch(name) else None
            if found is None:
                raise KeyError(name)
            if found.status not in _ANSWERED:
                what = f"previous_response_id: the response {name!r} is {found.status}"
                code = "previous_response_not_completed"
                raise ApiError(400, what, param="previous_response_id", code=code)
            turns.append(found.items)
            size += len(json.dumps(found.items))
            if size > self._limits.conversation or len(turns) > self._limits.turns:
                raise too_long("previous_response_id")
            name = found.previous
        return [item for turn in reversed(turns) for item in turn]

    async def resolved(self, owner: str, items: Sequence[Item]) -> list[Item]:
        """Return items with those in place of references that these are to."""
        found: list[Item] = []
        for item in items:
            if item.get("type") != "item_reference":
                found.append(item)
                continue
            id = str(item.get("id"))
            match = _ITEM.fullmatch(id)
            response = await self.find(owner, f"resp_{match[1]}") if match else None
            output = response.response["output"] if response else ()
            meant = next((each for each in output if each["id"] == id), None)
            if meant is None:
                raise missing("item", id)
            found.append(meant)
        return found

    async def _in_thread(self, call: Callable[[], T]) -> T:
        try:
            return await asyncio.get_running_loop().run_in_executor(self._thread, call)
        except StoreError as error:
            log.warning("what is kept cannot be reached: %s", error.problem)
            raise


def owner_of(key: Key | None) -> str:
    """Return whose responses a request may see and leave."""
    return key.sha256 if key and key.sha256 else EVERYONE


def new_id() -> str:
    return f"resp_{secrets.token_hex(24)}"
