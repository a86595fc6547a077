"""Files and batches, with OpenAI's own client in front of an application in this process."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import signal
import stat
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager, closing, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx2 as httpx
import numpy as np
import openai
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmserve.client import (
    BatchFileError,
    BatchJob,
    BatchLine,
    BatchRequests,
    Completion,
    Computed,
    ModelInfo,
)
from llmserve.errors import ClientError, ModelNotReadyError, UsageError
from llmserve.plugin import Place
from llmserve.runtime.contract import EMBED
from llmserve.server import ModelReport, ReplicaReport, State
from llmserve.testing import ScriptedTriton
from llmserve.testing.batches import shorten_pauses
from llmserve_gateway import llmserve_register_frontends
from llmserve_gateway.admission import Admission, Limits
from llmserve_gateway.batches import asking, checking, routes, runner, uploads
from llmserve_gateway.batches.calls import Call
from llmserve_gateway.batches.folder import Folder
from llmserve_gateway.batches.records import Batch, StoredFile
from llmserve_gateway.batches.runner import Runner
from llmserve_gateway.gateway import Settings
from llmserve_gateway.keys import BatchKey, hash_key, new_key, read_keys

from .gateways import NO_TRITON, SeeingTriton, Triton, app_before, client_of, gateway_process

Work = Callable[[openai.AsyncOpenAI], Awaitable[None]]


CANARY = "a"
"""What the gateway asks an idle model itself."""


class Model(Triton):
    """Answers as its prompts say, and knows who is asked at the same time."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: Counter[str] = Counter()
        self.running: list[str] = []
        self.most = 0
        self.gate = asyncio.Event()
        self.is_loaded = True

    async def close(self) -> None:
        pass

    async def models(self) -> list[str]:
        return ["m"] if self.is_loaded else []

    def is_available(self, name: str) -> bool:
        return True

    async def generate(self, name: str, prompt: str, **options: Any) -> Completion:
        if options.get("prompt_only"):
            return Completion("{}", "stop", 0, 0)
        if prompt == CANARY:
            return Completion("a", "stop", 1, 1)
        if not self.is_loaded:
            raise ModelNotReadyError(f"{name} is not there")
        self.asked[prompt] += 1
        self.running.append(prompt)
        self.most = max(self.most, len(self.running))
        try:
            await self._work(prompt)
        finally:
            self.running.remove(prompt)
        return Completion(f"to {prompt}", "stop", 2, 1)

    async def _work(self, prompt: str) -> None:
        kind = prompt.split()[0]
        if kind == "wait":
            await self.gate.wait()
        elif kind == "deadly" or (kind == "near" and self.asked[prompt] == 1):
            await asyncio.sleep(0.01)
            raise ClientError("gone", code="model_died")
        elif kind == "slow":
            await asyncio.sleep(0.01)
        elif kind == "refused":
            raise ClientError("too long", code="context_length_exceeded")
        elif kind == "busy" and self.asked[prompt] == 1:
            raise ClientError("full", code="queue_full")
        else:
            await asyncio.sleep(0)


def settings_of(folder: Path, **changes: Any) -> Settings:
    return replace(Settings(NO_TRITON, batches=folder / "batches"), **changes)


@asynccontextmanager
async def serving(
    model: Model, settings: Settings, key: str = "none"
) -> AsyncIterator[openai.AsyncOpenAI]:
    app = app_before(model, settings)
    async with app.router.lifespan_context(app):
        yield client_of(app, key)


def run(model: Model, settings: Settings, work: Work, **more: Any) -> None:
    async def go() -> None:
        async with serving(model, settings, **more) as client:
            await asyncio.wait_for(work(client), 20)

    asyncio.run(go())


def line(name: str, prompt: str = "", **fields: Any) -> dict[str, Any]:
    body = {"model": "m", "prompt": prompt or name, "max_tokens": 4}
    return {"custom_id": name, "method": "POST", "url": "/v1/completions", "body": body} | fields


def content_of(lines: list[dict[str, Any]]) -> bytes:
    return b"".join(json.dumps(line).encode() + b"\n" for line in lines)


async def begin(
    client: openai.AsyncOpenAI, content: list[dict[str, Any]] | bytes, **fields: Any
) -> Any:
    data = content if isinstance(content, bytes) else content_of(content)
    file = await client.files.create(file=("requests.jsonl", data), purpose="batch")
    options: Any = {"endpoint": "/v1/completions", "completion_window": "24h", **fields}
    return await client.batches.create(input_file_id=file.id, **options)


async def ended(client: openai.AsyncOpenAI, batch: Any) -> Any:
    while batch.status not in ("completed", "failed", "expired", "cancelled"):
        await asyncio.sleep(0.01)
        batch = await client.batches.retrieve(batch.id)
    return batch


async def results(client: openai.AsyncOpenAI, name: str | None) -> dict[str, Any]:
    if name is None:
        return {}
    text = (await client.files.content(name)).text
    found = [json.loads(line) for line in text.splitlines()]
    assert len(found) == len({line["custom_id"] for line in found})
    return {line["custom_id"]: line for line in found}


def test_openais_client_uploads_a_file_and_gets_its_answers(tmp_path: Path) -> None:
    model = Model()

    async def work(client: openai.AsyncOpenAI) -> None:
        prompts = [*map(str, range(40)), "refused", "busy"]
        batch = await begin(client, [line(p) for p in prompts], metadata={"for": "a test"})
        assert (batch.status, batch.object) == ("validating", "batch")
        batch = await ended(client, batch)
        assert batch.status == "completed"
        counts = batch.request_counts
        assert (counts.total, counts.completed, counts.failed) == (42, 41, 1)
        assert batch.metadata == {"for": "a test"}
        assert batch.in_progress_at <= batch.finalizing_at <= batch.completed_at
        assert batch.expires_at == batch.created_at + 86400
        answers = await results(client, batch.output_file_id)
        assert answers.keys() == {*prompts} - {"refused"}
        for name, answer in answers.items():
            assert answer["response"]["status_code"] == 200
            assert answer["response"]["body"]["choices"][0]["text"] == f"to {name}"
            assert answer["error"] is None
        (error,) = (await results(client, batch.error_file_id)).values()
        assert error["response"]["status_code"] == 400
        assert error["response"]["body"]["error"]["code"] == "context_length_exceeded"
        assert error["error"]["code"] == "context_length_exceeded"
        files = [file async for file in client.files.list()]
        assert {file.purpose for file in files} == {"batch", "batch_output"}
        source = await client.files.retrieve(batch.input_file_id)
        assert (source.filename, source.status) == ("requests.jsonl", "processed")
        assert source.bytes == len(content_of([line(p) for p in prompts]))
        for file in files:
            assert (await client.files.delete(file.id)).deleted
        with pytest.raises(openai.NotFoundError):
            await client.files.content(source.id)
        assert [entry.id async for entry in client.batches.list()] == [batch.id]

    run(model, settings_of(tmp_path), work)
    assert model.asked == Counter([*map(str, range(40)), "refused", "busy", "busy"])
    folders = [path for path in tmp_path.rglob("*") if path.is_dir()]
    assert {stat.S_IMODE(path.stat().st_mode) for path in folders} == {0o700}
    kept = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert {stat.S_IMODE(path.stat().st_mode) for path in kept} == {0o600}
    # The record of the batch, and the lock.
    assert len(kept) == 2


