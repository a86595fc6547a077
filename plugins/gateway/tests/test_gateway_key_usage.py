"""What keys have used by day: what is kept of it, and what a command shows."""

from __future__ import annotations

import asyncio
import json
import stat
from pathlib import Path
from typing import Any

import httpx2 as httpx
import pytest
from click.testing import CliRunner

from llmserve.errors import ConfigError
from llmserve_gateway import key_usage
from llmserve_gateway.commands import key as key_command
from llmserve_gateway.gateway import Settings
from llmserve_gateway.key_usage import (
    DAYS,
    KeyUsage,
    Used,
    add_usage,
    read_usage,
    usage_file,
)
from llmserve_gateway.keys import locked, new_key

from .gateways import NO_TRITON, TEXT, Triton, app_before, ask


class Closing(Triton):
    all: tuple[Any, ...] = ()

    async def close(self) -> None:
        pass


def shown(file: Path, *words: str) -> str:
    command = ["usage", *words, "--file", str(file)]
    done = CliRunner().invoke(key_command, command, catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.stdout


def test_what_keys_use_is_there_after_a_restart(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    alice, bob = new_key(file, "alice"), new_key(file, "bob")
    usage = usage_file(file)
    assert shown(file, "--json").strip() == "[]"
    assert shown(file) == ""

    async def go(*keys: str) -> None:
        app = app_before(Closing(), Settings(NO_TRITON, keys=file))
        transport = httpx.ASGITransport(app=app)
        async with httpx.AsyncClient(transport=transport, base_url="http://gateway") as client:
            for key in keys:
                headers = {"x-api-key": key}
                for fields in ({}, {"stream": True}, {"priority": -1}):
                    body = {**TEXT, **fields}
                    await client.post("/v1/completions", json=body, headers=headers)
                await client.get("/v1/models", headers=headers)
            written = usage.read_bytes() if usage.exists() else None
            await app.state.gateway.close()
            assert usage.read_bytes() != written, "it is written at the end, not by each request"

    asyncio.run(go(alice))
    asyncio.run(go(alice, bob))
    rows = json.loads(shown(file, "--json"))
    found = {row["name"]: (row["requests"], row["prompt_tokens"]) for row in rows}
    # Each has two requests that are answered and one that is refused.
    assert found == {"alice": (4, 8), "bob": (2, 4)}
    assert all(row["answer_tokens"] for row in rows)
    assert [row["name"] for row in json.loads(shown(file, "bob", "--json"))] == ["bob"]
    table = [line.split()[1:] for line in shown(file).splitlines()]
    assert [row[:3] for row in table[1:]] == [["alice", "4", "8"], ["bob", "2", "4"]]
    assert stat.S_IMODE(usage.stat().st_mode) == 0o600
    assert alice not in usage.read_text(encoding="utf-8")


def test_it_is_written_while_the_gateway_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(key_usage, "_PAUSE", 0.01)

    async def go() -> None:
        usage = KeyUsage(tmp_path / "keys", lambda: "2026-01-02")
        for _ in range(3):
            usage.note("a", 10, 1)
        while not usage_file(tmp_path / "keys").exists():
            await asyncio.sleep(0.01)
        usage.note("a", 10, 1)
        await usage.close()

    asyncio.run(go())
    assert read_usage(tmp_path / "keys") == {"2026-01-02": {"a": Used(4, 40, 4)}}


def test_several_gateways_add_to_one_file(tmp_path: Path) -> None:
    async def go() -> None:
        gateways = [KeyUsage(tmp_path / "keys", lambda: "2026-01-02") for _ in range(5)]
        for number in range(50):
            gateways[number % 5].note("a", 1, 2)
        await asyncio.gather(*(gateway.close() for gateway in gateways))

    asyncio.run(go())
    assert read_usage(tmp_path / "keys") == {"2026-01-02": {"a": Used(50, 50, 100)}}


def test_old_days_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "keys"
    days = [f"2026-{month:02}-{day:02}" for month in range(1, 9) for day in range(1, 29)]
    add_usage(file, {(day, "a"): Used(1, 2, 3) for day in days})
    assert list(read_usage(file)) == days[-DAYS:]
    monkeypatch.setattr(key_usage, "_MAX_ROWS", 10)
    add_usage(file, {("2026-12-01", name): Used(1) for name in "abcdefgh"})
    assert list(read_usage(file)) == [*days[-2:], "2026-12-01"]


@pytest.mark.parametrize(
    "content",
    ["", "[]", '{"days": 5}', '{"days": {"d": {"a": [1, "x", 2]}}}', '{"days": ' + "[" * 99999],
)
def test_a_file_that_is_no_usage_is_left_as_it_is(
    tmp_path: Path, content: str, caplog: pytest.LogCaptureFixture
) -> None:
    file, usage = tmp_path / "keys", usage_file(tmp_path / "keys")
    usage.write_text(content, encoding="utf-8")
    with pytest.raises(ConfigError, match="move it away"):
        shown(file)

    async def go() -> None:
        counting = KeyUsage(file)
        counting.note("a", 1, 1)
        await counting.close()
        await counting.close()
        assert usage.read_text(encoding="utf-8") == content
        usage.unlink()
        await counting.close()

    asyncio.run(go())
    assert caplog.text.count("is not written") == 1
    ((rows),) = read_usage(file).values()
    assert rows == {"a": Used(1, 1, 1)}, "nothing is lost"


def test_what_is_read_is_of_now_also_while_it_is_written(tmp_path: Path) -> None:
    async def go() -> None:
        counting = KeyUsage(tmp_path / "keys", lambda: "2026-01-02")
        for number in range(1, 20):
            counting.note("a", 1, 0)
            writing = asyncio.ensure_future(counting.close())
            await asyncio.sleep(0)
            assert await counting.read() == {"2026-01-02": {"a": Used(number, number, 0)}}
            await writing

    asyncio.run(go())


def test_a_key_sees_what_it_has_used_and_one_that_measures_all_what_all_have(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "keys"
    keys = {name: new_key(file, name) for name in ("alice", "bob")}
    keys["all"] = new_key(file, "all", all_metrics=True)
    days = [f"2026-01-{day:02}" for day in range(1, 10)]
    add_usage(file, {(day, name): Used(1, 2, 3) for day in days for name in ("alice", "gone")})

    async def go() -> None:
        app = app_before(Closing(), Settings(NO_TRITON, keys=file))
        transport = httpx.ASGITransport(app=app)
        async with httpx.AsyncClient(transport=transport, base_url="http://gateway") as client:

            async def rows(key: str) -> list[dict[str, Any]]:
                answer = await client.get("/usage", headers={"x-api-key": key})
                return list(answer.json()["usage"])

            sent = {"x-api-key": keys["bob"]}
            await client.post("/v1/completions", json=TEXT, headers=sent)
            row = {"requests": 1, "prompt_tokens": 2, "answer_tokens": 3}
            # The last of the seven days is today, on which nothing is written yet.
            assert await rows(keys["alice"]) == [
                {"day": day, "name": "alice", **row} for day in days[-6:]
            ]
            (own,) = await rows(keys["bob"])
            assert (own["name"], own["requests"], own["prompt_tokens"]) == ("bob", 1, 2)
            assert {each["name"] for each in await rows(keys["all"])} == {"alice", "bob", "gone"}
            assert (await client.get("/usage")).status_code == 401
            usage_file(file).write_text("[]", encoding="utf-8")
            broken = await client.get("/usage", headers=sent)
            assert (broken.status_code, str(tmp_path) in broken.text) == (500, False)
            assert "does not say what keys have used" in caplog.text

    asyncio.run(go())
    assert ask(Settings(NO_TRITON), "GET", "/usage").json() == {"usage": []}


def test_a_folder_that_cannot_be_written_stops_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def go() -> None:
        counting = KeyUsage(tmp_path / "gone" / "keys")
        counting.note("a", 1, 1)
        await counting.close()

    asyncio.run(go())
    assert "is not written: cannot write" in caplog.text


def test_a_folder_that_another_locks_stops_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(key_usage, "_PATIENCE", 0.1)

    async def go() -> None:
        counting = KeyUsage(tmp_path / "keys")
        counting.note("a", 1, 1)
        with locked(tmp_path / "keys"):
            await counting.close()
        assert "another program holds the lock" in caplog.text
        await counting.close()

    asyncio.run(go())
    ((rows),) = read_usage(tmp_path / "keys").values()
    assert rows == {"a": Used(1, 1, 1)}, "nothing is lost"


def test_a_name_in_the_table_tells_the_terminal_nothing(tmp_path: Path) -> None:
    days: dict[Any, Used] = {("\x1b[2J", "\x1b]0;evil\x07"): Used(1)}
    add_usage(tmp_path / "keys", days)
    assert "\x1b" not in shown(tmp_path / "keys")


def test_metrics_count_by_key_and_show_others_to_who_measures_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("llmserve_gateway.metrics._MOST_KEYS", 2)
    file = tmp_path / "keys"
    keys = {name: new_key(file, name) for name in ("alice", "bob", "carol", "dora")}
    keys["all"] = new_key(file, "all", models=["none"], all_metrics=True)

    async def go(*asking: str, is_open: bool) -> dict[str, list[str]]:
        app = app_before(Closing(), Settings(NO_TRITON, keys=file, open_metrics=is_open))
        transport = httpx.ASGITransport(app=app)
        async with httpx.AsyncClient(transport=transport, base_url="http://gateway") as client:

            async def lines(key: str) -> list[str]:
                answer = await client.get("/metrics", headers={"x-api-key": key})
                assert answer.status_code == 200
                said = answer.text.splitlines()
                return [line for line in said if line.startswith("llmserve_key_")]

            for name in asking:
                headers = {"x-api-key": keys[name]}
                await client.post("/v1/completions", json=TEXT, headers=headers)
                refused = {**TEXT, "priority": -1}
                await client.post("/v1/completions", json=refused, headers=headers)
            return {name: await lines(key) for name, key in keys.items()}

    found = asyncio.run(go("alice", "alice", "bob", "carol", "dora", is_open=False))
    rows = {line.split()[0]: float(line.split()[1]) for line in found["all"] if "_total{" in line}
    # A third name is not counted by.
    for name, count in {"alice": 2, "bob": 1, "-": 2}.items():
        assert rows[f'llmserve_key_requests_total{{key="{name}"}}'] == count
        assert rows[f'llmserve_key_tokens_total{{key="{name}",of="prompt"}}'] == 2 * count
        assert rows[f'llmserve_key_tokens_total{{key="{name}",of="answer"}}'] > 0
    assert len(rows) == 9
    assert not any(f'key="{name}"' in line for line in found["all"] for name in ("carol", "dora"))
    assert {line.split('key="')[1].split('"')[0] for line in found["alice"]} == {"alice"}
    # What is open to everyone says nothing of keys.
    assert not any(asyncio.run(go("alice", is_open=True)).values())
