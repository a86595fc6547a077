"""The gateway under a `serve --on-demand`: it holds the models that requests name."""

from __future__ import annotations

import asyncio
import json
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager, nullcontext
from pathlib import Path
from typing import Any

import httpx2 as httpx
import pytest

from llmserve.errors import ModelNotReadyError, UnreachableError
from llmserve.testing.serving import ScriptedServe
from llmserve_gateway import loads
from llmserve_gateway.admission import Limits
from llmserve_gateway.batches import asking
from llmserve_gateway.batches.calls import Call
from llmserve_gateway.errors import ApiError
from llmserve_gateway.gateway import Settings
from llmserve_gateway.keys import BatchKey, new_key

from . import gateways

CHAT = {"messages": [{"role": "user", "content": "Hi"}]}


class Serve(ScriptedServe):
    """A `serve` and its Triton: what is loaded answers, and ``broken`` fails to load."""

    def __init__(self, *names: str, max_loaded: int = 1) -> None:
        super().__init__(*names, max_loaded=max_loaded)
        self.triton = Triton(self)

    async def unload(self, name: str) -> None:
        assert not self.triton.running, "it answers while it is unloaded"
        await super().unload(name)


class Triton(gateways.Triton):
    def __init__(self, serve: Serve) -> None:
        super().__init__()
        self.serve = serve
        self.running = 0
        self.is_lost = False
        self.all: list[Any] = []
        self.asked: Counter[str] = Counter()
        self.go_on = asyncio.Event()

    async def models(self) -> list[str]:
        return sorted(self.serve.loaded)

    async def model(self, name: str, *, refresh: bool = False) -> Any:
        if self.is_lost:
            raise UnreachableError("no Triton answers")
        if name not in self.serve.loaded:
            raise ModelNotReadyError(f"the server does not have {name!r}")
        return await super().model(name, refresh=refresh)

    async def generate(self, name: str, prompt: str, **options: Any) -> Any:
        assert name in self.serve.loaded
        self.running += 1
        self.asked[prompt] += 1
        try:
            await (self.go_on.wait() if prompt.startswith("wait") else asyncio.sleep(0.01))
            return await super().generate(name, prompt, **options)
        finally:
            self.running -= 1

    async def close(self) -> None:
        pass


@asynccontextmanager
async def front(
    serve: Serve, folder: Path, **settings: Any
) -> AsyncIterator[tuple[httpx.AsyncClient, Any]]:
    """A gateway in front of it, and a client."""
    socket = folder / "sock"
    fields = {"supervisor": socket, "on_demand": True, "local": True, **settings}
    app = gateways.app_before(serve.triton, Settings(gateways.NO_TRITON, **fields))
    lifespan = app.router.lifespan_context(app) if "batches" in settings else nullcontext()
    async with serve.listening(socket), lifespan:
        transport = httpx.ASGITransport(app=app)
        async with httpx.AsyncClient(
            transport=transport, base_url="http://localhost", timeout=20
        ) as client:
            app.state.gateway.app = app
            yield client, app.state.gateway


async def chat(client: httpx.AsyncClient, model: str, **more: Any) -> httpx.Response:
    body = {"model": model, **CHAT, **more}
    return await client.post("/v1/chat/completions", json=body)


def test_a_request_loads_what_it_names_and_overlapping_ones_share_it(tmp_path: Path) -> None:
    async def go() -> None:
        serve = Serve("a", "b", "c")
        async with front(serve, tmp_path) as (client, gateway):
            answers = await asyncio.gather(*(chat(client, name) for name in "aabbacba"))
            assert {answer.status_code for answer in answers} == {200}
            assert len(serve.history) == 2 * 3 - 1, "each was loaded once for all who waited"
            assert not gateway.loads.waiting
            listed = (await client.get("/v1/models")).json()["data"]
            assert [(m["id"], m["loaded"], m["size"]) for m in listed] == [
                (name, name in serve.loaded, 7_000_000) for name in "abc"
            ]
            metrics = (await client.get("/metrics")).text
            assert 'llmserve_model_wait_seconds_count{model_name="b"} 3.0' in metrics
            loaded = {name: f'loaded{{model_name="{name}"}} {float(name in serve.loaded)}'
                      for name in "abc"}  # fmt: skip
            assert all(line in metrics for line in loaded.values())
            assert 'llmserve_model_ready{model_name="a"} 1.0' in metrics

    asyncio.run(go())