@pytest.mark.parametrize(
    ("content", "number", "message"),
    [
        (b"{", 1, "is not JSON"),
        (b"\n", None, "is empty"),
        (content_of([line("1"), line("1")]), 2, "has the custom_id of line 1"),
        (content_of([line("1"), line("2", url="/v1/responses")]), 2, "has no url"),
        (content_of([line("1", body={"model": "m", "stream": True})]), 1, "asks for a stream"),
        (content_of([line(str(n)) for n in range(4)]), None, "has more than 3 requests"),
        (content_of([line("1"), line("2", "x" * 300)]), 2, "is over 300 bytes"),
        (content_of([line("1"), line("2" * 31)]), 2, "has a custom_id of over 30 characters"),
        (content_of([line("1", body={"model": "m" * 31})]), 1, "has a model of over 30"),
    ],
)
def test_a_file_that_is_none_of_requests_fails_its_batch(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    content: bytes,
    number: int | None,
    message: str,
) -> None:
    monkeypatch.setattr(runner, "MAX_REQUESTS", 3)
    monkeypatch.setattr(runner, "MAX_LINE", 300)
    monkeypatch.setattr(runner, "MAX_NAME", 30)
    model = Model()

    async def work(client: openai.AsyncOpenAI) -> None:
        batch = await ended(client, await begin(client, content))
        assert batch.status == "failed"
        assert batch.failed_at
        (error,) = batch.errors.data
        assert error.line == number
        assert error.message.startswith(message)
        assert str(tmp_path) not in error.message
        assert batch.output_file_id is None

    run(model, settings_of(tmp_path), work)
    assert not model.asked


def test_lines_that_are_much_in_memory_fail_their_batch_and_hold_up_nobody(tmp_path: Path) -> None:
    nested = [json.loads("[" * 50 + "]" * 50)] * 20_000
    bomb = json.dumps(line("1", body={"model": "m", "prompt": "x", "unknown": nested})).encode()

    async def work(client: openai.AsyncOpenAI) -> None:
        batch = await begin(client, (bomb + b"\n") * 10)
        longest = 0.0
        while batch.status != "failed":
            began = time.monotonic()
            await client.models.list()
            longest = max(longest, time.monotonic() - began)
            batch = await client.batches.retrieve(batch.id)
        assert batch.errors
        assert batch.errors.data
        (error,) = batch.errors.data
        assert (error.line, error.code) == (1, "invalid_request")
        assert error.message == "has more than 100000 lists, objects and keys: divide it"
        assert longest < 1

    run(Model(), settings_of(tmp_path), work)


SMALL = f"data:image/jpeg;base64,{'A' * (1 << 20)}"
PHOTO = f"data:image/jpeg;base64,{'A' * (4 << 20)}"

CUT = "data:image/png;base64,Y3V0"


class SeeingModel(SeeingTriton, Model):
    """Refuses an image that is cut off, and knows how many photos it is asked about at once."""

    async def generate(self, name: str, prompt: str, **options: Any) -> Completion:
        if "messages" not in options:
            return await super().generate(name, prompt, **options)
        urls: list[str] = options.get("image_url", [])
        if CUT in urls:
            raise ClientError("image 1 is cut off or damaged", code="invalid_value")
        self.running += urls
        self.most = max(self.most, len(self.running))
        await asyncio.sleep(0.01)
        del self.running[: len(urls)]
        return Completion(f"{len(urls)} seen", "stop", 9, 1)


def seen(name: str, *urls: str, text: str = "What?") -> dict[str, Any]:
    parts = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
    content = [*parts, {"type": "text", "text": text}]
    body = {"model": "m", "messages": [{"role": "user", "content": content}], "max_tokens": 4}
    return line(name, url="/v1/chat/completions", body=body)


def test_a_line_has_images_as_a_request_has_and_a_bad_one_fails_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(asking, "MAX_BYTES", 0)
    monkeypatch.setattr(asking, "MAX_IMAGE_BYTES", 5 << 19)
    monkeypatch.setattr(asking, "_PAUSE_OF_LARGE", 0.01)
    model = SeeingModel()
    lines = [
        seen("one", PHOTO), seen("two", SMALL, SMALL), seen("none"), seen("cut", CUT),
        seen("address", "https://images.example.com/a.png"), seen("text", text="A" * (4 << 20)),
        *(seen(f"more {n}", SMALL) for n in range(3)),
    ]  # fmt: skip

    async def work(client: openai.AsyncOpenAI) -> None:
        batch = await begin(client, lines, endpoint="/v1/chat/completions")
        batch = await ended(client, batch)
        assert batch.status == "completed", batch.errors
        answers = await results(client, batch.output_file_id)
        found = {
            name: answer["response"]["body"]["choices"][0]["message"]["content"]
            for name, answer in answers.items()
        }
        photos = {"none": 0, "one": 1, "two": 2, **{f"more {n}": 1 for n in range(3)}}
        assert found == {name: f"{count} seen" for name, count in photos.items()}
        errors = await results(client, batch.error_file_id)
        said = {name: error["error"]["message"] for name, error in errors.items()}
        assert said.keys() == {"cut", "address", "text"}
        assert "image 1 is cut off or damaged" in said["cut"]
        assert "this server opens no addresses" in said["address"]
        assert "the request is over 4 MB" in said["text"]

    run(model, settings_of(tmp_path), work)
    # There is room for 2.5 MB of lines at once, or for one that is alone.
    assert model.most == 2


def test_a_batch_whose_gateway_died_while_it_was_checked_is_not_checked_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = settings_of(tmp_path)
    checked, begun = checking.checked, asyncio.Event()

    async def hangs(*_: Any) -> Any:
        begun.set()
        await asyncio.sleep(60)

    names: list[str] = []

    async def stopped(client: openai.AsyncOpenAI) -> None:
        for _ in range(2):
            names.append((await begin(client, [line("1")])).id)
            await begun.wait()

    monkeypatch.setattr(runner, "checked", hangs)
    run(Model(), kept, stopped)
    # Who stops it in order leaves no mark: only one that is killed does.
    marks = {path: path.read_text(encoding="utf-8") for path in tmp_path.rglob("batch_*.json")}
    assert [json.loads(text)["is_being_checked"] for text in marks.values()] == [False, False]
    (path,) = (path for path in marks if path.stem == names[0])
    path.write_text(marks[path].replace('"is_being_checked": false', '"is_being_checked": true'))
    monkeypatch.setattr(runner, "checked", checked)

    async def again(client: openai.AsyncOpenAI) -> None:
        first, second = [await ended(client, await client.batches.retrieve(n)) for n in names]
        assert (first.status, second.status) == ("failed", "completed")
        assert first.errors.data[0].code == "validation_interrupted"

    run(Model(), kept, again)


def test_a_check_ends_with_its_gateway_and_says_what_ends_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    content = content_of([line(str(number)) for number in range(20_000)])
    (path := tmp_path / "in").write_bytes(content)
    started: list[Any] = []
    popen = subprocess.Popen

    def start(*args: Any, **options: Any) -> Any:
        started.append(popen(*args, **options))
        return started[-1]

    monkeypatch.setattr(subprocess, "Popen", start)

    async def go() -> None:
        task = asyncio.ensure_future(checking.checked(path, {}))
        while not started:
            await asyncio.sleep(0.001)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert started[0].returncode == -signal.SIGKILL
        with closing(await checking.checked(path, {})) as requests:
            assert requests.body(requests.all[-1])["prompt"] == "19999"
        task = asyncio.ensure_future(checking.checked(path, {}))
        while len(started) < 3:
            await asyncio.sleep(0.001)
        started[2].kill()
        with pytest.raises(BatchFileError, match="takes too long to check"):
            await task

    asyncio.run(go())
    orphan = popen(
        [sys.executable, "-m", checking.__name__, str(path), "{}"],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
    )
    assert orphan.stdin
    orphan.stdin.close()
    assert orphan.wait(20) in (0, 1)


