"""Responses that are answered in the background: polled, cancelled, ended, and read along."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from typing import Any

import openai
import pytest

from llmserve.client import Completion, ModelInfo, Piece
from llmserve.errors import ClientError, ModelNotReadyError
from llmserve_gateway import background_responses, kept_events, postgresql_database
from llmserve_gateway.admission import Limits
from llmserve_gateway.gateway import Settings
from llmserve_gateway.kept_items import StoreError
from llmserve_gateway.keys import new_key
from llmserve_gateway.response_database import DatabaseStore
from llmserve_gateway.stored_responses import StoredResponse, StoreLimits, new_id

from .gateways import NO_TRITON, Triton, app_before, client_of
from .keeping import Keeping

Work = Callable[..., Awaitable[None]]


class Model(Triton):
    """Answers when its gate is open; says who it was asked by, and whose answers were cancelled."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = asyncio.Event()
        self.asked: list[str] = []
        self.messages: list[Any] = []
        self.cancelled: list[str] = []
        self.running = 0

    async def close(self) -> None:
        pass

    async def model(self, name: str, *, refresh: bool = False) -> ModelInfo:
        if name != "m":
            raise ModelNotReadyError(f"{name} is not there")
        return await super().model(name, refresh=refresh)

    async def generate(self, name: str, prompt: str, **options: Any) -> Completion:
        if not (messages := options.get("messages")):
            return Completion("a", "stop", 1, 1)
        text = messages[-1]["content"]
        self.asked.append(text)
        self.messages = messages
        self.running += 1
        try:
            await self.gate.wait()
        except asyncio.CancelledError:
            self.cancelled.append(text)
            raise
        finally:
            self.running -= 1
        if text == "break":
            raise ClientError("gone", code="model_died")
        return Completion(f"to {text}", "stop", 2, 1)

    async def stream(self, name: str, prompt: str, **options: Any) -> AsyncIterator[Piece]:
        yield Piece("to ", input_tokens=2, output_tokens=1)
        await self.generate(name, prompt, **options)
        yield Piece("it", output_tokens=2)
        yield Piece("", finish_reason="stop")


class Place:
    """Gateways in this process that keep responses in one place, and OpenAI's clients of them."""

    def __init__(self, kept: Keeping, **settings: Any) -> None:
        self.model = Model()
        self.settings = Settings(NO_TRITON, **kept.settings, **settings)
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> Place:
        return self

    async def __aexit__(self, *error: Any) -> None:
        await self._stack.aclose()

    async def gateway(self) -> Any:
        app = app_before(self.model, self.settings)
        await self._stack.enter_async_context(app.router.lifespan_context(app))
        return app

    async def client(self, key: str = "none") -> openai.AsyncOpenAI:
        return client_of(await self.gateway(), key)


def run(work: Awaitable[None]) -> None:
    async def go() -> None:
        await asyncio.wait_for(work, 60)

    asyncio.run(go())


async def begun(client: openai.AsyncOpenAI, text: str = "Hi", **fields: Any) -> Any:
    return await client.responses.create(model="m", input=text, background=True, **fields)


async def ended(client: openai.AsyncOpenAI, id: str) -> Any:
    while (found := await client.responses.retrieve(id)).status in ("queued", "in_progress"):
        await asyncio.sleep(0.01)
    return found


async def until(is_so: Callable[[], bool]) -> None:
    while not is_so():
        await asyncio.sleep(0.01)


def test_an_answer_is_asked_for_by_its_id(kept: Keeping) -> None:
    async def work() -> None:
        async with Place(kept) as place:
            client = await place.client()
            first = await begun(client, metadata={"of": "mine"})
            assert (first.status, first.background, first.output) == ("queued", True, [])
            await until(lambda: place.model.running == 1)
            running = await client.responses.retrieve(first.id)
            assert (running.status, running.output) == ("in_progress", [])
            place.model.gate.set()
            final = await ended(client, first.id)
            assert (final.status, final.output_text) == ("completed", "to Hi")
            assert (final.metadata, final.background) == ({"of": "mine"}, True)
            assert final.created_at == first.created_at
            # A conversation goes on from it, and it is as any other that is kept.
            await begun(client, "And?", previous_response_id=first.id)
            await until(lambda: len(place.model.asked) == 2)
            assert [item.id async for item in await client.responses.input_items.list(first.id)]
            await client.responses.delete(first.id)
            with pytest.raises(openai.NotFoundError):
                await client.responses.retrieve(first.id)

    run(work())