def test_a_model_that_does_not_load_fails_its_own_requests_only(tmp_path: Path) -> None:
    async def go() -> None:
        serve = Serve("a", "broken")
        async with front(serve, tmp_path) as (client, _):
            broken, well = await asyncio.gather(chat(client, "broken"), chat(client, "a"))
            assert well.status_code == 200
            assert broken.status_code == 503
            assert broken.headers["retry-after"] == "6"
            error = broken.json()["error"]
            assert error["code"] == "model_not_loaded"
            assert "'broken' could not be loaded (no weights)" in error["message"]
            again = await chat(client, "broken", stream=True)
            assert again.status_code == 503, "it is not tried at once"
            unknown = await chat(client, "absent")
            assert (unknown.status_code, unknown.json()["error"]["code"]) == (
                404, "model_not_found"
            )  # fmt: skip
            state = (await client.get("/readyz")).json()
            assert state["ready"], "what is not loaded is loaded when it is asked for"

    asyncio.run(go())


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages", "/v1/responses"])
def test_a_stream_that_waits_has_comments(
    tmp_path: Path, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loads, "_COMMENT_EVERY", 0.02)
    body = {"stream": True, "max_tokens": 4, **CHAT}
    if path == "/v1/responses":
        body = {"stream": True, "input": "Hi"}

    async def go() -> None:
        serve = Serve("a", "broken")
        serve.gate.clear()
        async with front(serve, tmp_path) as (client, _):
            for name in ("a", "broken"):
                serve.gate.clear()
                asked = asyncio.ensure_future(client.post(path, json={**body, "model": name}))
                await asyncio.sleep(0.2)
                serve.gate.set()
                answer = await asked
                assert answer.status_code == 200
                events = answer.text.split("\n\n")
                # The first may come before the load has begun.
                assert ": the model is loaded, 1 in the queue" in events[:8]
                said = [event for event in events if event and not event.startswith(":")]
                assert said
                failed = "could not be loaded" in said[-1]
                assert failed is (name == "broken")
                assert len(said) == 1 or not failed

    asyncio.run(go())


def test_who_waits_for_a_model_takes_no_slot_of_others(tmp_path: Path) -> None:
    async def go() -> None:
        serve = Serve("a", "b", max_loaded=2)
        limits = Limits(max_requests=1, max_queue=1)
        async with front(serve, tmp_path, limits=limits) as (client, gateway):
            assert (await chat(client, "a")).status_code == 200
            serve.gate.clear()
            waiting = asyncio.ensure_future(chat(client, "b"))
            while not gateway.loads.waiting:
                await asyncio.sleep(0.001)
            assert (await chat(client, "a")).status_code == 200
            assert (await chat(client, "b")).status_code == 429, "the queue has its limit"
            late = await client.post(
                "/v1/completions", json={"model": "a", "prompt": "Hi"},
                headers={"x-request-timeout": "5"},
            )  # fmt: skip
            assert late.status_code == 200
            serve.gate.set()
            assert (await waiting).status_code == 200

    asyncio.run(go())


def test_what_waits_for_a_model_counts_while_it_is_in_memory(tmp_path: Path) -> None:
    async def go() -> None:
        serve = Serve("a")
        serve.gate.clear()
        limits = Limits(max_queued_tokens=1000)
        async with front(serve, tmp_path, limits=limits) as (client, gateway):
            waiting = asyncio.ensure_future(complete(client, "a", "x" * 2100))
            while not gateway.loads.waiting:
                await asyncio.sleep(0.001)
            refused = await complete(client, "a", "x" * 1200)
            assert (refused.status_code, refused.json()["error"]["code"]) == (429, "queue_full")
            more = asyncio.ensure_future(complete(client, "a", "x" * 600))
            serve.gate.set()
            answers = await asyncio.gather(waiting, more)
            # Once, and not again when they are asked.
            assert [answer.status_code for answer in answers] == [200, 200]
            assert not gateway.admission.tokens

    asyncio.run(go())