def test_one_key_never_sees_what_is_of_another(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    mine = new_key(keys, "me", models=["m"])
    other = new_key(keys, "other", models=["n"])

    async def work(client: openai.AsyncOpenAI) -> None:
        foreign = client_of(client.app, other)  # type: ignore[attr-defined]
        batch = await ended(client, await begin(client, [line("1")]))
        assert await results(client, batch.output_file_id)
        for ask in (
            foreign.files.retrieve(batch.input_file_id),
            foreign.files.content(batch.output_file_id),
            foreign.files.delete(batch.input_file_id),
            foreign.batches.retrieve(batch.id),
            foreign.batches.cancel(batch.id),
        ):
            with pytest.raises(openai.NotFoundError):
                await ask
        with pytest.raises(openai.BadRequestError, match="there is no file"):
            await foreign.batches.create(
                input_file_id=batch.input_file_id,
                endpoint="/v1/completions",
                completion_window="24h",
            )
        assert [entry async for entry in foreign.files.list()] == []
        assert [entry async for entry in foreign.batches.list()] == []
        # A batch has the rights of its key.
        refused = await ended(foreign, await begin(foreign, [line("1")]))
        (error,) = (await results(foreign, refused.error_file_id)).values()
        assert error["response"]["status_code"] == 403
        with pytest.raises(openai.AuthenticationError):
            await client_of(client.app, "none").files.list()  # type: ignore[attr-defined]

    run(Model(), settings_of(tmp_path, keys=keys), work, key=mine)


def test_a_key_that_is_withdrawn_has_nothing_asked_any_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner, "_PERIOD", 0.01)
    keys, model = tmp_path / "keys", Model()
    mine = new_key(keys, "me")

    async def work(client: openai.AsyncOpenAI) -> None:
        limits = replace(Limits(), batch_requests=1)
        assert limits.batch_requests == 1
        batch = await begin(client, [line("1", "wait"), line("2")])
        await until(lambda: model.running == ["wait"])
        text = keys.read_text(encoding="utf-8")
        keys.write_text('{"keys": []}', encoding="utf-8")
        model.gate.set()
        await until(lambda: not model.running)
        await asyncio.sleep(0.1)
        assert "2" not in model.asked
        keys.write_text(text, encoding="utf-8")
        assert (await ended(client, batch)).request_counts.completed == 2

    limits = Limits(batch_requests=1)
    run(model, settings_of(tmp_path, keys=keys, limits=limits), work, key=mine)
    assert read_keys(keys)[0].sha256 == hash_key(mine)


def test_a_batch_whose_key_is_withdrawn_leaves_its_place_to_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner, "_OPEN", 1)
    monkeypatch.setattr(runner, "_PERIOD", 0.01)
    keys, model = tmp_path / "keys", Model()
    other, mine = new_key(keys, "other"), new_key(keys, "me")

    async def work(client: openai.AsyncOpenAI) -> None:
        foreign = client_of(client.app, other)  # type: ignore[attr-defined]
        begun = await begin(foreign, [line("1", "wait"), line("2")])
        waiting = await begin(foreign, [line("3")])
        await until(lambda: model.asked["wait"])
        both = keys.read_text(encoding="utf-8")
        left = [key for key in json.loads(both)["keys"] if key["name"] == "me"]
        keys.write_text(json.dumps({"keys": left}), encoding="utf-8")
        model.gate.set()
        batch = await ended(client, await begin(client, [line("4")]))
        assert batch.request_counts.completed == 1
        assert model.asked == {"wait": 1, "4": 1}
        keys.write_text(both, encoding="utf-8")
        assert (await ended(foreign, begun)).request_counts.completed == 2
        assert (await ended(foreign, waiting)).request_counts.completed == 1

    limits = Limits(batch_requests=1)
    run(model, settings_of(tmp_path, keys=keys, limits=limits), work, key=mine)
    assert model.asked == {"wait": 1, "2": 1, "3": 1, "4": 1}


def test_a_line_that_is_asked_again_costs_its_key_one_request(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shorten_pauses(monkeypatch, first=0.01)
    keys, model = tmp_path / "keys", Model()
    mine = new_key(keys, "me", requests_per_minute=3)

    async def work(client: openai.AsyncOpenAI) -> None:
        batch = await begin(client, [line("1", "busy 1"), line("2", "busy 2")])
        batch = await ended(client, batch)
        assert batch.request_counts.completed == 2
        await client.completions.create(model="m", prompt="live")
        with pytest.raises(openai.RateLimitError):
            await client.completions.create(model="m", prompt="live")

    run(model, settings_of(tmp_path, keys=keys), work, key=mine)
    assert model.asked == {"busy 1": 2, "busy 2": 2, "live": 1}


def test_an_answer_that_cannot_be_kept_costs_its_tokens_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shorten_pauses(monkeypatch, longest=0.01)
    monkeypatch.setattr(runner, "_PERIOD", 0.01)
    keys, write = tmp_path / "keys", os.write
    mine = new_key(keys, "me", tokens_per_minute=100)

    class Talkative(Model):
        async def generate(self, name: str, prompt: str, **options: Any) -> Completion:
            return replace(await super().generate(name, prompt, **options), output_tokens=30)

    model = Talkative()

    def full(*args: Any) -> int:
        if model.asked["1"] <= 4:
            raise OSError(errno.ENOSPC, "full")
        return write(*args)

    async def work(client: openai.AsyncOpenAI) -> None:
        batch = await begin(client, [line("1")])
        with monkeypatch.context() as patch:
            patch.setattr(os, "write", full)
            batch = await ended(client, batch)
        assert batch.request_counts.completed == 1
        await client.completions.create(model="m", prompt="live")

    run(model, settings_of(tmp_path, keys=keys), work, key=mine)
    assert model.asked == {"1": 5, "live": 1}


async def until(holds: Callable[[], Any]) -> None:
    deadline = time.monotonic() + 10
    while not holds():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.005)


def test_a_batch_is_cancelled_with_what_it_has(tmp_path: Path) -> None:
    model = Model()

    async def work(client: openai.AsyncOpenAI) -> None:
        batch = await begin(client, [line("1"), line("2", "wait"), line("3", "wait")])
        await until(lambda: model.running == ["wait", "wait"])
        with pytest.raises(openai.BadRequestError, match="is not finished reads this file"):
            await client.files.delete(batch.input_file_id)
        assert (await client.batches.cancel(batch.id)).status == "cancelling"
        batch = await ended(client, batch)
        assert (batch.status, model.running) == ("cancelled", [])
        assert batch.cancelling_at <= batch.cancelled_at
        assert (await results(client, batch.output_file_id)).keys() == {"1"}
        errors = await results(client, batch.error_file_id)
        assert {name: e["error"]["code"] for name, e in errors.items()} == {
            "2": "batch_cancelled", "3": "batch_cancelled",
        }  # fmt: skip
        assert errors["2"]["response"] is None
        with pytest.raises(openai.BadRequestError, match="is cancelled, and cannot be"):
            await client.batches.cancel(batch.id)

    run(model, settings_of(tmp_path), work)


def test_a_batch_whose_time_is_over_has_an_error_for_each_line_that_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Of whole seconds: at least one is left.
    monkeypatch.setattr(routes, "read_window", lambda text: 2)
    model = Model()

    async def work(client: openai.AsyncOpenAI) -> None:
        batch = await begin(client, [line("1"), line("2", "wait")])
        batch = await ended(client, batch)
        assert (batch.status, model.running) == ("expired", [])
        assert (await results(client, batch.output_file_id)).keys() == {"1"}
        (error,) = (await results(client, batch.error_file_id)).values()
        assert error["error"]["code"] == "batch_expired"

    run(model, settings_of(tmp_path), work)


