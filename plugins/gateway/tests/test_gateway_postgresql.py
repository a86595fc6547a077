"""What PostgreSQL has beside SQLite: an address with a password, and a network."""

from __future__ import annotations

import logging
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from llmserve.errors import UsageError
from llmserve_gateway.gateway import Settings
from llmserve_gateway.kept_items import StoreError
from llmserve_gateway.postgresql_database import VARIABLE, PostgresqlDatabase, read_address
from llmserve_gateway.response_stores import named_database, open_store
from llmserve_gateway.stored_responses import StoredResponse, new_id

from .gateways import NO_TRITON, ask, gateway_command
from .postgresql import PASSWORD, Postgresql

psycopg = pytest.importorskip("psycopg", reason="see requirements-dev.txt")

SAID: Any = {"status": "completed", "output": []}
WAITS: Any = {"status": "queued", "background": True, "output": []}


def cut_all(url: str) -> None:
    """End the connections of all gateways, as a restart of the server would."""
    with psycopg.connect(url) as connection:
        connection.execute(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
            "WHERE application_name = 'llmserve' AND datname = current_database()"
        )


@pytest.mark.parametrize(
    "url",
    ["postgresql://a:sec@ret@h/d", "postgresql://a:sec/ret@h/d", "postgresql://a:1/sec@h/d",
     "postgresql://a:sec%zz@h/d", "mysql://a:secret@h/d", "host=h password=secret", "/a/folder",
     "postgresql://a:secret@h/d?unknown=secret"],
)  # fmt: skip
def test_an_address_that_is_none_is_refused_without_a_word_of_it(url: str) -> None:
    with pytest.raises(UsageError, match=VARIABLE) as caught:
        read_address(url)
    said = f"{caught.value} {caught.value.hint}"
    assert "%40 for @" in said
    assert "sec" not in said
    assert "ret" not in said


def test_a_folder_and_a_database_contradict_each_other(tmp_path: Path) -> None:
    url = "postgresql://a:secret@127.0.0.1/d"
    assert named_database(None, {}) == ""
    assert named_database(None, {VARIABLE: url}) == url
    with pytest.raises(UsageError, match="both say") as caught:
        named_database(tmp_path, {VARIABLE: url})
    assert "secret" not in str(caught.value)


def test_no_setting_shows_a_password() -> None:
    assert "secret" not in repr(Settings(NO_TRITON, database="postgresql://a:secret@h/d"))


def test_a_database_that_cannot_be_used_is_told_of_without_its_password(
    postgresql: Postgresql,
) -> None:
    for wrong, what in (("tester:", "nobody:"), (f":{postgresql.port}", ":1"), ("test", "none")):
        url = postgresql.address("test").replace(wrong, what)
        with pytest.raises(UsageError, match="cannot be used") as caught:
            PostgresqlDatabase(url)
        assert PASSWORD not in str(caught.value)
        assert "s3cret" not in f"{caught.value} {caught.value.hint}"


def test_a_gateway_says_so_when_it_starts(
    postgresql: Postgresql, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = postgresql.address("none")
    monkeypatch.setenv(VARIABLE, url)
    command = [sys.executable, "-m", "llmserve_cli", "gateway", "--port", "0"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert ended.returncode == 2
    assert "cannot be used" in ended.stderr
    assert "s3cret" not in ended.stderr + ended.stdout
    monkeypatch.setenv(VARIABLE, postgresql.new_database())
    with gateway_command() as port:
        assert port


def test_a_connection_that_is_lost_between_two_writes_loses_nothing(
    postgresql: Postgresql,
) -> None:
    url = postgresql.new_database()
    first, second = open_store(None, url), open_store(None, url)
    assert first
    assert second
    waits, said = StoredResponse(new_id(), "a", [], WAITS), StoredResponse(new_id(), "a", [], SAID)
    assert first.begin(waits)
    cut_all(url)
    # Who has lost its connection as well is not taken for dead.
    found = second.get("a", waits.id)
    assert found
    assert found.status == "queued"
    first.add(said)
    assert second.get("a", said.id) == said
    cut_all(url)
    assert first.unfinished() == {waits.id}
    assert first.update(waits.ended("completed"))
    cut_all(url)
    assert second.remove("a", said.id)
    first.close()
    second.close()


def test_what_is_cut_off_within_a_write_is_not_there_in_part(postgresql: Postgresql) -> None:
    url = postgresql.new_database()
    database = PostgresqlDatabase(url)
    row = "INSERT INTO sizes VALUES (?, ?)"

    def write_and_lose() -> None:
        with database.writing():
            database.execute(row, ("a", 1))
            cut_all(url)
            database.execute(row, ("b", 1))

    with pytest.raises(StoreError):
        write_and_lose()
    assert database.execute("SELECT COUNT(*) FROM sizes").fetchone() == (0,)
    with database.writing():
        database.execute(row, ("a", 1))
    assert database.execute("SELECT owner FROM sizes").fetchall() == [("a",)]
    database.close()


def test_a_database_that_has_gone_is_a_status_and_a_line_of_the_log(
    postgresql: Postgresql, caplog: pytest.LogCaptureFixture
) -> None:
    url = postgresql.new_database()
    settings = Settings(NO_TRITON, database=url)
    with caplog.at_level(logging.WARNING):
        found = ask(settings, "GET", f"/v1/responses/{new_id()}", before=lambda: _drop(url))
    assert found.status_code == 503
    assert found.json()["error"]["code"] == "store_unavailable"
    assert "retry-after" in found.headers
    assert "does not exist" in caplog.text
    assert "s3cret" not in caplog.text + found.text


def _drop(url: str) -> None:
    name = url.rpartition("/")[2]
    with psycopg.connect(url.replace(name, "postgres"), autocommit=True) as connection:
        connection.execute(f"DROP DATABASE {name} WITH (FORCE)".encode())


def test_other_tables_of_the_database_stay_as_they_are(postgresql: Postgresql) -> None:
    url = postgresql.new_database()
    with psycopg.connect(url) as connection:
        connection.execute("CREATE TABLE responses (mine TEXT)")
    for _ in range(2):
        store = open_store(None, url)
        assert store
        store.add(StoredResponse(new_id(), "a", [], SAID))
        store.close()
    with psycopg.connect(url) as connection:
        assert connection.execute("SELECT COUNT(*) FROM public.responses").fetchone() == (0,)
        assert connection.execute("SELECT COUNT(*) FROM llmserve.responses").fetchone() == (2,)