def test_a_client_that_waits_too_long_is_told(tmp_path: Path) -> None:
    async def go() -> None:
        serve = Serve("a")
        serve.gate.clear()
        async with front(serve, tmp_path) as (client, gateway):
            answer = await client.post(
                "/v1/completions", json={"model": "a", "prompt": "Hi"},
                headers={"x-request-timeout": "0.05"},
            )  # fmt: skip
            assert answer.status_code == 504
            assert "'a' was not loaded within 0.05 s" in answer.json()["error"]["message"]
            assert not gateway.loads.waiting

    asyncio.run(go())


@pytest.mark.parametrize("path", ["/tokenize", "/v1/messages/count_tokens"])
def test_what_asks_a_model_about_a_prompt_loads_it_too(tmp_path: Path, path: str) -> None:
    async def go() -> None:
        serve = Serve("a", "b")
        async with front(serve, tmp_path) as (client, _):
            body = {"model": "b", **CHAT}
            answer = await client.post(path, json=body)
            assert "+b" in serve.history
            # This one is not made by llmserve, which is why it cannot say.
            assert answer.status_code in (200, 400)

    asyncio.run(go())


def test_who_may_loads_and_unloads(tmp_path: Path) -> None:
    keys = tmp_path / "keys.json"
    plain = new_key(keys, "plain")
    operator = new_key(keys, "ops", operator=True, models=["a"])

    async def go() -> None:
        serve = Serve("a", "b")

        async def order(do: str, model: str, key: str) -> httpx.Response:
            headers = {"authorization": f"Bearer {key}"}
            return await client.post(f"/models/{do}", json={"model": model}, headers=headers)

        async with front(serve, tmp_path, keys=keys) as (client, _):
            for key, model in ((plain, "a"), (operator, "b")):
                assert (await order("load", model, key)).status_code == 403
            assert serve.history == []
            answer = await order("load", "a", operator)
            assert (answer.status_code, answer.json()["loaded"]) == (200, True)
            answer = await order("unload", "a", operator)
            assert (answer.status_code, answer.json()["loaded"]) == (200, False)
            assert serve.history == ["+a", "-a"]
        async with front(serve, tmp_path, local=False) as (client, _):
            assert (await order("load", "a", "")).status_code == 403
        async with front(serve, tmp_path) as (client, _):
            assert (await order("load", "absent", "")).status_code == 404
            assert (await order("load", "a", "")).status_code == 200

    asyncio.run(go())


def test_orders_that_take_long_hold_up_nobody_else(tmp_path: Path) -> None:
    async def go() -> None:
        serve = Serve("a", "b")
        serve.gate.clear()
        async with front(serve, tmp_path) as (client, _):
            orders = [
                asyncio.ensure_future(client.post("/models/load", json={"model": "a"}))
                for _ in range(40)
            ]
            done, _ = await asyncio.wait(orders, return_when=asyncio.FIRST_COMPLETED)
            assert {order.result().status_code for order in done} == {429}
            # It asks `serve` too.
            answer = await asyncio.wait_for(client.get("/v1/models/b"), 5)
            assert answer.status_code == 200
            serve.gate.set()
            statuses = [answer.status_code for answer in await asyncio.gather(*orders)]
            assert (statuses.count(200), statuses.count(429)) == (4, 36)

    asyncio.run(go())


def test_a_name_that_no_folder_can_have_is_not_looked_for(tmp_path: Path) -> None:
    async def go() -> None:
        async with front(Serve("a"), tmp_path) as (client, _):
            answer = await asyncio.wait_for(chat(client, "x" * 70_000), 2)
            assert answer.status_code == 404

    asyncio.run(go())