def test_others_come_first_and_the_oldest_request_of_a_batch_gets_to_its_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(asking, "QUIET", 0.1)
    model = Model()
    limits = Limits(max_requests=8, max_queue=0, batch_requests=32, batch_beside=1)

    async def work(client: openai.AsyncOpenAI) -> None:
        batch = await begin(client, [line(str(n), f"wait {n}") for n in range(12)])
        await until(lambda: len(model.running) == 4)
        first = model.running[0]
        ask = client.completions.create(model="m", prompt="wait for me")
        live = asyncio.ensure_future(ask)
        await until(lambda: model.running == [first, "wait for me"])
        await asyncio.sleep(0.15)
        assert model.running == [first, "wait for me"]
        # All slots that there are, although the batch has one: it is not refused.
        more = [
            asyncio.ensure_future(client.completions.create(model="m", prompt=f"wait too {n}"))
            for n in range(6)
        ]
        await until(lambda: len(model.running) == 8)
        model.gate.set()
        await live
        assert (await asyncio.gather(*more))[0].choices[0].text == "to wait too 0"
        batch = await ended(client, batch)
        assert batch.request_counts.completed == 12

    run(model, settings_of(tmp_path, limits=limits), work)
    assert model.most == 8
    assert 12 < sum(count for p, count in model.asked.items() if p[5:].isdigit()) <= 12 + 3


def several(name: str, prompt: str, answers: int) -> dict[str, Any]:
    return line(name, body={"model": "m", "prompt": prompt, "n": answers})


def test_a_line_with_many_answers_leaves_slots_to_others(tmp_path: Path) -> None:
    model = Model()

    async def work(client: openai.AsyncOpenAI) -> None:
        batch = await begin(client, [several("1", "wait", 8)])
        await until(lambda: len(model.running) == 8)
        answer = await client.completions.create(model="m", prompt="live", n=2)
        assert [choice.text for choice in answer.choices] == ["to live"] * 2
        assert len(model.running) == 8
        model.gate.set()
        assert (await ended(client, batch)).request_counts.completed == 1

    run(model, settings_of(tmp_path, limits=Limits(max_requests=4)), work)


def test_a_line_leaves_its_slots_to_who_has_too_few(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(asking, "QUIET", 0.1)
    monkeypatch.setattr(asking, "ADVANCE", float("inf"))
    model = Model()

    async def work(client: openai.AsyncOpenAI) -> None:
        batch = await begin(client, [several("1", "wait", 4)])
        await until(lambda: len(model.running) == 4)
        await client.completions.create(model="m", prompt="live", n=2)
        assert model.asked["wait"] == len(model.running) == 4, "it runs beside others"
        answer = await client.completions.create(model="m", prompt="live", n=3)
        assert len(answer.choices) == 3
        model.gate.set()
        assert (await ended(client, batch)).request_counts.completed == 1

    run(model, settings_of(tmp_path, limits=Limits(max_requests=4)), work)


def test_lines_with_several_answers_wait_for_each_other(tmp_path: Path) -> None:
    class Timed(Model):
        least = 600.0

        async def generate(self, name: str, prompt: str, **options: Any) -> Completion:
            if prompt.startswith("slow"):
                self.least = min(self.least, options["timeout"])
            return await super().generate(name, prompt, **options)

    model = Timed()

    async def work(client: openai.AsyncOpenAI) -> None:
        asked = [several(str(n), f"slow {n}", 1 + n % 3) for n in range(9)]
        batch = await ended(client, await begin(client, asked))
        assert batch.request_counts.completed == 9

    run(model, settings_of(tmp_path, limits=Limits(max_requests=6)), work)
    assert model.most == 3
    assert model.least > 599.0, "what a line waits does not take of its time"


def test_a_request_for_all_slots_has_its_turn_between_lines_of_batches() -> None:
    async def go() -> None:
        admission, order = Admission(Limits(max_requests=4)), list[str]()

        async def beside(name: str) -> None:
            async with admission.admit_beside(1):
                order.append(name)
                await asyncio.sleep(0.01 * int(name))

        async def live() -> None:
            async with admission.admit(4):
                order.append("live")

        await asyncio.gather(beside("1"), beside("2"), live(), beside("3"), beside("4"))
        assert order == ["1", "2", "live", "3", "4"]
        assert (admission.beside, admission.running) == (0, 0)

    asyncio.run(go())


def test_a_batch_advances_even_if_others_never_pause(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(asking, "ADVANCE", 0.05)
    shorten_pauses(monkeypatch, period=0.02)
    model = Model()

    async def work(client: openai.AsyncOpenAI) -> None:
        ask = client.completions.create(model="m", prompt="wait for me")
        live = asyncio.ensure_future(ask)
        await until(lambda: model.running == ["wait for me"])
        began = time.monotonic()
        await ended(client, await begin(client, [line(str(n)) for n in range(4)]))
        assert time.monotonic() - began > 3 * 0.05
        assert model.running == ["wait for me"]
        model.gate.set()
        await live

    run(model, settings_of(tmp_path, limits=Limits(batch_beside=0)), work)
    assert model.most == 2


def test_a_line_that_ends_its_model_costs_only_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shorten_pauses(monkeypatch, first=0.02, longest=0.02)
    model = Model()
    beside: list[list[str]] = []
    fatal: set[str] = set()

    class Watched(Model):
        async def _work(self, prompt: str) -> None:
            is_again = prompt in fatal
            if is_again:
                beside.append([*self.running])
            try:
                await super()._work(prompt)
            except ClientError:
                fatal.add(prompt)
                raise
            finally:
                if is_again:
                    beside.append([*self.running])

    model = Watched()

    async def work(client: openai.AsyncOpenAI) -> None:
        gateway = client.app.state.gateway  # type: ignore[attr-defined]
        gateway.catalog.record_failure = lambda *_: None
        names = ["deadly", *(f"near {n}" for n in range(5)), *map(str, range(30))]
        batch = await ended(client, await begin(client, [line(name) for name in names]))
        assert batch.request_counts.failed == 1
        (error,) = (await results(client, batch.error_file_id)).values()
        assert (error["custom_id"], error["error"]["code"]) == ("deadly", "model_died")
        assert (await results(client, batch.output_file_id)).keys() == {*names} - {"deadly"}

    run(model, settings_of(tmp_path), work)
    assert model.asked["deadly"] == 2
    # Each that its model has died of, or beside, is asked again alone.
    assert len(beside) == 2 * (1 + 5)
    assert all(len(running) == 1 for running in beside)


def test_suspects_of_a_model_that_is_away_hold_up_no_other_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shorten_pauses(monkeypatch, first=0.01, longest=0.01)
    away = {"is": False}

    class Both(Model):
        async def models(self) -> list[str]:
            return ["m", "dead"]

        async def model_ready(self, name: str) -> bool:
            return True

        async def generate(self, name: str, prompt: str, **options: Any) -> Completion:
            if name == "dead" and prompt != CANARY and not options.get("prompt_only"):
                self.asked[prompt] += 1
                if self.asked[prompt] == 1 and not self.gate.is_set():
                    away["is"] = True
                    await asyncio.sleep(0)
                    raise ClientError("gone", code="model_died")
                return Completion(f"to {prompt}", "stop", 2, 1)
            return await super().generate(name, prompt, **options)

    model = Both()

    def state() -> ReplicaReport:
        dead = ModelReport("dead", State.RESTARTING if away["is"] else State.READY, "died")
        return ReplicaReport(State.READY, models=(dead,))

    async def work(client: openai.AsyncOpenAI) -> None:
        gateway = client.app.state.gateway  # type: ignore[attr-defined]
        gateway.catalog.record_failure = lambda *_: None
        fatal = [line(f"d{n}", body={"model": "dead", "prompt": f"d{n}"}) for n in range(40)]
        dying = await begin(client, fatal)
        await until(lambda: away["is"])
        await asyncio.sleep(0.05)
        other = await begin(client, [line("1", "wait"), *(line(str(n)) for n in range(2, 40))])
        # No suspect has its turn, for which all others would have to end.
        await until(lambda: model.asked["39"] and model.running == ["wait"])
        # Nothing of it is asked but what was in flight.
        assert sum(name.startswith("d") for name in model.asked) <= 32
        away["is"] = False
        model.gate.set()
        assert (await ended(client, other)).request_counts.completed == 39
        assert (await ended(client, dying)).request_counts.completed == 40

    run(model, settings_of(tmp_path, supervisor=state), work)


class _Late(Model):
    """Is loaded just after it was not there."""

    async def generate(self, name: str, prompt: str, **options: Any) -> Completion:
        try:
            return await super().generate(name, prompt, **options)
        except ModelNotReadyError:
            self.is_loaded = True
            raise


def test_a_line_that_a_model_just_missed_is_asked_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shorten_pauses(monkeypatch, first=0.02)
    model = _Late()
    model.is_loaded = False

    async def work(client: openai.AsyncOpenAI) -> None:
        batch = await begin(client, [line("1"), line("2")])
        assert (await ended(client, batch)).request_counts.completed == 2

    run(model, settings_of(tmp_path), work)


def test_a_model_that_still_loads_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shorten_pauses(monkeypatch, first=0.02, longest=0.02)
    model = Model()
    model.is_loaded = False

    async def work(client: openai.AsyncOpenAI) -> None:
        batch = await begin(client, [line("1"), line("2")])
        while batch.status == "validating":
            await asyncio.sleep(0.01)
            batch = await client.batches.retrieve(batch.id)
        await asyncio.sleep(0.2)
        batch = await client.batches.retrieve(batch.id)
        assert batch.request_counts is not None
        assert (batch.status, batch.request_counts.failed) == ("in_progress", 0)
        model.is_loaded = True
        assert (await ended(client, batch)).request_counts.completed == 2

    run(model, settings_of(tmp_path), work)


def test_a_model_that_is_not_offered_is_not_waited_for(tmp_path: Path) -> None:
    models = tuple(ModelReport(name, State.READY) for name in "mn")
    report = ReplicaReport(State.READY, models=models)

    async def work(client: openai.AsyncOpenAI) -> None:
        asked = [line("1"), line("2", body={"model": "n", "prompt": "2"})]
        batch = await ended(client, await begin(client, asked))
        (error,) = (await results(client, batch.error_file_id)).values()
        assert (error["custom_id"], error["error"]["code"]) == ("2", "model_not_found")

    kept = settings_of(tmp_path, models=("m",), supervisor=lambda: report)
    run(Model(), kept, work)


@pytest.mark.parametrize("whole", [False, True])
def test_a_request_that_is_cancelled_when_it_has_ended_costs_no_answer(whole: bool) -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"{}", "more_body": not whole})
        task = asyncio.current_task()
        assert task
        task.cancel()

    async def go() -> None:
        answer = await Call(app, "/v1/completions", b"{}", BatchKey("", "")).answer()
        assert (answer is not None) == whole
        await asyncio.sleep(0)

    asyncio.run(go())


