"""Responses and conversations in a database, of whichever kind it is."""

from __future__ import annotations

import json
import time
from contextlib import suppress

from llmserve_gateway.conversation_database import DatabaseConversations
from llmserve_gateway.kept_items import StoreError
from llmserve_gateway.store_database import StoreDatabase
from llmserve_gateway.stored_conversations import items_of
from llmserve_gateway.stored_responses import INTERRUPTED, StoredResponse, StoreLimits

_EVENT_SECONDS = 3600.0
"""For how long the events of a stream are kept."""
_AT_ONCE = 100
"""How many of the oldest are looked at to make room."""


class _TooManyError(Exception):
    """An owner has more unfinished responses than it may have."""


class DatabaseStore:
    """A store that several gateways may share."""

    def __init__(self, database: StoreDatabase, limits: StoreLimits | None = None) -> None:
        self.limits = limits or StoreLimits()
        self._database = database
        self.conversations = DatabaseConversations(database, self.limits, self._trim)
        self._end_abandoned()

    def add(self, stored: StoredResponse) -> None:
        with self._database.writing():
            self._go_on(stored)
            self._insert(stored)

    def begin(self, stored: StoredResponse) -> bool:
        """Add a response that this gateway is to finish, unless its owner has too many of them."""
        if self._has_begun(stored):
            return True
        # Those of a gateway that has died count no longer.
        return self._end_abandoned() and self._has_begun(stored)

    def _has_begun(self, stored: StoredResponse) -> bool:
        try:
            with self._database.writing():
                database = self._database
                row = (stored.id, stored.owner, self._database.own)
                database.execute("INSERT INTO unfinished VALUES (?, ?, ?)", row)
                of_owner = "SELECT COUNT(*) FROM unfinished WHERE owner = ?"
                ((count,),) = database.execute(of_owner, (stored.owner,)).fetchall()
                if count > self.limits.unfinished:
                    raise _TooManyError
                self._insert(stored)
        except _TooManyError:
            return False
        return True

    def update(self, stored: StoredResponse) -> bool:
        """Change what a response says; return whether it was unfinished until now."""
        answered = json.dumps(dict(stored.response))
        with self._database.writing():
            database = self._database
            changed = database.execute(
                "UPDATE responses SET response = ?, size = size - LENGTH(response) + ? "
                "WHERE id IN (SELECT id FROM unfinished WHERE id = ? AND owner = ?)",
                (answered, len(answered), stored.id, stored.owner),
            )
            if not changed.rowcount:
                return False
            if not stored.is_unfinished:
                database.execute("DELETE FROM unfinished WHERE id = ?", (stored.id,))
                self._go_on(stored)
                self._trim(stored.owner, stored.id)
            return True

    def add_events(self, stored: StoredResponse, number: int, events: bytes) -> None:
        now, execute = time.time(), self._database.execute
        with self._database.writing():
            # Not of a response that has been removed.
            of_one = (stored.id, stored.owner)
            is_kept = execute("SELECT 1 FROM responses WHERE id = ? AND owner = ?", of_one)
            if not is_kept.fetchall():
                return
            row = (stored.id, number, now, len(events), events)
            execute("INSERT INTO events VALUES (?, ?, ?, ?, ?)", row)
            execute("DELETE FROM events WHERE created < ?", (now - _EVENT_SECONDS,))
            self._trim(stored.owner, stored.id)

    def events(self, owner: str, id: str, after: int) -> list[bytes]:
        rows = self._database.execute(
            "SELECT said FROM events JOIN responses USING (id) "
            "WHERE id = ? AND owner = ? AND number > ? ORDER BY number",
            (id, owner, after),
        ).fetchall()
        return [bytes(said) for (said,) in rows]

    def unfinished(self) -> set[str]:
        """Return the ids of the responses that this gateway has to finish."""
        query = "SELECT id FROM unfinished WHERE gateway = ?"
        rows = self._database.execute(query, (self._database.own,)).fetchall()
        return {id for (id,) in rows}

    def _insert(self, stored: StoredResponse) -> None:
        # ASCII, as a text may have what no encoding of the database takes.
        given, answered = json.dumps([*stored.input]), json.dumps(dict(stored.response))
        size, now = len(given) + len(answered), time.time()
        row = (stored.id, stored.owner, stored.previous, now, size, given, answered)
        execute = self._database.execute
        execute("INSERT INTO responses VALUES (?, ?, ?, ?, ?, ?, ?)", row)
        execute("DELETE FROM responses WHERE created < ?", (now - self.limits.age,))
        self._trim(stored.owner, stored.id)

    def _go_on(self, stored: StoredResponse) -> None:
        """Add what was asked and answered to its conversation, if that is still there."""
        if (conversation := stored.conversation) is not None:
            said = [*items_of(stored.input), *stored.response["output"]]
            self.conversations.write(stored.owner, conversation, said)

    def _trim(self, owner: str, newest: str) -> None:
        """Remove the oldest of an owner that has too much, but never the newest, nor a response
        that is being answered."""
        execute = self._database.execute
        ((size,),) = execute("SELECT size FROM sizes WHERE owner = ?", (owner,)).fetchall()
        while size > self.limits.bytes_per_key and (oldest := self._oldest(owner, newest)):
            gone = []
            for id, each, _ in oldest:
                if size <= self.limits.bytes_per_key:
                    break
                gone.append((id,))
                size -= each
            for table in ("responses", "conversations"):
                self._database.executemany(
                    f"DELETE FROM {table} WHERE id = ?",  # noqa: S608
                    gone,
                )

    def _oldest(self, owner: str, newest: str) -> list[tuple[str, int, float]]:
        of_owner = (owner, newest)
        return self._database.execute(
            "SELECT id, size, created AS moment FROM responses WHERE owner = ? AND id != ? "
            "AND id NOT IN (SELECT id FROM unfinished) UNION ALL "
            "SELECT id, size, touched FROM conversations WHERE owner = ? AND id != ? "
            "ORDER BY moment LIMIT ?",
            (*of_owner, *of_owner, _AT_ONCE),
        ).fetchall()

    def get(self, owner: str, id: str) -> StoredResponse | None:
        since = time.time() - self.limits.age
        found = self._database.execute(
            "SELECT input, response, previous, gateway FROM responses LEFT JOIN unfinished "
            "USING (id) WHERE id = ? AND responses.owner = ? AND created >= ?",
            (id, owner, since),
        ).fetchone()
        if found is None:
            return None
        given, answered, previous, gateway = found
        if gateway is not None and not self._database.is_there(gateway):
            self._interrupt(gateway)
            return self.get(owner, id)
        return StoredResponse(id, owner, json.loads(given), json.loads(answered), previous)

    def remove(self, owner: str, id: str) -> bool:
        with self._database.writing():
            query = "DELETE FROM responses WHERE id = ? AND owner = ?"
            return self._database.execute(query, (id, owner)).rowcount > 0

    def close(self) -> None:
        # A disk that is full keeps none from closing: the next gateway says so then.
        with suppress(StoreError):
            self._interrupt(self._database.own)
        self._database.close()

    def _end_abandoned(self) -> bool:
        """Say of the responses of gateways that have died that nobody finishes them."""
        rows = self._database.execute("SELECT DISTINCT gateway FROM unfinished").fetchall()
        dead = [gateway for (gateway,) in rows if not self._database.is_there(gateway)]
        for gateway in dead:
            self._interrupt(gateway)
        return bool(dead)

    def _interrupt(self, gateway: str) -> None:
        found = self._database.execute(
            "SELECT id, responses.owner, input, response, previous FROM responses "
            "JOIN unfinished USING (id) WHERE gateway = ?",
            (gateway,),
        ).fetchall()
        for id, owner, given, answered, previous in found:
            left = StoredResponse(id, owner, json.loads(given), json.loads(answered), previous)
            self.update(left.failed(INTERRUPTED))
