"""The model states that the gateway gets from the `serve` process that started it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest

from llmserve.client import Completion
from llmserve.errors import ModelNotReadyError, UnreachableError
from llmserve.server import ModelReport, OnDemandReport, ServerReport, State
from llmserve.testing.serving import listening
from llmserve_gateway.catalog import Catalog
from llmserve_gateway.gateway import Settings
from llmserve_gateway.metrics import Metrics
from llmserve_gateway.replicas import Replicas

from . import gateways

DEAD_MODEL = ModelReport("m", State.RESTARTING, "its process has died", 1, "model_died")
READY_MODEL = ModelReport("m", State.READY, restarts=1)


def report_of(*models: ModelReport) -> ServerReport:
    return ServerReport(State.READY, models=models)


class Triton(gateways.Triton):
    fails = False

    async def generate(self, name: str, prompt: str, **options: Any) -> Completion:
        answer = await super().generate(name, prompt, **options)
        if self.fails:
            raise UnreachableError("nobody answers")
        return answer

    def is_available(self, name: str) -> bool:
        return False


async def report_status(request: Mapping[str, Any]) -> ServerReport:
    assert request == {"do": "status"}
    return report_of(DEAD_MODEL)


def unused_client() -> Replicas:
    raise AssertionError("the gateway must not ask Triton")


def test_it_learns_which_models_are_dead_and_reports_them(tmp_path: Path) -> None:
    catalog, metrics = Catalog(unused_client, supervisor=tmp_path / "sock"), Metrics()

    async def query() -> None:
        assert not await catalog.supervised(), "nothing listens on the socket yet"
        async with listening(tmp_path / "sock", report_status):
            models = await catalog.supervised()
        assert models == (DEAD_MODEL,)
        metrics.update([], models, {})

    asyncio.run(query())
    assert b'llmserve_model_ready{model_name="m"} 0.0' in metrics.text()
    assert b'llmserve_model_restarts{model_name="m"} 1.0' in metrics.text()
    assert not asyncio.run(Catalog(unused_client).supervised())


def test_serve_asks_an_idle_model_and_the_gateway_only_one_that_has_failed_here(
    tmp_path: Path,
) -> None:
    """Under `serve`, a model gets one canary per interval, and not another of the gateway."""
    triton, rounds = Triton(), 0

    async def report(_: Mapping[str, Any]) -> ServerReport:
        nonlocal rounds
        rounds += 1
        return report_of(READY_MODEL)

    async def watched(catalog: Catalog, requests: int) -> None:
        watching = asyncio.ensure_future(catalog.watch(0.001))
        until = rounds + 20
        while rounds < until or len(triton.requests) < requests:
            await asyncio.sleep(0.001)
        watching.cancel()

    async def go() -> list[int]:
        counts = []
        catalog = Catalog(lambda: cast(Any, triton), supervisor=tmp_path / "sock")
        async with listening(tmp_path / "sock", report):
            await watched(catalog, 0)
            counts.append(len(triton.requests))
            triton.fails = True
            catalog.record_failure("m", UnreachableError("nobody answers"))
            await watched(catalog, 1)
            assert not (await catalog.state())["ready"]
            triton.fails = False
            await watched(catalog, len(triton.requests) + 1)
            assert (await catalog.state())["ready"]
            answered = len(triton.requests)
            await watched(catalog, 0)
            counts.append(len(triton.requests) - answered)
        return counts

    assert asyncio.run(go()) == [0, 0]


def test_a_request_while_a_model_is_not_loaded_does_not_delay_its_return() -> None:
    async def go() -> Any:
        catalog = Catalog(lambda: cast(Any, Triton()))
        for _ in range(2):
            catalog.record_failure("m", ModelNotReadyError("the server does not have 'm'"))
        return await catalog.state()

    assert asyncio.run(go())["models"] == {"m": {"ready": True}}


def test_a_model_that_fails_the_canaries_of_serve_is_not_ready(tmp_path: Path) -> None:
    async def report(_: Mapping[str, Any]) -> ServerReport:
        return report_of(replace(READY_MODEL, failing="the model failed"))

    async def go() -> Any:
        catalog = Catalog(lambda: cast(Any, Triton()), supervisor=tmp_path / "sock")
        async with listening(tmp_path / "sock", report):
            return await catalog.state()

    state = asyncio.run(go())
    assert state["models"] == {"m": {"ready": False, "why": "the model failed"}}


def test_a_model_whose_answers_are_wrong_is_ready_and_says_so(tmp_path: Path) -> None:
    fault = {"check": "answer", "why": "token 3 is another", "prompt": "Once upon a time"}
    certificate = {"known": 5, "checks": 7, "faults": 1, "faulty": 1, "fault": fault, "judged": 3}
    model = {"name": "m", "state": "ready", "certificate": certificate}
    report = ServerReport.from_json({"state": "ready", "models": [model]})

    async def answer(_: Mapping[str, Any]) -> ServerReport:
        return report

    async def go() -> Any:
        catalog = Catalog(lambda: cast(Any, Triton()), supervisor=tmp_path / "sock")
        async with listening(tmp_path / "sock", answer):
            return await catalog.state()

    state = asyncio.run(go())
    words = "answer of 'Once upon a time': token 3 is another"
    assert state == {"ready": True, "models": {"m": {"ready": True, "fault": words}}}
    metrics = Metrics()
    metrics.update([], report.models, {})
    assert b'llmserve_certify_fault{model_name="m"} 1.0' in metrics.text()
    assert b'llmserve_certify_checks{model_name="m"} 7.0' in metrics.text()
    assert b'llmserve_certify_judged{model_name="m"} 3.0' in metrics.text()


def test_a_model_that_has_yet_to_read_its_prompts_is_not_ready_and_answers(
    tmp_path: Path,
) -> None:
    triton, reading = Triton(), True
    demand: OnDemandReport | None = None

    async def report(_: Mapping[str, Any]) -> ServerReport:
        return report_of(replace(READY_MODEL, reading=reading, demand=demand))

    async def state() -> Mapping[str, Any]:
        loads = cast(Any, object()) if demand else None
        catalog = Catalog(lambda: cast(Any, triton), supervisor=tmp_path / "sock", loads=loads)
        async with listening(tmp_path / "sock", report):
            return await catalog.state()

    found = asyncio.run(state())
    assert (found["ready"], found["models"]["m"]["ready"]) == (False, False)
    assert "reads" in found["models"]["m"]["why"]
    # Who needs one on demand waits for its load alone, but one that is pinned is to be warm.
    for pinned in (False, True):
        demand = OnDemandReport(loaded=True, pinned=pinned, task="generate")
        assert asyncio.run(state())["models"]["m"]["ready"] is not pinned
    reading, demand = False, None
    assert asyncio.run(state())["ready"]


def test_without_serve_the_gateway_asks_every_idle_model() -> None:
    triton = Triton()

    async def go() -> None:
        catalog = Catalog(lambda: cast(Any, triton))
        watching = asyncio.ensure_future(catalog.watch(0.001))
        while len(triton.requests) < 3:
            await asyncio.sleep(0.001)
        watching.cancel()

    asyncio.run(asyncio.wait_for(go(), 30))


def test_a_description_is_asked_for_again_once_serve_has_loaded_the_model_again(
    tmp_path: Path,
) -> None:
    loaded, triton, rounds = 1, Triton(), 0

    async def report(_: Mapping[str, Any]) -> ServerReport:
        nonlocal rounds
        rounds += 1
        return report_of(replace(READY_MODEL, loads=loaded))

    async def go() -> list[int]:
        nonlocal loaded
        counts = []
        catalog = Catalog(lambda: cast(Any, triton), supervisor=tmp_path / "sock")
        async with listening(tmp_path / "sock", report):
            await catalog.chat_template("m")
            watching = asyncio.ensure_future(catalog.watch(0.001))
            for loaded in (1, 2):  # noqa: B007 - the report reads it
                until = rounds + 20
                while rounds < until:
                    await asyncio.sleep(0.001)
                counts.append(len(triton.requests))
            watching.cancel()
        return counts

    # When it was first asked, the gateway had not yet heard which process answers.
    assert asyncio.run(go()) == [2, 3]


@pytest.mark.parametrize("stream", [False, True])
def test_an_answered_request_is_not_recorded_as_cancelled(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], stream: bool
) -> None:
    """The server says that a client has gone once it has been answered, whether it has or not."""
    settings = Settings(gateways.NO_TRITON, supervisor=tmp_path / "sock")
    request = {**gateways.TEXT, "stream": stream}
    answer = gateways.request_via(Triton(), "/v1/completions", settings=settings, json=request)
    assert answer.status_code == 200
    logged = json.loads(capsys.readouterr().err.splitlines()[-1])
    expected = (200, "length") if stream else (200, "stop")
    assert (logged["status"], logged["outcome"]) == expected
