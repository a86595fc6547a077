"""Responses that are kept, so that later requests may go on from them: in a database of SQLite."""

from __future__ import annotations

import asyncio
import json
import os
import re
import secrets
import sqlite3
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol, TypeVar

from llmserve_gateway.batches.folder import EVERYONE, check_folder
from llmserve_gateway.errors import ApiError
from llmserve_gateway.keys import Key

T = TypeVar("T")
Item = Mapping[str, Any]
"""An item of the input or of the output, as clients send and get it."""

_FILE = "responses.sqlite3"
_DAY = 86400
_ID = re.compile(r"resp_[0-9a-f]{48}")
_ITEM = re.compile(r"[a-z]{2,3}_([0-9a-f]{48})(?:_[0-9]{1,9})?")
_SECONDS = 10.0
"""How long a gateway waits for another one that writes to the same database."""
_SCHEMA = """
CREATE TABLE IF NOT EXISTS responses (
    id TEXT PRIMARY KEY, owner TEXT NOT NULL, previous TEXT, created REAL NOT NULL,
    size INTEGER NOT NULL, input TEXT NOT NULL, response TEXT NOT NULL);
CREATE INDEX IF NOT EXISTS of_owner ON responses (owner, created);
CREATE INDEX IF NOT EXISTS by_age ON responses (created);
CREATE TABLE IF NOT EXISTS sizes (owner TEXT PRIMARY KEY, size INTEGER NOT NULL);
CREATE TRIGGER IF NOT EXISTS added AFTER INSERT ON responses BEGIN
    INSERT INTO sizes VALUES (new.owner, new.size)
        ON CONFLICT (owner) DO UPDATE SET size = size + new.size; END;
CREATE TRIGGER IF NOT EXISTS removed AFTER DELETE ON responses BEGIN
    UPDATE sizes SET size = size - old.size WHERE owner = old.owner; END;
"""


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

    @property
    def refers_by(self) -> str | None:
        """The field by which the request refers to what is kept."""
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


class ResponseStore(Protocol):
    """Keeps responses; those of an owner are nobody else's. All calls may block."""

    def add(self, stored: StoredResponse) -> None: ...
    def get(self, owner: str, id: str) -> StoredResponse | None: ...
    def remove(self, owner: str, id: str) -> bool: ...
    def close(self) -> None: ...


class SqliteStore:
    """A database in a folder that nobody else may read; several gateways may share it."""

    def __init__(self, folder: Path, limits: StoreLimits | None = None) -> None:
        check_folder(folder, "--responses")
        self.limits = limits or StoreLimits()
        path = folder / _FILE
        # SQLite gives the files beside it the same mode.
        os.close(os.open(path, os.O_RDWR | os.O_CREAT, 0o600))
        path.chmod(0o600)
        self._database = sqlite3.connect(path, timeout=_SECONDS, check_same_thread=False)
        self._database.execute("PRAGMA journal_mode = WAL")
        # What has been answered is on the disk, and what has been removed is not.
        self._database.execute("PRAGMA synchronous = FULL")
        self._database.execute("PRAGMA secure_delete = ON")
        self._database.executescript(_SCHEMA)

    def add(self, stored: StoredResponse) -> None:
        # ASCII, as a text may have what no encoding of the database takes.
        given, answered = json.dumps([*stored.input]), json.dumps(dict(stored.response))
        size, now = len(given) + len(answered), time.time()
        row = (stored.id, stored.owner, stored.previous, now, size, given, answered)
        with self._database as database:
            database.execute("INSERT INTO responses VALUES (?, ?, ?, ?, ?, ?, ?)", row)
            database.execute("DELETE FROM responses WHERE created < ?", (now - self.limits.age,))
            self._trim(stored.owner, stored.id)

    def _trim(self, owner: str, newest: str) -> None:
        """Remove the oldest responses of an owner that has too much, but never the newest."""
        execute = self._database.execute
        ((size,),) = execute("SELECT size FROM sizes WHERE owner = ?", (owner,)).fetchall()
        if size <= self.limits.bytes_per_key:
            return
        oldest = execute(
            "SELECT id, size FROM responses WHERE owner = ? AND id != ? ORDER BY created",
            (owner, newest),
        )
        gone = []
        for id, each in oldest:
            if size <= self.limits.bytes_per_key:
                break
            gone.append((id,))
            size -= each
        self._database.executemany("DELETE FROM responses WHERE id = ?", gone)

    def get(self, owner: str, id: str) -> StoredResponse | None:
        since = time.time() - self.limits.age
        found = self._database.execute(
            "SELECT input, response, previous FROM responses "
            "WHERE id = ? AND owner = ? AND created >= ?",
            (id, owner, since),
        ).fetchone()
        if found is None:
            return None
        given, answered, previous = found
        return StoredResponse(id, owner, json.loads(given), json.loads(answered), previous)

    def remove(self, owner: str, id: str) -> bool:
        with self._database as database:
            of = (id, owner)
            return (
                database.execute("DELETE FROM responses WHERE id = ? AND owner = ?", of).rowcount
                > 0
            )

    def close(self) -> None:
        self._database.close()


class StoredResponses:
    """What the gateway asks of a store, which answers in a thread of its own."""

    def __init__(self, store: ResponseStore, limits: StoreLimits | None = None) -> None:
        self._store = store
        self._limits = limits or StoreLimits()
        self._thread = ThreadPoolExecutor(1, "llmserve-responses")

    async def close(self) -> None:
        await self._in_thread(self._store.close)
        self._thread.shutdown(wait=False)

    async def add(self, stored: StoredResponse) -> None:
        await self._in_thread(partial(self._store.add, stored))

    async def find(self, owner: str, id: str) -> StoredResponse:
        """Return a response of an owner; to all others there is none."""
        found = None
        if _ID.fullmatch(id):
            found = await self._in_thread(partial(self._store.get, owner, id))
        if found is None:
            raise _missing("response", id)
        return found

    async def remove(self, owner: str, id: str) -> None:
        is_id = _ID.fullmatch(id) is not None
        if not is_id or not await self._in_thread(partial(self._store.remove, owner, id)):
            raise _missing("response", id)

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
            turns.append(found.items)
            size += len(json.dumps(found.items))
            if size > self._limits.conversation or len(turns) > self._limits.turns:
                what = "previous_response_id: the conversation is too long to go on"
                raise ApiError(413, what, param="previous_response_id", code="request_too_large")
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
                raise _missing("item", id)
            found.append(meant)
        return found

    async def _in_thread(self, call: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, call)


def owner_of(key: Key | None) -> str:
    """Return whose responses a request may see and leave."""
    return key.sha256 if key and key.sha256 else EVERYONE


def new_id() -> str:
    return f"resp_{secrets.token_hex(24)}"


def _missing(kind: str, id: str) -> ApiError:
    return ApiError(404, f"there is no {kind} {id[:80]!r}", code="not_found")