def test_what_is_cancelled_is_not_answered(kept: Keeping) -> None:
    async def work() -> None:
        async with Place(kept) as place:
            client = await place.client()
            first = await begun(client)
            await until(lambda: place.model.running == 1)
            for _ in range(2):
                cancelled = await client.responses.cancel(first.id)
                assert (cancelled.status, cancelled.id) == ("cancelled", first.id)
            await until(lambda: place.model.cancelled == ["Hi"])
            with pytest.raises(openai.BadRequestError, match="is cancelled") as caught:
                await begun(client, "And?", previous_response_id=first.id)
            assert caught.value.code == "previous_response_not_completed"
            # What is deleted is cancelled as well, and does not come back.
            second = await begun(client, "Two")
            await until(lambda: place.model.running == 1)
            await client.responses.delete(second.id)
            await until(lambda: place.model.cancelled == ["Hi", "Two"])
            place.model.gate.set()
            with pytest.raises(openai.NotFoundError):
                await client.responses.retrieve(second.id)
            # What has been answered stays so, and what was waited for cannot be cancelled.
            third = await ended(client, (await begun(client, "Three")).id)
            assert (await client.responses.cancel(third.id)).status == "completed"
            waited = await client.responses.create(model="m", input="Four")
            with pytest.raises(openai.BadRequestError, match="background"):
                await client.responses.cancel(waited.id)

    run(work())


def test_a_model_that_fails_is_told_of(kept: Keeping) -> None:
    async def work() -> None:
        async with Place(kept) as place:
            client = await place.client()
            place.model.gate.set()
            failed = await ended(client, (await begun(client, "break")).id)
            assert (failed.status, failed.output) == ("failed", [])
            assert failed.error.code == "model_died"

    run(work())


@pytest.mark.parametrize(
    ("fields", "name"),
    [({"store": False}, "store"), ({"model": "unknown"}, "model"),
     ({"temperature": 9}, "temperature"),
     ({"previous_response_id": new_id()}, "previous_response_id")],
)  # fmt: skip
def test_what_cannot_be_answered_is_refused_at_once(
    kept: Keeping, fields: dict[str, Any], name: str
) -> None:
    async def work() -> None:
        async with Place(kept) as place:
            client = await place.client()
            body = {"model": "m", "input": "Hi", "background": True, **fields}
            with pytest.raises(openai.APIStatusError) as caught:
                await client.responses.create(**body)
            assert caught.value.param == name
            assert kept.rows("SELECT COUNT(*) FROM responses") == [(0,)]

    run(work())


def test_a_gateway_that_keeps_nothing_has_no_background(kept: Keeping) -> None:
    async def work() -> None:
        client = client_of(app_before(Model()), "none")
        with pytest.raises(openai.BadRequestError, match="keeps no responses"):
            await begun(client)
        file = kept.folder / "keys.json"
        silent = new_key(file, "silent", stateless=True)
        async with Place(kept, keys=file) as place:
            with pytest.raises(openai.BadRequestError, match="this key keeps nothing"):
                await begun(await place.client(silent))

    run(work())


def test_a_key_sees_and_cancels_its_own_alone(kept: Keeping) -> None:
    async def work() -> None:
        file = kept.folder / "keys.json"
        mine, other = new_key(file, "mine"), new_key(file, "other")
        async with Place(kept, keys=file) as place:
            app = await place.gateway()
            first = await begun(client_of(app, mine))
            stranger = client_of(app, other)
            guessed = f"resp_{int(first.id[5:], 16) + 1:048x}"
            for id in (first.id, guessed, "resp_1", "'; DROP TABLE unfinished; --"):
                for act in (stranger.responses.cancel, stranger.responses.retrieve,
                            stranger.responses.delete):  # fmt: skip
                    with pytest.raises(openai.NotFoundError):
                        await act(id)
            place.model.gate.set()
            assert (await ended(client_of(app, mine), first.id)).output_text == "to Hi"

    run(work())