class Embedder(Model):
    all = (SimpleNamespace(url="", running=0),)

    async def model(self, name: str, *, refresh: bool = False) -> ModelInfo:
        tensors: Any = {"text_input": None, "text_output": None}
        return ModelInfo(name, "unary", True, 4, tensors, tensors, "0.1", task=EMBED)

    async def compute(self, name: str, texts: list[str], **options: Any) -> Computed:
        rows = np.array([[len(text), 0.5] for text in texts], np.float32)
        return Computed({"embedding": rows}, tuple(map(len, texts)))


def test_a_batch_asks_for_embeddings_too(tmp_path: Path) -> None:
    url, texts = "/v1/embeddings", ["a", "abc", ["ab", "abcd"]]
    asked = [
        line(str(n), url=url, body={"model": "m", "input": text}) for n, text in enumerate(texts)
    ]

    async def work(client: openai.AsyncOpenAI) -> None:
        batch = await ended(client, await begin(client, asked, endpoint=url))
        answers = await results(client, batch.output_file_id)
        found = {
            name: [one["embedding"] for one in answer["response"]["body"]["data"]]
            for name, answer in answers.items()
        }
        assert found == {"0": [[1, 0.5]], "1": [[3, 0.5]], "2": [[2, 0.5], [4, 0.5]]}

    run(Embedder(), settings_of(tmp_path), work)


KINDS = st.sampled_from(["fine", "busy", "near", "refused", "deadly", "slow"])


