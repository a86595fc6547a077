"""Responses in a folder: a database of SQLite, which several gateways of a machine may share."""

from __future__ import annotations

import fcntl
import os
import secrets
import sqlite3
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from llmserve_gateway.batches.folder import check_folder
from llmserve_gateway.kept_items import StoreError
from llmserve_gateway.store_database import Rows

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
CREATE TABLE IF NOT EXISTS events (
    id TEXT NOT NULL, number INTEGER NOT NULL, created REAL NOT NULL, size INTEGER NOT NULL,
    said BLOB NOT NULL, PRIMARY KEY (id, number));
CREATE INDEX IF NOT EXISTS events_by_age ON events (created);
CREATE TRIGGER IF NOT EXISTS events_added AFTER INSERT ON events BEGIN
    UPDATE responses SET size = size + new.size WHERE id = new.id; END;
CREATE TRIGGER IF NOT EXISTS events_removed AFTER DELETE ON events BEGIN
    UPDATE responses SET size = size - old.size WHERE id = old.id; END;
CREATE TRIGGER IF NOT EXISTS events_given_up AFTER DELETE ON responses BEGIN
    DELETE FROM events WHERE id = old.id; END;
CREATE TABLE IF NOT EXISTS conversations (
    id TEXT PRIMARY KEY, owner TEXT NOT NULL, created INTEGER NOT NULL, touched REAL NOT NULL,
    size INTEGER NOT NULL, metadata TEXT NOT NULL);
CREATE INDEX IF NOT EXISTS conversations_of_owner ON conversations (owner, touched);
CREATE INDEX IF NOT EXISTS conversations_by_age ON conversations (touched);
CREATE TABLE IF NOT EXISTS items (
    position INTEGER PRIMARY KEY AUTOINCREMENT, conversation TEXT NOT NULL, id TEXT NOT NULL,
    size INTEGER NOT NULL, item TEXT NOT NULL, UNIQUE (conversation, id));
CREATE INDEX IF NOT EXISTS items_in_order ON items (conversation, position);
CREATE TRIGGER IF NOT EXISTS conversation_added AFTER INSERT ON conversations BEGIN
    INSERT INTO sizes VALUES (new.owner, new.size)
        ON CONFLICT (owner) DO UPDATE SET size = size + new.size; END;
CREATE TRIGGER IF NOT EXISTS conversation_changed AFTER UPDATE OF size ON conversations BEGIN
    UPDATE sizes SET size = size + new.size - old.size WHERE owner = new.owner; END;
CREATE TRIGGER IF NOT EXISTS conversation_removed AFTER DELETE ON conversations BEGIN
    UPDATE sizes SET size = size - old.size WHERE owner = old.owner;
    DELETE FROM items WHERE conversation = old.id; END;
CREATE TRIGGER IF NOT EXISTS item_added AFTER INSERT ON items BEGIN
    UPDATE conversations SET size = size + new.size WHERE id = new.conversation; END;
CREATE TRIGGER IF NOT EXISTS item_removed AFTER DELETE ON items BEGIN
    UPDATE conversations SET size = size - old.size WHERE id = old.conversation; END;
"""


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


class SqliteDatabase:
    """A file in a folder that nobody else may read."""

    def __init__(self, folder: Path) -> None:
        check_folder(folder, "--responses")
        path = folder / _FILE
        # SQLite gives the files beside it the same mode.
        os.close(os.open(path, os.O_RDWR | os.O_CREAT, 0o600))
        path.chmod(0o600)
        self._connection = sqlite3.connect(path, timeout=_SECONDS, check_same_thread=False)
        self._connection.execute("PRAGMA journal_mode = WAL")
        # What has been answered is on the disk, and what has been removed is not.
        self._connection.execute("PRAGMA synchronous = FULL")
        self._connection.execute("PRAGMA secure_delete = ON")
        self._connection.executescript(_SCHEMA)
        self._gateways = _SignsOfLife(folder)
        self.own = self._gateways.own

    def execute(self, query: str, values: Sequence[Any] = ()) -> Rows:
        with _told():
            return self._connection.execute(query, values)

    def executemany(self, query: str, values: Iterable[Sequence[Any]]) -> None:
        with _told():
            self._connection.executemany(query, values)

    @contextmanager
    def writing(self) -> Iterator[None]:
        with _told(), self._connection:
            yield

    def is_there(self, gateway: str) -> bool:
        return self._gateways.is_there(gateway)

    def close(self) -> None:
        self._connection.close()
        self._gateways.close()


@contextmanager
def _told() -> Iterator[None]:
    try:
        yield
    except sqlite3.Error as error:
        raise StoreError(str(error)) from error