def test_a_flood_is_refused_and_takes_nothing_of_others(kept: Keeping) -> None:
    async def work() -> None:
        file = kept.folder / "keys.json"
        mine, other = new_key(file, "mine"), new_key(file, "other")
        async with Place(kept, keys=file, limits=Limits(max_requests=4)) as place:
            app = await place.gateway()
            client = client_of(app, mine)
            most = StoreLimits().unfinished
            ids = [(await begun(client, f"{number}")).id for number in range(most)]
            with pytest.raises(openai.RateLimitError) as caught:
                await begun(client)
            assert caught.value.code == "too_many_in_background"
            # Half of the slots are of others.
            assert place.model.running == 2
            theirs = await begun(client_of(app, other), "theirs")
            await until(lambda: "theirs" in place.model.asked)
            # Who waits is not cancelled by a shortage, but by its owner.
            await client.responses.cancel(ids[-1])
            again = await begun(client, "again")
            place.model.gate.set()
            for id in (ids[0], ids[-2], again.id):
                assert (await ended(client, id)).status == "completed"
            assert (await ended(client_of(app, other), theirs.id)).status == "completed"
            assert f"{most - 1}" not in place.model.asked

    run(work())


def test_what_waits_in_the_background_leaves_room_for_who_waits(kept: Keeping) -> None:
    async def work() -> None:
        limits = Limits(max_requests=2, max_queue=100, max_queued_tokens=10_000)
        async with Place(kept, limits=limits) as place:
            client = await place.client()

            async def flood() -> None:
                for _ in range(100):
                    await begun(client, "word " * 300)

            with pytest.raises(openai.RateLimitError, match="in the background"):
                await flood()
            now = asyncio.ensure_future(client.responses.create(model="m", input="now"))
            await asyncio.sleep(0.1)
            place.model.gate.set()
            assert (await now).output_text == "to now"

    run(work())


def test_what_finds_the_queue_full_waits_for_its_turn(kept: Keeping) -> None:
    async def work() -> None:
        limits = Limits(max_requests=1, max_queue=1)
        async with Place(kept, limits=limits) as place:
            client = await place.client()
            ids = [(await begun(client, f"{number}")).id for number in range(4)]
            await until(lambda: place.model.running == 1)
            with pytest.raises(openai.RateLimitError):
                await client.responses.create(model="m", input="now")
            place.model.gate.set()
            assert [(await ended(client, id)).status for id in ids] == ["completed"] * 4

    run(work())


def test_what_waits_too_long_has_failed(kept: Keeping) -> None:
    async def work() -> None:
        async with Place(kept, limits=Limits(max_requests=1), request_timeout=0.2) as place:
            client = await place.client()
            ids = [(await begun(client, f"{number}")).id for number in range(2)]
            last = await ended(client, ids[1])
            assert (last.status, last.error.code) == ("failed", "timeout")

    run(work())


def test_limits_of_a_key_are_charged_once(kept: Keeping) -> None:
    async def work() -> None:
        file = kept.folder / "keys.json"
        mine = new_key(file, "mine", requests_per_minute=2)
        async with Place(kept, keys=file) as place:
            client = await place.client(mine)
            place.model.gate.set()
            for _ in range(2):
                assert (await ended(client, (await begun(client)).id)).status == "completed"
            with pytest.raises(openai.RateLimitError):
                await begun(client)

    run(work())


def test_a_gateway_that_ends_leaves_nothing_that_hangs(kept: Keeping) -> None:
    async def work() -> None:
        async with Place(kept) as place:
            client = await place.client()
            first = await begun(client)
            await until(lambda: place.model.running == 1)
        assert place.model.cancelled == ["Hi"]
        async with Place(kept) as place:
            found = await (await place.client()).responses.retrieve(first.id)
            assert found.error
            assert (found.status, found.error.code) == ("failed", "interrupted")

    run(work())


_KILLED = """
import os, sys
from pathlib import Path
from llmserve_gateway.response_stores import open_store
from llmserve_gateway.stored_responses import StoredResponse
folder, database, id = sys.argv[1:]
store = open_store(Path(folder), database)
response = {"id": id, "status": "queued", "background": True, "output": []}
assert store.begin(StoredResponse(id, "everyone", [], response))
print("begun", flush=True)
sys.stdin.readline()
os.kill(os.getpid(), 9)
"""


