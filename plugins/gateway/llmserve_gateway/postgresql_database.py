"""Responses in a database of PostgreSQL, which gateways of several machines may share."""

from __future__ import annotations

import re
import secrets
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

from llmserve.errors import UsageError
from llmserve_gateway.kept_items import StoreError
from llmserve_gateway.store_database import Rows

if TYPE_CHECKING:
    import psycopg

VARIABLE = "LLMSERVE_RESPONSES_DATABASE"
"""The variable of the environment that has the address, as it may have a password."""
_SHAPE = "postgresql://USER:PASSWORD@HOST/DATABASE"
_PORTS = re.compile(r"[0-9,]*")
# How long a lost network, or another gateway that writes, keeps anybody waiting.
_CONNECTING: Mapping[str, Any] = {
    "connect_timeout": 5, "keepalives_idle": 10, "keepalives_interval": 5, "keepalives_count": 3,
    "tcp_user_timeout": 15_000, "application_name": "llmserve",
}  # fmt: skip
_SETTINGS = """
SET lock_timeout = '10s';
SET statement_timeout = '30s';
SET synchronous_commit = on;
SET tcp_keepalives_idle = 10;
SET tcp_keepalives_interval = 5;
SET tcp_keepalives_count = 3;
SET search_path TO llmserve;
"""
_GONE_SECONDS = 5.0
"""After how long a gateway without a connection has died: one that has lost it connects again."""
_WRITING = 0x6C6C6D7365727665
"""The lock of whoever writes: PostgreSQL's locks are known by numbers."""
_HAS_SCHEMA = "SELECT 1 FROM pg_namespace WHERE nspname = 'llmserve'"
_SCHEMA = """
CREATE TABLE IF NOT EXISTS responses (
    id TEXT PRIMARY KEY, owner TEXT NOT NULL, previous TEXT, created DOUBLE PRECISION NOT NULL,
    size BIGINT NOT NULL, input TEXT NOT NULL, response TEXT NOT NULL);
CREATE INDEX IF NOT EXISTS of_owner ON responses (owner, created);
CREATE INDEX IF NOT EXISTS by_age ON responses (created);
CREATE TABLE IF NOT EXISTS sizes (owner TEXT PRIMARY KEY, size BIGINT NOT NULL);
CREATE TABLE IF NOT EXISTS unfinished (
    id TEXT PRIMARY KEY, owner TEXT NOT NULL, gateway TEXT NOT NULL);
CREATE INDEX IF NOT EXISTS unfinished_of_owner ON unfinished (owner);
CREATE TABLE IF NOT EXISTS events (
    id TEXT NOT NULL, number BIGINT NOT NULL, created DOUBLE PRECISION NOT NULL,
    size BIGINT NOT NULL, said BYTEA NOT NULL, PRIMARY KEY (id, number));
CREATE INDEX IF NOT EXISTS events_by_age ON events (created);
CREATE TABLE IF NOT EXISTS conversations (
    id TEXT PRIMARY KEY, owner TEXT NOT NULL, created BIGINT NOT NULL,
    touched DOUBLE PRECISION NOT NULL, size BIGINT NOT NULL, metadata TEXT NOT NULL);
CREATE INDEX IF NOT EXISTS conversations_of_owner ON conversations (owner, touched);
CREATE INDEX IF NOT EXISTS conversations_by_age ON conversations (touched);
CREATE TABLE IF NOT EXISTS items (
    position BIGINT GENERATED ALWAYS AS IDENTITY PRIMARY KEY, conversation TEXT NOT NULL,
    id TEXT NOT NULL, size BIGINT NOT NULL, item TEXT NOT NULL, UNIQUE (conversation, id));
CREATE INDEX IF NOT EXISTS items_in_order ON items (conversation, position);

CREATE OR REPLACE FUNCTION note_size() RETURNS TRIGGER LANGUAGE plpgsql AS $$ BEGIN
    IF TG_OP = 'INSERT' THEN
        INSERT INTO sizes VALUES (new.owner, new.size)
            ON CONFLICT (owner) DO UPDATE SET size = sizes.size + new.size;
    ELSIF TG_OP = 'UPDATE' THEN
        UPDATE sizes SET size = size + new.size - old.size WHERE owner = new.owner;
    ELSE
        UPDATE sizes SET size = size - old.size WHERE owner = old.owner;
        IF TG_TABLE_NAME = 'responses' THEN
            DELETE FROM unfinished WHERE id = old.id;
            DELETE FROM events WHERE id = old.id;
        ELSE
            DELETE FROM items WHERE conversation = old.id;
        END IF;
    END IF;
    RETURN NULL; END $$;
CREATE OR REPLACE FUNCTION note_item() RETURNS TRIGGER LANGUAGE plpgsql AS $$ BEGIN
    IF TG_OP = 'INSERT' THEN
        UPDATE conversations SET size = size + new.size WHERE id = new.conversation;
    ELSE
        UPDATE conversations SET size = size - old.size WHERE id = old.conversation;
    END IF;
    RETURN NULL; END $$;
CREATE OR REPLACE FUNCTION note_events() RETURNS TRIGGER LANGUAGE plpgsql AS $$ BEGIN
    IF TG_OP = 'INSERT' THEN
        UPDATE responses SET size = size + new.size WHERE id = new.id;
    ELSE
        UPDATE responses SET size = size - old.size WHERE id = old.id;
    END IF;
    RETURN NULL; END $$;
CREATE OR REPLACE TRIGGER sized AFTER INSERT OR DELETE ON events
    FOR EACH ROW EXECUTE FUNCTION note_events();
CREATE OR REPLACE TRIGGER sized AFTER INSERT OR DELETE OR UPDATE OF size ON responses
    FOR EACH ROW EXECUTE FUNCTION note_size();
CREATE OR REPLACE TRIGGER sized AFTER INSERT OR DELETE OR UPDATE OF size ON conversations
    FOR EACH ROW EXECUTE FUNCTION note_size();
CREATE OR REPLACE TRIGGER sized AFTER INSERT OR DELETE ON items
    FOR EACH ROW EXECUTE FUNCTION note_item();
"""