def test_a_triton_that_was_restarted_is_reached_by_a_new_connection(tmp_path: Path) -> None:
    async def go() -> None:
        serve, connections = Serve("a"), list[int]()
        async with front(serve, tmp_path) as (client, gateway):

            async def disconnect() -> None:
                connections.append(1)
                serve.triton.is_lost = False

            gateway.disconnect = disconnect
            serve.triton.is_lost = True
            assert (await chat(client, "a")).status_code == 200
            assert connections == [1]

    asyncio.run(go())


def test_who_is_one_too_many_comes_again_when_a_model_may_be_loaded(tmp_path: Path) -> None:
    waiting = loads.Loads(tmp_path / "sock", 1, lambda model, seconds: None)
    for seconds, after in ((40.0, "1"), (20.0, "40"), (1.0, "36")):
        waiting.count("a", None, of_batch=False)
        with pytest.raises(ApiError, match="1 requests wait for models to be loaded") as caught:
            waiting.count("b", None, of_batch=False)
        assert caught.value.headers["retry-after"] == after
        waiting.uncount("a", None, seconds, of_batch=False)


def test_a_key_over_its_limit_has_nothing_loaded(tmp_path: Path) -> None:
    keys = tmp_path / "keys.json"
    key = new_key(keys, "few", requests_per_minute=1)

    async def go() -> None:
        serve = Serve("a", "b")
        headers = {"authorization": f"Bearer {key}"}
        async with front(serve, tmp_path, keys=keys) as (client, _):
            statuses = []
            for name in "ab":
                body = {"model": name, "prompt": "Hi"}
                answer = await client.post("/v1/completions", json=body, headers=headers)
                statuses.append(answer.status_code)
            assert statuses == [200, 429]
            assert serve.history == ["+a"]

    asyncio.run(go())


def test_the_log_says_how_long_a_model_was_waited_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async def go() -> None:
        serve = Serve("a")
        async with front(serve, tmp_path) as (client, _):
            for _ in range(2):
                await chat(client, "a")

    asyncio.run(go())
    lines = [json.loads(line) for line in capsys.readouterr().err.splitlines() if line[:1] == "{"]
    first, second = lines
    assert first["load_ms"] > 0
    assert "load_ms" not in second


def in_time(work: Coroutine[Any, Any, None]) -> None:
    async def go() -> None:
        await asyncio.wait_for(work, 10)

    asyncio.run(go())


async def until(holds: Callable[[], Any]) -> None:
    deadline = time.monotonic() + 10
    while not holds():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.005)


async def complete(client: httpx.AsyncClient, model: str, prompt: str) -> httpx.Response:
    body = {"model": model, "prompt": prompt}
    return await client.post("/v1/completions", json=body)


async def begin_batch(client: httpx.AsyncClient, *asked: tuple[str, str]) -> str:
    """Begin a batch that asks models for prompts, and return its id."""
    content = b"".join(
        json.dumps(
            {
                "custom_id": str(number),
                "method": "POST",
                "url": "/v1/completions",
                "body": {"model": model, "prompt": prompt},
            }
        ).encode()
        + b"\n"
        for number, (model, prompt) in enumerate(asked)
    )
    form: Any = {"files": {"file": ("x", content)}, "data": {"purpose": "batch"}}
    file = (await client.post("/v1/files", **form)).json()["id"]
    body = {"input_file_id": file, "endpoint": "/v1/completions", "completion_window": "24h"}
    name: str = (await client.post("/v1/batches", json=body)).json()["id"]
    return name


async def answered(client: httpx.AsyncClient, batch: str) -> int:
    """Wait for the end of a batch, and return how many answers it has."""
    deadline = time.monotonic() + 10
    while (found := (await client.get(f"/v1/batches/{batch}")).json())["status"] != "completed":
        assert time.monotonic() < deadline
        await asyncio.sleep(0.01)
    completed: int = found["request_counts"]["completed"]
    return completed


