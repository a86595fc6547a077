"""Requests to a model whose process dies while it answers."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from llmserve.contract.failures import FAILURES
from llmserve.server import ModelReport, State
from llmserve_gateway import deaths
from llmserve_gateway.deaths import Deaths
from llmserve_gateway.errors import ApiError

INFO: Any = SimpleNamespace(name="m", parts=("m-read",))
READY = ModelReport("m", State.READY)
ENDED = replace(READY, state=State.RESTARTING, why="killed by SIGKILL", code="model_died")


class Serve:
    """Reports the states of models, one report after the other; the last one stays."""

    def __init__(self, *reports: Sequence[ModelReport]) -> None:
        self._reports = list(reports)
        self.asked = 0

    async def __call__(self) -> Sequence[ModelReport]:
        self.asked += 1
        return self._reports.pop(0) if len(self._reports) > 1 else self._reports[0]


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deaths, "_INTERVAL", 0.001)


def outcome(serve: Serve, answering: Callable[[], Awaitable[None]]) -> None:
    async def go() -> None:
        watching = Deaths(serve)
        await asyncio.wait_for(watching.unless_it_dies(INFO, answering()), 10)
        asked = serve.asked
        await asyncio.sleep(0.02)
        assert serve.asked <= asked + 1, "nobody waits for an answer"

    asyncio.run(go())


async def never() -> None:
    await asyncio.get_running_loop().create_future()


@pytest.mark.parametrize(
    "changed",
    [
        [ENDED],
        [replace(ENDED, state=State.FAILED, restarts=3)],
        # It came back between two questions.
        [replace(READY, restarts=1)],
        [READY, replace(ENDED, name="m-read")],
    ],
)
def test_an_answer_that_cannot_end_any_more_is_an_error(
    changed: Sequence[ModelReport],
) -> None:
    cancelled = []

    async def answering() -> None:
        try:
            await never()
        except asyncio.CancelledError:
            cancelled.append(True)
            raise

    with pytest.raises(ApiError, match=r"the process of 'm' died while it answered") as caught:
        outcome(Serve([READY], [READY], changed), answering)
    row = FAILURES["model_died"]
    assert (caught.value.status, caught.value.code) == (row.status, row.api_code)
    assert caught.value.headers == {"retry-after": str(row.retry_after)}
    assert cancelled


def test_another_models_death_a_reload_and_an_absent_serve_end_nothing() -> None:
    other = replace(ENDED, name="other", restarts=5)
    suspect = replace(READY, state=State.SUSPECT, why="no answer")
    reports = [[READY, other], [], [suspect], [replace(READY, loads=2)]]

    async def answering() -> None:
        while serve.asked < 10:
            await asyncio.sleep(0.001)

    serve = Serve(*reports)
    outcome(serve, answering)


def test_the_errors_of_an_answer_are_its_own() -> None:
    async def answering() -> None:
        raise ValueError("its own")

    with pytest.raises(ValueError, match="its own"):
        outcome(Serve([READY]), answering)


def test_a_client_that_has_gone_ends_its_answer() -> None:
    ended = []

    async def answering() -> None:
        try:
            await never()
        finally:
            ended.append(True)

    async def go() -> None:
        request = asyncio.ensure_future(Deaths(Serve([READY])).unless_it_dies(INFO, answering()))
        await asyncio.sleep(0.01)
        request.cancel()
        with pytest.raises(asyncio.CancelledError):
            await request
        assert ended

    asyncio.run(go())