def read_address(url: str) -> Mapping[str, Any]:
    """Return what libpq is given of an address: nothing that it says of it has the password."""
    try:
        from psycopg import ProgrammingError
        from psycopg.conninfo import conninfo_to_dict
    except ImportError:
        from llmserve.plugin import install_command

        hint = install_command("llmserve-gateway[postgresql]")
        raise UsageError(f"{VARIABLE} needs psycopg, which is not installed", hint=hint) from None
    hint = f"write it as {_SHAPE}, with %40 for @, %2F for / and %3A for : in a password"
    try:
        parts = conninfo_to_dict(url) if re.match("postgres(ql)?://", url) else {}
    except ProgrammingError:
        parts = {}
    host, port, name = (str(parts.get(each) or "") for each in ("host", "port", "dbname"))
    # A part of a password that is not escaped would be one of another part, which errors show.
    if not parts or "@" in host + name or not _PORTS.fullmatch(port):
        raise UsageError(f"{VARIABLE} is no address of PostgreSQL", hint=hint)
    return {**_CONNECTING, **parts}


class PostgresqlDatabase:
    """A schema of its own in a database; the lock of a gateway ends with its connection."""

    def __init__(self, url: str) -> None:
        self._address = read_address(url)
        self.own = secrets.token_hex(8)
        self._missed: dict[str, float] = {}
        """Since when a gateway has no connection."""
        try:
            self._connection = self._connect()
            with self.writing():
                if not self.execute(_HAS_SCHEMA).fetchall():
                    self.execute("CREATE SCHEMA llmserve")
                self.execute(_SCHEMA)
        except StoreError as error:
            problem = f"the database of {VARIABLE} cannot be used: {error.problem}"
            raise UsageError(problem, hint="see that it runs, and what its user may do") from None

    def execute(self, query: str, values: Sequence[Any] = ()) -> Rows:
        with _told():
            return self._connected(query, values)

    def executemany(self, query: str, values: Iterable[Sequence[Any]]) -> None:
        with _told(), self._connection.cursor() as cursor:
            cursor.executemany(_query(query), values)

    @contextmanager
    def writing(self) -> Iterator[None]:
        with _told():
            self._connected("BEGIN")
            try:
                self._connected("SELECT pg_advisory_xact_lock(?)", (_WRITING,))
                yield
                self._connection.execute("COMMIT")
            except BaseException:
                self._roll_back()
                raise

    def is_there(self, gateway: str) -> bool:
        if gateway == self.own:
            return True
        lock = (_number(gateway),)
        ((is_free,),) = self.execute("SELECT pg_try_advisory_lock_shared(?)", lock).fetchall()
        if not is_free:
            self._missed.pop(gateway, None)
            return True
        self.execute("SELECT pg_advisory_unlock_shared(?)", lock)
        now = time.monotonic()
        return now - self._missed.setdefault(gateway, now) < _GONE_SECONDS

    def close(self) -> None:
        self._connection.close()

    def _connected(self, query: str, values: Sequence[Any] = ()) -> Rows:
        """Ask, and once more if the connection was lost between transactions."""
        import psycopg
        from psycopg.pq import TransactionStatus

        connection = self._connection
        # Of a connection that is lost it is not known.
        is_within = connection.info.transaction_status == TransactionStatus.INTRANS
        try:
            return connection.execute(_query(query), values or None)
        except psycopg.OperationalError:
            if is_within or not connection.closed:
                raise
        self._connection = self._connect()
        return self._connection.execute(_query(query), values or None)

    def _connect(self) -> psycopg.Connection[Any]:
        import psycopg

        with _told():
            connection = psycopg.connect(**self._address, autocommit=True)
            connection.execute(_SETTINGS)
            # Whoever asks now whether this gateway lives has an answer in a moment.
            connection.execute("SELECT pg_advisory_lock(%s)", (_number(self.own),))
            return connection

    def _roll_back(self) -> None:
        import psycopg

        with suppress(psycopg.Error):
            self._connection.execute("ROLLBACK")


def _query(query: str) -> Any:
    """Return a query as psycopg has it, which is typed as one that nobody has put together."""
    return query.replace("?", "%s")


def _number(gateway: str) -> int:
    """Return the lock of a gateway, which PostgreSQL counts from the negative ones on."""
    return int(gateway, 16) - (1 << 63)


@contextmanager
def _told() -> Iterator[None]:
    import psycopg

    try:
        yield
    except psycopg.Error as error:
        # What follows the first line repeats queries and values.
        said = error.diag.message_primary or str(error) or type(error).__name__
        raise StoreError(said.strip().splitlines()[0]) from error