def test_of_a_gateway_that_was_killed_another_says_so(
    kept: Keeping, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(postgresql_database, "_GONE_SECONDS", 0.0)
    id = new_id()
    command = [sys.executable, "-c", _KILLED, str(kept.folder / "kept"), kept.database, id]
    with subprocess.Popen(command, stdin=-1, stdout=-1, text=True) as other:
        assert other.stdin
        assert other.stdout
        assert other.stdout.readline() == "begun\n"
        store = kept.open()
        living = store.get("everyone", id)
        assert living
        assert living.status == "queued"
        other.stdin.write("\n")
        other.stdin.flush()
        assert other.wait() == -9
        # Of a connection, its end comes a moment later.
        while (dead := store.get("everyone", id)) and dead.is_unfinished:
            time.sleep(0.01)
    assert dead
    assert (dead.status, dead.response["error"]["code"]) == ("failed", "interrupted")
    store.close()
    # Nothing is left of either but the database.
    kept.open().close()
    assert not [*kept.folder.glob("kept/gateway-*")]


def test_a_gateway_ends_what_another_cancels(
    kept: Keeping, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(background_responses, "_PERIOD", 0.05)

    async def work() -> None:
        async with Place(kept) as place:
            one, two = await place.client(), await place.client()
            ids = [(await begun(one, text)).id for text in ("a", "b", "c")]
            await until(lambda: place.model.running == 3)
            assert (await two.responses.cancel(ids[0])).status == "cancelled"
            await two.responses.delete(ids[1])
            await until(lambda: sorted(place.model.cancelled) == ["a", "b"])
            assert (await two.responses.retrieve(ids[2])).status == "in_progress"
            place.model.gate.set()
            assert (await ended(two, ids[2])).output_text == "to c"

    run(work())


def test_an_answer_that_cannot_be_kept_has_failed(
    kept: Keeping, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(background_responses, "_PERIOD", 0.05)
    is_full = False
    update = DatabaseStore.update

    def write(store: DatabaseStore, stored: StoredResponse) -> bool:
        if is_full:
            raise StoreError("database or disk is full")
        return update(store, stored)

    monkeypatch.setattr(DatabaseStore, "update", write)

    async def work() -> None:
        nonlocal is_full
        async with Place(kept) as place:
            client = await place.client()
            first = await begun(client)
            await until(lambda: place.model.running == 1)
            is_full = True
            place.model.gate.set()
            await until(lambda: place.model.running == 0)
            await asyncio.sleep(0.2)
            is_full = False
            failed = await ended(client, first.id)
            assert (failed.status, failed.error.code) == ("failed", "not_kept")

    run(work())


def test_what_is_being_answered_is_not_removed_for_place(kept: Keeping) -> None:
    store = kept.open(StoreLimits(bytes_per_key=10_000, unfinished=2))
    response = {"status": "queued", "background": True, "output": []}
    waiting = [StoredResponse(new_id(), "a", [{"content": "x"}], response) for _ in range(3)]
    assert [store.begin(each) for each in waiting] == [True, True, False]
    for _ in range(20):
        text = [{"content": "x" * 1000}]
        store.add(StoredResponse(new_id(), "a", text, {"status": "completed", "output": []}))
    assert [store.get("a", each.id) is not None for each in waiting] == [True, True, False]
    assert store.unfinished() == {each.id for each in waiting[:2]}
    # Of others there may be as many.
    assert store.begin(StoredResponse(new_id(), "b", [], response))
    # A large answer counts, and what it says is changed no more.
    large = waiting[0].ended("completed")
    full = StoredResponse(large.id, "a", large.input, {**large.response, "more": "x" * 9_900})
    assert store.update(full)
    assert not store.update(waiting[0].ended("cancelled"))
    ((size, counted),) = kept.rows(
        "SELECT SUM(responses.size), MAX(sizes.size) FROM responses JOIN sizes USING (owner) "
        "WHERE owner = 'a'"
    )
    assert size == counted
    assert size < 20_000
    store.close()


# Streams


class Reader:
    """A client that reads a stream as it comes, and leaves when it is told to."""

    def __init__(self, app: Any, **fields: Any) -> None:
        body = {"model": "m", "input": "Hi", "background": True, "stream": True, **fields}
        self._inbox: asyncio.Queue[Any] = asyncio.Queue()
        self._inbox.put_nowait({"type": "http.request", "body": json.dumps(body).encode()})
        self.data = b""
        self.status = 0
        scope = {"type": "http", "method": "POST", "path": "/v1/responses", "query_string": b"",
                 "headers": [(b"content-type", b"application/json"), (b"host", b"gateway")],
                 "raw_path": b"/v1/responses", "root_path": "", "scheme": "http",
                 "http_version": "1.1", "client": ("127.0.0.1", 1),
                 "server": ("gateway", 80)}  # fmt: skip
        self.answering = asyncio.ensure_future(app(scope, self._inbox.get, self._send))

    async def _send(self, message: Any) -> None:
        self.status = message.get("status", self.status)
        self.data += message.get("body", b"")

    @property
    def events(self) -> list[Any]:
        lines = self.data.decode().splitlines()
        return [json.loads(line[6:]) for line in lines if line.startswith("data: ")]

    @property
    def kinds(self) -> list[str]:
        return [event["type"].removeprefix("response.") for event in self.events]

    async def leave(self) -> None:
        self._inbox.put_nowait({"type": "http.disconnect"})
        await self.answering


def test_a_stream_begins_before_the_model_and_its_numbers_have_no_gap(kept: Keeping) -> None:
    async def work() -> None:
        async with Place(kept, limits=Limits(max_requests=1)) as place:
            app = await place.gateway()
            reader = Reader(app)
            await until(lambda: place.model.running == 1)
            other = Reader(app, input="Two")
            await until(lambda: len(other.events) == 2)
            assert other.kinds == ["created", "queued"]
            assert other.events[1]["response"]["status"] == "queued"
            place.model.gate.set()
            await asyncio.gather(reader.answering, other.answering)
            for each in (reader, other):
                assert each.status == 200
                assert each.kinds[:3] == ["created", "queued", "in_progress"]
                assert each.kinds[-1] == "completed"
                numbers = [event["sequence_number"] for event in each.events]
                assert numbers == [*range(len(numbers))]
                (id,) = {event["response"]["id"] for event in each.events if "response" in event}
                found = await client_of(app, "none").responses.retrieve(id)
                assert found.to_dict() == each.events[-1]["response"]

    run(work())


def test_a_stream_goes_on_when_its_client_leaves(kept: Keeping) -> None:
    async def work() -> None:
        async with Place(kept) as place:
            app = await place.gateway()
            reader = Reader(app)
            await until(lambda: place.model.running == 1)
            await reader.leave()
            seen = len(reader.data)
            assert reader.kinds[-1] != "completed"
            place.model.gate.set()
            final = await ended(client_of(app, "none"), reader.events[0]["response"]["id"])
            assert (final.status, final.output_text) == ("completed", "to it")
            assert len(reader.data) == seen
            assert place.model.cancelled == []

    run(work())


def test_a_stream_that_is_cancelled_ends(kept: Keeping) -> None:
    async def work() -> None:
        async with Place(kept) as place:
            app = await place.gateway()
            reader = Reader(app)
            await until(lambda: place.model.running == 1)
            client = client_of(app, "none")
            id = reader.events[0]["response"]["id"]
            assert (await client.responses.cancel(id)).status == "cancelled"
            await reader.answering
            assert (reader.kinds[-1], reader.events[-1]["code"]) == ("error", "cancelled")
            assert (await client.responses.retrieve(id)).status == "cancelled"

    run(work())


def test_openais_client_reads_such_a_stream(kept: Keeping) -> None:
    async def work() -> None:
        async with Place(kept) as place:
            place.model.gate.set()
            events = [event.type async for event in await begun(await place.client(), stream=True)]
            assert events[:2] == ["response.created", "response.queued"]
            assert events[-1] == "response.completed"

    run(work())


# Streams that are read again


async def again(client: openai.AsyncOpenAI, id: str, **query: Any) -> list[Any]:
    stream: Any = await client.responses.retrieve(id, stream=True, **query)
    return [event async for event in stream]


def test_a_stream_is_read_again_from_any_event(kept: Keeping) -> None:
    async def work() -> None:
        async with Place(kept) as place:
            place.model.gate.set()
            client, other = await place.client(), await place.client()
            first = [event async for event in await begun(client, stream=True)]
            id = first[0].response.id
            for reader in (client, other):
                for after in range(-1, len(first) - 1):
                    query = {} if after < 0 else {"starting_after": after}
                    found = await again(reader, id, **query)
                    assert found == first[after + 1 :]

    run(work())


def test_a_stream_that_goes_on_is_read_at_another_gateway(kept: Keeping) -> None:
    async def work() -> None:
        async with Place(kept) as place:
            app, other = await place.gateway(), await place.client()
            reader = Reader(app)
            await until(lambda: "output_text.delta" in reader.kinds)
            await reader.leave()
            seen = reader.events
            rest = asyncio.ensure_future(
                again(other, seen[0]["response"]["id"], starting_after=seen[-1]["sequence_number"])
            )
            await asyncio.sleep(0.1)
            assert not rest.done()
            place.model.gate.set()
            numbers = [event.sequence_number for event in await rest]
            first = seen[-1]["sequence_number"] + 1
            assert numbers == [*range(first, first + len(numbers))]
            (final,) = [event for event in await rest if event.type == "response.completed"]
            assert final.response.output_text == "to it"

    run(work())


def test_the_end_of_a_stream_is_told_if_nothing_else_is_kept(
    kept: Keeping, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kept_events, "_END_SECONDS", 0.0)

    async def work() -> None:
        async with Place(kept) as place:
            client = await place.client()
            waits = await begun(client)
            cut = asyncio.ensure_future(again(client, waits.id, starting_after=7))
            await until(lambda: place.model.running == 1)
            await client.responses.cancel(waits.id)
            (event,) = await cut
            assert (event.type, event.code, event.sequence_number) == ("error", "cancelled", 8)
            place.model.gate.set()
            done = await ended(client, (await begun(client)).id)
            (event,) = await again(client, done.id)
            assert (event.type, event.response) == ("response.completed", done)
            failed = await ended(client, (await begun(client, "break")).id)
            (event,) = await again(client, failed.id)
            assert (event.type, event.response.error.code) == ("response.failed", "model_died")

    run(work())


def test_what_cannot_be_read_again_is_refused(
    kept: Keeping, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kept_events, "_MOST_READERS", 2)

    async def work() -> None:
        file = kept.folder / "keys.json"
        mine, other = new_key(file, "mine"), new_key(file, "other")
        async with Place(kept, keys=file) as place:
            app = await place.gateway()
            client = client_of(app, mine)
            id = (await begun(client)).id
            with pytest.raises(openai.NotFoundError):
                await again(client_of(app, other), id)
            for after in ("x", "-1", "9" * 30, "²"):
                query: Any = {"stream": "true", "starting_after": after}
                with pytest.raises(openai.BadRequestError, match="number of an event"):
                    await client.get(f"/responses/{id}", cast_to=object, options={"params": query})
            readers = [asyncio.ensure_future(again(client, id)) for _ in range(2)]
            # Each of them has its turn first.
            await asyncio.sleep(0.2)
            with pytest.raises(openai.RateLimitError, match="streams already"):
                await again(client, id)
            await client.responses.delete(id)
            for found in await asyncio.gather(*readers):
                assert found[-1].type == "error"
            place.model.gate.set()
            said = await client.responses.create(model="m", input="Hi")
            with pytest.raises(openai.BadRequestError, match="background"):
                await again(client, said.id)

    run(work())


def test_what_is_kept_of_a_stream_counts_and_goes_with_it(
    kept: Keeping, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = kept.open()
    response = {"status": "queued", "background": True, "output": []}
    one, two = (StoredResponse(new_id(), "a", [], response) for _ in range(2))
    for each in (one, two):
        assert store.begin(each)
        store.add_events(each, 1, b"first")
        store.add_events(each, 3, b"second \xff")
    assert store.events("a", one.id, -1) == [b"first", b"second \xff"]
    assert store.events("a", one.id, 1) == [b"second \xff"]
    assert store.events("b", one.id, -1) == []
    assert store.update(one.ended("completed"))
    counted = "SELECT SUM(responses.size), MAX(sizes.size) FROM responses, sizes"
    ((size, of_owner),) = kept.rows(counted)
    assert size == of_owner > 2 * len(b"firstsecond  ")
    assert store.remove("a", two.id)
    store.add_events(two, 4, b"late")
    assert kept.rows("SELECT COUNT(*) FROM events") == [(2,)]
    now = time.time()
    monkeypatch.setattr(time, "time", lambda: now + 3601)
    store.add_events(one, 5, b"third")
    assert store.events("a", one.id, -1) == [b"third"]
    ((size, of_owner),) = kept.rows(counted)
    assert size == of_owner
    store.close()
