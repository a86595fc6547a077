"""Responses in a database of SQLite, which several gateways of a machine may share."""

from __future__ import annotations

import fcntl
import json
import os
import secrets
import sqlite3
import time
from contextlib import suppress
from pathlib import Path

from llmserve_gateway.batches.folder import check_folder
from llmserve_gateway.conversation_database import SqliteConversations
from llmserve_gateway.stored_conversations import items_of
from llmserve_gateway.stored_responses import INTERRUPTED, StoredResponse, StoreLimits

_FILE = "responses.sqlite3"
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
CREATE TRIGGER IF NOT EXISTS changed AFTER UPDATE OF size ON responses BEGIN
    UPDATE sizes SET size = size + new.size - old.size WHERE owner = new.owner; END;
CREATE TABLE IF NOT EXISTS unfinished (
    id TEXT PRIMARY KEY, owner TEXT NOT NULL, gateway TEXT NOT NULL);
CREATE INDEX IF NOT EXISTS unfinished_of_owner ON unfinished (owner);
CREATE TRIGGER IF NOT EXISTS given_up AFTER DELETE ON responses BEGIN
    DELETE FROM unfinished WHERE id = old.id; END;
"""


class _TooManyError(Exception):
    """An owner has more unfinished responses than it may have."""


class _SignsOfLife:
    """Files in a folder, each locked for as long as the gateway lives that has made it."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.own = secrets.token_hex(8)
        self._clean()
        new = folder / f".{self.own}"
        self._file = os.open(new, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        fcntl.flock(self._file, fcntl.LOCK_EX)
        # Nobody sees it before it is locked.
        new.rename(self._path(self.own))

    def is_there(self, gateway: str) -> bool:
        """Return whether a gateway lives."""
        return gateway == self.own or _is_locked(self._path(gateway))

    def close(self) -> None:
        self._path(self.own).unlink(missing_ok=True)
        os.close(self._file)

    def _path(self, gateway: str) -> Path:
        return self._folder / f"gateway-{gateway}.lock"

    def _clean(self) -> None:
        """Remove what gateways have left that were killed."""
        for path in self._folder.glob("gateway-*.lock"):
            if not _is_locked(path):
                path.unlink(missing_ok=True)


def _is_locked(path: Path) -> bool:
    try:
        file = os.open(path, os.O_RDWR)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(file)
    return False


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
        self.conversations = SqliteConversations(self._database, self.limits, self._trim)
        self._gateways = _SignsOfLife(folder)
        self._end_abandoned()

    def add(self, stored: StoredResponse) -> None:
        with self._database:
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
            with self._database as database:
                row = (stored.id, stored.owner, self._gateways.own)
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
        with self._database as database:
            changed = database.execute(
                "UPDATE responses SET response = ?, size = LENGTH(input) + ? "
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

    def unfinished(self) -> set[str]:
        """Return the ids of the responses that this gateway has to finish."""
        query = "SELECT id FROM unfinished WHERE gateway = ?"
        return {id for (id,) in self._database.execute(query, (self._gateways.own,))}

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
        if size <= self.limits.bytes_per_key:
            return
        oldest = execute(
            "SELECT id, size, created AS moment FROM responses WHERE owner = ?1 AND id != ?2 "
            "AND id NOT IN (SELECT id FROM unfinished) UNION ALL "
            "SELECT id, size, touched FROM conversations WHERE owner = ?1 AND id != ?2 "
            "ORDER BY moment",
            (owner, newest),
        )
        gone = []
        for id, each, _ in oldest:
            if size <= self.limits.bytes_per_key:
                break
            gone.append((id,))
            size -= each
        for table in ("responses", "conversations"):
            self._database.executemany(f"DELETE FROM {table} WHERE id = ?", gone)  # noqa: S608

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
        if gateway is not None and not self._gateways.is_there(gateway):
            self._interrupt(gateway)
            return self.get(owner, id)
        return StoredResponse(id, owner, json.loads(given), json.loads(answered), previous)

    def remove(self, owner: str, id: str) -> bool:
        with self._database as database:
            of = (id, owner)
            return (
                database.execute("DELETE FROM responses WHERE id = ? AND owner = ?", of).rowcount
                > 0
            )

    def close(self) -> None:
        # A disk that is full keeps none from closing: the next gateway says so then.
        with suppress(sqlite3.Error):
            self._interrupt(self._gateways.own)
        self._database.close()
        self._gateways.close()

    def _end_abandoned(self) -> bool:
        """Say of the responses of gateways that have died that nobody finishes them."""
        rows = self._database.execute("SELECT DISTINCT gateway FROM unfinished").fetchall()
        dead = [gateway for (gateway,) in rows if not self._gateways.is_there(gateway)]
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