def test_a_line_of_a_batch_loads_no_model_while_there_are_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(asking, "_PAUSE", 0.01)

    async def go() -> None:
        serve = Serve("a", "b")
        async with front(serve, tmp_path, batches=tmp_path / "batches") as (client, gateway):
            live = asyncio.ensure_future(complete(client, "a", "wait for me"))
            await until(lambda: serve.triton.running)
            asked = [("b", "1"), ("a", "2"), ("b", "3"), ("a", "4")]
            batch = await begin_batch(client, *asked)
            await until(lambda: serve.triton.asked["4"])
            await asyncio.sleep(0.1)
            assert serve.history == ["+a"], "the others are asked beside it"
            assert not gateway.loads.waiting
            serve.triton.go_on.set()
            assert (await live).status_code == 200
            # A conversation may go on.
            await asyncio.sleep(0.1)
            assert serve.history == ["+a"]
            monkeypatch.setattr(asking, "LOAD_QUIET", 0.05)
            assert await answered(client, batch) == 4
            assert serve.history == ["+a", "-a", "+b"]
            assert {serve.triton.asked[str(n)] for n in range(1, 5)} == {1}

    in_time(go())
    assert '"status": 503' not in capsys.readouterr().err, "it is not asked to be refused"


def test_a_model_that_goes_while_a_line_is_on_its_way_is_not_loaded_again(tmp_path: Path) -> None:
    async def go() -> None:
        serve = Serve("a", "b")
        async with front(serve, tmp_path) as (client, gateway):
            assert (await complete(client, "a", "live")).status_code == 200
            body = json.dumps({"model": "b", "prompt": "1"}).encode()
            for may_load, status in ((False, 503), (True, 200)):
                key = BatchKey("", "", may_load=may_load)
                answer = await Call(gateway.app, "/v1/completions", body, key).answer()
                assert answer
                assert answer.status == status
                assert ("+b" in serve.history) is may_load

    in_time(go())