@settings(max_examples=12, deadline=None)
@given(
    kinds=st.lists(KINDS, min_size=1, max_size=12),
    ends=st.lists(st.sampled_from([0.0, 0.005, 0.02]), max_size=3),
    asked=st.integers(0, 4),
)
def test_each_line_has_one_end_whatever_comes_between(
    kinds: list[str], ends: list[float], asked: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Models that die, others who ask, and gateways that end at any moment."""
    model, names = Model(), [f"{kind} {n}" for n, kind in enumerate(kinds)]
    limits = Limits(max_requests=8, batch_requests=3)
    folder = settings_of(tmp_path_factory.mktemp("any"), limits=limits)

    async def ask(client: openai.AsyncOpenAI) -> None:
        for number in range(asked):
            await client.completions.create(model="m", prompt=f"live {number}")
            await asyncio.sleep(0.003)

    async def go() -> None:
        batch: Any = None
        for seconds in [*ends, 20.0]:
            async with serving(model, folder) as client:
                gateway = client.app.state.gateway  # type: ignore[attr-defined]
                gateway.catalog.record_failure = lambda *_: None
                batch = batch or await begin(client, [line(name) for name in names])
                others = asyncio.ensure_future(ask(client))
                with suppress(asyncio.TimeoutError):
                    batch = await asyncio.wait_for(ended(client, batch), seconds)
                await others
                if batch.status == "completed":
                    answers = await results(client, batch.output_file_id)
                    errors = await results(client, batch.error_file_id)
                    break
        assert answers.keys() | errors.keys() == {*names}
        failing = {name for name in names if name.split()[0] in ("refused", "deadly")}
        assert errors.keys() == failing

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(asking, "QUIET", 0.01)
        shorten_pauses(patch, first=0.005, longest=0.005, period=0.005)
        asyncio.run(go())


def test_a_line_on_which_the_gateway_fails_has_an_error_and_the_others_their_answers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shorten_pauses(monkeypatch, first=0.01)
    tried = []

    def body(of: BatchLine) -> bytes:
        if of.request.custom_id == "1":
            tried.append(of)
            raise RecursionError
        return written(of)

    written = BatchLine.body
    monkeypatch.setattr(BatchLine, "body", body)

    async def work(client: openai.AsyncOpenAI) -> None:
        batch = await ended(client, await begin(client, [line("1"), line("2"), line("3")]))
        (error,) = (await results(client, batch.error_file_id)).values()
        assert (error["custom_id"], error["error"]["code"]) == ("1", "server_error")
        assert (await results(client, batch.output_file_id)).keys() == {"2", "3"}

    run(Model(), settings_of(tmp_path), work)
    assert len(tried) == 3


def test_what_cannot_be_done_is_refused_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(uploads, "MAX_BYTES", 100)
    monkeypatch.setattr(routes, "MAX_UNFINISHED", 1)
    model = Model()

    async def work(client: openai.AsyncOpenAI) -> None:
        async def refused(call: Coroutine[Any, Any, Any], status: int, words: str) -> None:
            with pytest.raises(openai.APIStatusError) as caught:
                await call
            assert (caught.value.status_code, words in str(caught.value)) == (status, True)

        data = ("x", b"1" * 100)
        file = await client.files.create(file=data, purpose="batch")
        create: Any = client.batches.create
        right = {"endpoint": "/v1/completions", "completion_window": "24h"}
        right["input_file_id"] = file.id
        await refused(client.files.create(file=data, purpose="evals"), 400, "must be batch, not")
        big = ("x", b"1" * 101)
        await refused(client.files.create(file=big, purpose="batch"), 413, "the file is over")
        bad: Any = {"anchor": "created_at", "seconds": 5}
        expires = client.files.create(file=data, purpose="batch", expires_after=bad)
        await refused(expires, 400, "expires_after is 3600 to")
        await refused(create(**{**right, "endpoint": "/v1/moderations"}), 400, "endpoint must be")
        await refused(create(**{**right, "completion_window": "soon"}), 400, "such as 24h")
        await refused(create(**{**right, "input_file_id": "../keys"}), 400, "there is no file")
        await refused(create(**right, metadata={"a": "b" * 513}), 400, "metadata has at most")
        await refused(client.files.retrieve("..%2Fkeys"), 404, "")
        await refused(client.files.list(after="x"), 400, "after: there is no 'x'")  # type: ignore[arg-type]
        await refused(client.batches.list(limit=0), 400, "limit must be 1 to 100")  # type: ignore[arg-type]
        # A file that is kept for a while, and a batch that nobody stops.
        wanted: Any = {"anchor": "created_at", "seconds": 3600}
        kept = await client.files.create(
            file=("y", content_of([line("1", "wait")])[:100]), purpose="batch", expires_after=wanted
        )
        assert kept.expires_at == kept.created_at + 3600

    run(model, settings_of(tmp_path), work)
    assert not [path for path in tmp_path.rglob("*.part")]


def test_to_look_at_the_head_of_an_answer_changes_nothing(tmp_path: Path) -> None:
    async def work(client: openai.AsyncOpenAI) -> None:
        file = await client.files.create(file=("x", b"x"), purpose="batch")
        wanted = {
            "input_file_id": file.id,
            "endpoint": "/v1/completions",
            "completion_window": "24h",
        }
        http = client._client
        for path in ("files", f"files/{file.id}", f"files/{file.id}/content", "batches"):
            url = f"http://gateway/v1/{path}"
            assert (await http.request("HEAD", url, json=wanted)).status_code == 200
        assert (await client.files.retrieve(file.id)).id == file.id
        assert (await client.batches.list()).data == []

    run(Model(), settings_of(tmp_path), work)


def test_a_batch_counts_and_holds_its_file_while_it_is_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(routes, "MAX_UNFINISHED", 2)
    go_on, save = threading.Event(), Folder.save

    def held(folder: Folder, record: Any) -> None:
        if isinstance(record, Batch):
            go_on.wait(5)
        save(folder, record)

    monkeypatch.setattr(Folder, "save", held)

    async def work(client: openai.AsyncOpenAI) -> None:
        file = await client.files.create(file=("x", content_of([line("1")])), purpose="batch")
        make: Any = partial(client.batches.create, completion_window="24h")
        made = [
            asyncio.ensure_future(make(input_file_id=file.id, endpoint="/v1/completions"))
            for _ in range(6)
        ]
        await until(lambda: sum(task.done() for task in made) >= 4)
        with pytest.raises(openai.BadRequestError, match="is not finished reads this file"):
            await client.files.delete(file.id)
        go_on.set()
        found = await asyncio.gather(*made, return_exceptions=True)
        refused = [error for error in found if isinstance(error, openai.RateLimitError)]
        assert (len(refused), len((await client.batches.list()).data)) == (4, 2)

    run(Model(), settings_of(tmp_path), work)


def test_few_batches_are_in_memory_however_many_begin_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner, "_PERIOD", 0.01)
    most = Counter[str]()

    class Opened(BatchRequests):
        def __init__(self, *args: Any, **options: Any) -> None:
            most["now"] += 1
            most["ever"] = max(most["ever"], most["now"])
            time.sleep(0.02)
            super().__init__(*args, **options)

        def close(self) -> None:
            most["now"] -= 1
            super().close()

    monkeypatch.setattr(runner, "BatchRequests", Opened)
    model = Model()

    async def work(client: openai.AsyncOpenAI) -> None:
        file = await client.files.create(
            file=("x", content_of([line("1", "wait")])), purpose="batch"
        )
        make: Any = partial(client.batches.create, completion_window="24h")
        made = await asyncio.gather(
            *(make(input_file_id=file.id, endpoint="/v1/completions") for _ in range(7))
        )
        await until(lambda: model.asked["wait"] == 2)
        # One that is cancelled ends without waiting for those that run.
        waiting = [b for b in made if (await client.batches.retrieve(b.id)).status == "validating"]
        assert len(waiting) == 5
        await client.batches.cancel(waiting[0].id)
        assert (await ended(client, waiting[0])).status == "cancelled"
        assert most["ever"] <= 2 + 1
        model.gate.set()
        ends = [(await ended(client, batch)).status for batch in made]
        assert Counter(ends) == {"completed": 6, "cancelled": 1}
        assert most["ever"] <= 2 + 1

    run(model, settings_of(tmp_path), work)


def test_what_a_key_keeps_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(uploads, "MAX_FILES", 4)
    monkeypatch.setattr(runner, "_KEPT", 2)
    keys = tmp_path / "keys"
    mine, other = new_key(keys, "me"), new_key(keys, "other")

    async def work(client: openai.AsyncOpenAI) -> None:
        foreign = client_of(client.app, other)  # type: ignore[attr-defined]
        kept = await begin(foreign, [line("1")])
        data = ("x", content_of([line("1")]))
        file = await client.files.create(file=data, purpose="batch")
        make: Any = partial(client.batches.create, completion_window="24h")
        made = []
        for _ in range(3):
            batch = await make(input_file_id=file.id, endpoint="/v1/completions")
            made.append(await ended(client, batch))
        for call in (
            client.files.create(file=data, purpose="batch"),
            make(input_file_id=file.id, endpoint="/v1/completions"),
        ):
            with pytest.raises(openai.APIStatusError, match="has 4 files: delete some") as refusal:
                await call
            assert (refusal.value.status_code, refusal.value.code) == (413, "storage_full")
        # Of batches that are over, the oldest makes room; its results are files of their own.
        await until(lambda: not [*tmp_path.rglob("*.answers")])
        await client.files.delete(made[1].output_file_id)
        await ended(client, await make(input_file_id=file.id, endpoint="/v1/completions"))
        assert {b.id for b in (await client.batches.list()).data} > {made[1].id, made[2].id}
        with pytest.raises(openai.NotFoundError):
            await client.batches.retrieve(made[0].id)
        assert (await results(client, made[0].output_file_id)).keys() == {"1"}
        await client.files.delete(made[2].output_file_id)
        monkeypatch.setattr(uploads, "MAX_STORED", file.bytes)
        with pytest.raises(openai.APIStatusError, match="would be over"):
            await make(input_file_id=file.id, endpoint="/v1/completions")
        assert (await ended(foreign, kept)).status == "completed"

    run(Model(), settings_of(tmp_path, keys=keys), work, key=mine)
    # Three of this key, and one of the other.
    assert len([*tmp_path.rglob("batch_*.json")]) == 3 + 1


def test_answers_count_as_files_of_their_key_while_they_come(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys, model = tmp_path / "keys", Model()
    mine, other = new_key(keys, "me"), new_key(keys, "other")
    asked = [line(str(n), "x" * 1000 + f" {n}") for n in range(20)]
    monkeypatch.setattr(uploads, "MAX_STORED", len(content_of(asked)) + 5000)

    async def work(client: openai.AsyncOpenAI) -> None:
        foreign = client_of(client.app, other)  # type: ignore[attr-defined]
        batch = await ended(client, await begin(client, asked))
        answers = await results(client, batch.output_file_id)
        errors = await results(client, batch.error_file_id)
        assert {error["error"]["code"] for error in errors.values()} == {"storage_full"}
        assert len(answers) + len(errors) == 20
        assert 3 <= len(answers) <= 6
        # Other keys have their own space.
        assert (await ended(foreign, await begin(foreign, asked[:3]))).request_counts.completed == 3

    limits = Limits(batch_requests=1)
    run(model, settings_of(tmp_path, keys=keys, limits=limits), work, key=mine)


def test_a_full_disk_is_said_to_who_uploads_and_costs_a_batch_nothing_but_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shorten_pauses(monkeypatch, longest=0.02)
    model, written = Model(), os.write

    def full(*_: Any) -> Any:
        raise OSError(errno.ENOSPC, "full")

    async def work(client: openai.AsyncOpenAI) -> None:
        for where, name in ((os, "fsync"), (Folder, "save"), (Folder, "begin_file")):
            with monkeypatch.context() as patch:
                patch.setattr(where, name, full)
                with pytest.raises(openai.InternalServerError) as caught:
                    await client.files.create(file=("x", b"x"), purpose="batch")
            assert (caught.value.status_code, caught.value.code) == (507, "storage_full")
        file = await client.files.create(file=("x", b"x"), purpose="batch")
        make: Any = partial(client.batches.create, completion_window="24h")
        with monkeypatch.context() as patch:
            patch.setattr(os, "fsync", full)
            with pytest.raises(openai.InternalServerError) as caught:
                await make(input_file_id=file.id, endpoint="/v1/completions")
        assert (caught.value.status_code, caught.value.code) == (507, "storage_full")
        assert (await client.batches.list()).data == []
        batch = await begin(client, [line("1", "wait"), line("2", "wait")])
        await until(lambda: len(model.running) == 2)
        with monkeypatch.context() as patch:
            patch.setattr(os, "write", full)
            model.gate.set()
            await until(lambda: model.asked["wait"] > 4)
        assert os.write is written
        assert (await ended(client, batch)).request_counts.completed == 2

    run(model, settings_of(tmp_path), work)
    assert not list(tmp_path.rglob("*.part"))
    assert len(list(tmp_path.rglob("file-*"))) == 2 * 3, "each file has its record"


@pytest.mark.parametrize(("days", "status"), [(1.5, "completed"), (2.5, "failed")])
def test_a_disk_that_is_full_at_the_end_costs_no_answers_for_a_day(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, days: float, status: str
) -> None:
    monkeypatch.setattr(runner, "_PAUSE", 0.01)
    tries, save, is_full = Counter[str](), Folder.save, threading.Event()
    is_full.set()

    def full(folder: Folder, record: Any) -> None:
        if isinstance(record, StoredFile) and record.purpose == "batch_output" and is_full.is_set():
            tries[record.owner] += 1
            raise OSError(errno.ENOSPC, "full")
        save(folder, record)

    monkeypatch.setattr(Folder, "save", full)

    async def work(client: openai.AsyncOpenAI) -> None:
        batch = await begin(client, [line("1")])
        await until(lambda: tries.total() > 0)
        now, seen = time.time(), tries.total()
        monkeypatch.setattr(runner, "time", SimpleNamespace(time=lambda: now + days * 86400))
        if status == "completed":
            await until(lambda: tries.total() > seen + 1)
            is_full.clear()
        batch = await ended(client, batch)
        assert batch.status == status
        found = await results(client, batch.output_file_id)
        assert [*found] == (["1"] if status == "completed" else [])
        await until(lambda: not [*tmp_path.rglob("*.answers")])

    run(Model(), settings_of(tmp_path), work)


@pytest.mark.parametrize("status", ["in_progress", "completed", "failed", "cancelled"])
def test_a_status_that_cannot_be_saved_is_saved_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, status: str
) -> None:
    monkeypatch.setattr(runner, "_PAUSE", 0.01)
    model, save, tries = Model(), Folder.save, Counter[str]()

    def full(folder: Folder, record: Any) -> None:
        if isinstance(record, Batch) and record.status == status:
            tries[status] += 1
            if tries[status] <= 2:
                raise OSError(errno.ENOSPC, "full")
        save(folder, record)

    monkeypatch.setattr(Folder, "save", full)

    async def work(client: openai.AsyncOpenAI) -> None:
        content = b"{" if status == "failed" else [line("1", "wait")]
        batch = await begin(client, content)
        if status != "failed":
            await until(lambda: model.asked["wait"])
        if status == "cancelled":
            await client.batches.cancel(batch.id)
        model.gate.set()
        await until(lambda: tries[status] == 3)
        final = "completed" if status == "in_progress" else status
        assert (await ended(client, batch)).status == final
        await until(lambda: not [*tmp_path.rglob("*.answers")])

        def kept() -> list[str]:
            paths = tmp_path.rglob("batch_*.json")
            return [json.loads(path.read_text())["status"] for path in paths]

        # A client sees the status before the third try has ended.
        await until(lambda: kept() == [final])

    run(model, settings_of(tmp_path), work)
    assert model.asked == ({} if status == "failed" else {"wait": 1})


def test_a_cancellation_that_cannot_be_saved_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save = Folder.save

    def full(folder: Folder, record: Any) -> None:
        if isinstance(record, Batch) and record.status == "cancelling":
            raise OSError(errno.ENOSPC, "full")
        save(folder, record)

    monkeypatch.setattr(Folder, "save", full)

    async def work(client: openai.AsyncOpenAI) -> None:
        batch = await begin(client, [line("1", "wait")])
        with pytest.raises(openai.InternalServerError) as caught:
            await client.batches.cancel(batch.id)
        assert (caught.value.status_code, caught.value.code) == (507, "storage_full")
        file = batch.input_file_id
        await ended(client, batch)
        monkeypatch.setattr(Folder, "delete", lambda *_: refuse_all())
        with pytest.raises(openai.InternalServerError) as caught:
            await client.files.delete(file)
        assert "cannot use its folder" in str(caught.value)

    run(Model(), settings_of(tmp_path), work)


def refuse_all() -> None:
    raise PermissionError(errno.EACCES, "not allowed")


def test_a_batch_that_expired_stays_so_when_its_end_is_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner, "_PAUSE", 0.01)
    monkeypatch.setattr(routes, "read_window", lambda text: 0)
    tries, begun = Counter[str](), BatchJob.__init__

    def new(job: BatchJob, *args: Any, **more: Any) -> None:
        tries["opened"] += 1
        if tries["opened"] == 1:
            raise RuntimeError("what nobody has thought of")
        begun(job, *args, **more)

    def save(*args: Any) -> Any:
        tries["saved"] += 1
        if tries["saved"] == 1:
            raise OSError(errno.ENOSPC, "full")
        return written(*args)

    written = Runner._save_results
    monkeypatch.setattr(BatchJob, "__init__", new)
    monkeypatch.setattr(Runner, "_save_results", save)

    async def work(client: openai.AsyncOpenAI) -> None:
        batch = await ended(client, await begin(client, [line("1")]))
        assert batch.status == "expired"
        (error,) = (await results(client, batch.error_file_id)).values()
        assert error["error"]["code"] == "batch_expired"

    run(Model(), settings_of(tmp_path), work)
    assert tries == {"opened": 3, "saved": 2}


def test_a_file_is_deleted_when_its_time_is_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner, "_FILES_PERIOD", 0.01)

    async def work(client: openai.AsyncOpenAI) -> None:
        wanted: Any = {"anchor": "created_at", "seconds": 3600}
        file = await client.files.create(
            file=("x", content_of([line("1", "wait")])), purpose="batch", expires_after=wanted
        )
        kept = await client.files.create(file=("y", b"y"), purpose="batch")
        batch = await client.batches.create(
            input_file_id=file.id, endpoint="/v1/completions", completion_window="24h"
        )
        now = time.time()
        monkeypatch.setattr(runner, "time", SimpleNamespace(time=lambda: now + 4000))
        await asyncio.sleep(0.1)
        assert (await client.files.retrieve(file.id)).id == file.id, "a batch reads it"
        await client.batches.cancel(batch.id)
        await ended(client, batch)
        await until(lambda: not list(tmp_path.rglob(f"{file.id}*")))
        assert (await client.files.retrieve(kept.id)).id == kept.id

    run(Model(), settings_of(tmp_path), work)


def test_lists_come_in_pages(tmp_path: Path) -> None:
    async def work(client: openai.AsyncOpenAI) -> None:
        made = [
            (await client.files.create(file=(str(n), b"x"), purpose="batch")).id for n in range(5)
        ]
        pages = [entry.id async for entry in client.files.list(limit=2)]
        assert sorted(pages) == sorted(made)
        first = await client.files.list(limit=2, order="asc")
        assert first.has_more
        assert [entry.id for entry in first.data] == [*reversed(pages)][:2]
        assert (await client.files.list(purpose="evals")).data == []

    run(Model(), settings_of(tmp_path), work)


def test_without_a_folder_there_are_no_batches(tmp_path: Path) -> None:
    async def work(client: openai.AsyncOpenAI) -> None:
        with pytest.raises(openai.NotFoundError, match="start it with --batches"):
            await client.files.create(file=("x", b"x"), purpose="batch")
        document = await client.get("/../openapi.json", cast_to=httpx.Response)
        assert "/v1/files" not in document.json()["paths"]

    run(Model(), settings_of(tmp_path, batches=None), work)


def test_a_folder_is_of_one_gateway_and_of_one_user(tmp_path: Path) -> None:
    path = tmp_path / "batches"
    folder = Folder(path)
    with pytest.raises(UsageError, match="another gateway keeps its batches in"):
        Folder(path)
    folder.close()
    path.chmod(0o750)
    with pytest.raises(UsageError, match="chmod 700"):
        Folder(path)
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match="is not a folder"):
        Folder(tmp_path / "file")


def test_serve_hands_its_folder_on_and_a_wrong_one_is_refused_before_models_load(
    tmp_path: Path,
) -> None:
    (frontend,) = llmserve_register_frontends()
    place = Place(NO_TRITON, "127.0.0.1", 8080, 30.0, batches=tmp_path / "made" / "b")
    arguments = frontend.arguments(place)
    assert arguments[arguments.index("--batches") + 1] == str(tmp_path / "made" / "b")
    assert stat.S_IMODE((tmp_path / "made" / "b").stat().st_mode) == 0o700
    (tmp_path / "open").mkdir(mode=0o755)
    with pytest.raises(UsageError, match="other users may read"):
        frontend.arguments(replace(place, batches=tmp_path / "open"))


def test_what_an_interruption_has_left_is_removed_and_what_is_damaged_stays(tmp_path: Path) -> None:
    folder = Folder(tmp_path / "b")
    name, content = folder.begin_file("everyone")
    content.close()
    of = tmp_path / "b" / "everyone"
    damaged = of / ("file-" + "0" * 32)
    damaged.write_bytes(b"data")
    damaged.with_suffix(".json").write_bytes(b"{")
    (of / ("file-" + "1" * 32)).touch()
    (of / "notes.txt").touch()
    ids = [f"batch_{digit * 32}" for digit in "0123"]
    for name_of_batch in ids:
        (of / f"{name_of_batch}.answers").touch()
    over = Batch(ids[0], "everyone", "/v1/completions", "file-x", "24h", 0, 9, "file-y", "file-z")
    folder.save(replace(over, status="completed"))
    folder.save(replace(over, id=ids[1]))
    (of / f"{ids[2]}.json").write_bytes(b"{")
    folder.close()
    Folder(tmp_path / "b").close()
    assert {path.name for path in of.iterdir()} == {
        damaged.name, f"{damaged.name}.json", "notes.txt", f"{ids[0]}.json",
        f"{ids[1]}.json", f"{ids[1]}.answers", f"{ids[2]}.json", f"{ids[2]}.answers",
    }  # fmt: skip
    assert not list(of.glob(f"{name}*"))


def test_a_gateway_that_is_killed_three_times_answers_each_line_once(tmp_path: Path) -> None:
    script = ScriptedTriton(pieces=["a", "b"], gap=0.01)
    before = (
        "import llmserve_gateway.gateway as g, dataclasses, pathlib\n"
        f"folder = pathlib.Path({str(tmp_path / 'batches')!r})\n"
        "S = g.Settings\n"
        "def Settings(*a): return S(*a, batches=folder)\n"
        "g.Settings = Settings\n"
    )
    content = content_of(
        [
            {**line(str(n)), "body": {"model": "pieces", "prompt": f"p{n}", "max_tokens": 2}}
            for n in range(60)
        ]
    )
    name = ""
    with script.serving() as url:
        for done in (5, 25, 45, 60):
            with gateway_process(limits="8, 1", url=url, before=before) as (process, port):
                client = openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none")
                if not name:
                    file = client.files.create(file=("x.jsonl", content), purpose="batch")
                    name = client.batches.create(
                        input_file_id=file.id,
                        endpoint="/v1/completions",
                        completion_window="24h",
                    ).id
                deadline = time.monotonic() + 20
                while True:
                    batch = client.batches.retrieve(name)
                    if batch.request_counts and batch.request_counts.completed >= done:
                        break
                    assert time.monotonic() < deadline, batch
                    time.sleep(0.005)
                if done < 60:
                    process.kill()
                    continue
                while batch.status != "completed":
                    batch = client.batches.retrieve(name)
                assert batch.output_file_id
                text = client.files.content(batch.output_file_id).text
    found = [json.loads(entry) for entry in text.splitlines()]
    assert Counter(entry["custom_id"] for entry in found) == Counter(map(str, range(60)))
    assert {e["response"]["body"]["choices"][0]["text"] for e in found} == {"ab"}
    # Only what was in flight when it was killed is asked again.
    asked = Counter(prompt for prompt in script.prompts if prompt != CANARY)
    assert asked.keys() == {f"p{n}" for n in range(60)}
    assert sum(asked.values()) <= 60 + 3 * 4
    with suppress(FileNotFoundError):
        assert not [path for path in (tmp_path / "batches").rglob("*.answers")]