def test_who_waits_for_a_model_does_not_wait_for_lines_of_batches(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(asking, "QUIET", 0.05)
    monkeypatch.setattr(asking, "LOAD_QUIET", 0.05)

    async def go() -> None:
        serve = Serve("a", "b")
        async with front(serve, tmp_path, batches=tmp_path / "batches") as (client, _):
            batch = await begin_batch(client, *(("b", f"wait {n}") for n in range(6)))
            await until(lambda: serve.triton.running == 6)
            assert (await complete(client, "a", "live")).status_code == 200
            serve.triton.go_on.set()
            assert await answered(client, batch) == 6
            assert serve.history == ["+b", "-b", "+a", "-a", "+b"]

    in_time(go())


def test_lines_of_batches_that_wait_for_a_model_make_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("QUIET", "LOAD_QUIET", "_PAUSE"):
        monkeypatch.setattr(asking, name, 0.05)

    async def go() -> None:
        serve = Serve("a", "b", max_loaded=2)
        async with front(serve, tmp_path, batches=tmp_path / "batches") as (client, gateway):
            assert (await complete(client, "a", "live")).status_code == 200
            serve.gate.clear()
            batch = await begin_batch(client, ("b", "1"))
            await until(lambda: gateway.loads.waiting)
            live = asyncio.ensure_future(complete(client, "a", "wait"))
            await until(lambda: serve.triton.running and not gateway.loads.waiting)
            serve.gate.set()
            serve.triton.go_on.set()
            assert (await live).status_code == 200
            assert await answered(client, batch) == 1

    in_time(go())


def test_lines_that_wait_take_no_place_of_others_in_the_queue(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("QUIET", "LOAD_QUIET", "_PAUSE"):
        monkeypatch.setattr(asking, name, 0.05)

    async def go() -> None:
        serve = Serve("a", "b", "c")
        settings = {"batches": tmp_path / "batches", "limits": Limits(max_queue=1)}
        async with front(serve, tmp_path, **settings) as (client, gateway):
            assert (await complete(client, "a", "live")).status_code == 200
            serve.gate.clear()
            batch = await begin_batch(client, ("b", "1"), ("b", "2"), ("c", "3"))
            await until(lambda: gateway.loads.waiting.total() == 3)
            # It is not refused, although more wait than may.
            live = asyncio.ensure_future(complete(client, "a", "live"))
            await until(lambda: gateway.loads.waiting == {"a": 1})
            serve.gate.set()
            assert (await live).status_code == 200
            # One was being loaded already, and the other was not loaded before it.
            first = serve.history[2][1:]
            assert first in ("b", "c")
            assert serve.history == ["+a", "-a", f"+{first}", f"-{first}", "+a"]
            assert await answered(client, batch) == 3

    in_time(go())


def test_a_response_in_the_background_loads_its_model(tmp_path: Path) -> None:
    async def go() -> None:
        serve = Serve("a", "broken")
        serve.gate.clear()
        kept = tmp_path / "kept"
        async with front(serve, tmp_path, responses=kept) as (client, gateway):
            body = {"input": "Hi", "background": True}
            begun = [(await client.post("/v1/responses", json={"model": name, **body})).json()
                     for name in ("broken", "a")]  # fmt: skip
            assert [each["status"] for each in begun] == ["queued", "queued"]
            assert serve.history == []
            serve.gate.set()
            final: list[Any] = []
            for each in begun:
                path = f"/v1/responses/{each['id']}"
                while (found := (await client.get(path)).json())["status"] in (
                    "queued", "in_progress",
                ):  # fmt: skip
                    await asyncio.sleep(0.01)
                final.append(found)
            assert [each["status"] for each in final] == ["failed", "completed"]
            assert "no weights" in final[0]["error"]["message"]
            await gateway.close()

    asyncio.run(go())


# How long models are kept, as Ollama's clients say it


async def turn(client: httpx.AsyncClient, model: str, key: str = "", **more: Any) -> Any:
    body = {"model": model, "stream": False, **CHAT, **more}
    headers = {"authorization": f"Bearer {key}"} if key else {}
    return await client.post("/api/chat", json=body, headers=headers)


def test_a_model_is_unloaded_when_its_last_request_says_so(tmp_path: Path) -> None:
    async def go() -> None:
        serve = Serve("a", "b", max_loaded=2)
        async with front(serve, tmp_path) as (client, _):
            assert (await turn(client, "a", keep_alive=-1)).status_code == 200
            assert (await turn(client, "b", keep_alive=0)).status_code == 200
            await until(lambda: serve.loaded == {"a"})
            # Who is still answered has it to its end.
            waits = asyncio.ensure_future(
                client.post("/v1/completions", json={"model": "a", "prompt": "wait"})
            )
            await until(lambda: serve.triton.running == 1)
            assert (await turn(client, "a", keep_alive="0s")).status_code == 200
            assert serve.loaded == {"a"}
            serve.triton.go_on.set()
            assert (await waits).status_code == 200
            await until(lambda: not serve.loaded)

    asyncio.run(asyncio.wait_for(go(), 20))


def test_a_request_without_a_turn_unloads_a_model(tmp_path: Path) -> None:
    async def go() -> None:
        serve = Serve("a")
        async with front(serve, tmp_path) as (client, _):
            for model, status in (("a", 200), ("none", 404)):
                # Nothing is loaded for it.
                answer = await turn(client, model, messages=[], keep_alive=0)
                assert answer.status_code == status, answer.text
            assert serve.history == []
            assert (await turn(client, "a", messages=[])).json()["done_reason"] == "load"
            answer = await turn(client, "a", messages=[], keep_alive=0)
            assert answer.json()["done_reason"] == "unload"
            await until(lambda: serve.history == ["+a", "-a"])

    asyncio.run(asyncio.wait_for(go(), 20))


def test_a_key_that_may_not_unload_models_keeps_and_unloads_none(tmp_path: Path) -> None:
    async def go() -> None:
        file = tmp_path / "keys.json"
        user, operator = new_key(file, "user"), new_key(file, "operator", operator=True)
        serve = Serve("a")
        async with front(serve, tmp_path, keys=file) as (client, _):
            assert (await turn(client, "a", user, keep_alive=0)).status_code == 200
            refused = await turn(client, "a", user, messages=[], keep_alive=0)
            assert (refused.status_code, serve.loaded) == (403, {"a"})
            assert "--operator" in refused.json()["error"]
            assert (await turn(client, "a", operator, keep_alive=0)).status_code == 200
            await until(lambda: not serve.loaded)

    asyncio.run(asyncio.wait_for(go(), 20))
