"""Requests to a model whose process dies while it answers."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from llmserve.contract.failures import FAILURES
from llmserve_gateway import deaths
from llmserve_gateway.deaths import Deaths
from llmserve_gateway.errors import ApiError

INFO: Any = SimpleNamespace(name="m", parts=("m-read",))
READY = {"state": "ready", "why": "", "restarts": 0}


class Serve:
    """Reports the states of models, one report after the other; the last one stays."""

    def __init__(self, *reports: Mapping[str, Mapping[str, Any]]) -> None:
        self._reports = list(reports)
        self.asked = 0

    async def __call__(self) -> Sequence[Mapping[str, Any]]:
        self.asked += 1
        report = self._reports.pop(0) if len(self._reports) > 1 else self._reports[0]
        return [{"name": name, **state} for name, state in report.items()]


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
        {"m": {"state": "restarting", "why": "killed by SIGKILL", "restarts": 0}},
        {"m": {"state": "failed", "why": "killed by SIGKILL", "restarts": 3}},
        # It came back between two questions.
        {"m": {"state": "ready", "why": "", "restarts": 1}},
        {"m": READY, "m-read": {"state": "restarting", "why": "its end", "restarts": 0}},
    ],
)
def test_an_answer_that_cannot_end_any_more_is_an_error(
    changed: Mapping[str, Mapping[str, Any]],
) -> None:
    cancelled = []

    async def answering() -> None:
        try:
            await never()
        except asyncio.CancelledError:
            cancelled.append(True)
            raise

    with pytest.raises(ApiError, match=r"the process of 'm' died while it answered") as caught:
        outcome(Serve({"m": READY}, {"m": READY}, changed), answering)
    row = FAILURES["model_died"]
    assert (caught.value.status, caught.value.code) == (row.status, row.api_code)
    assert caught.value.headers == {"retry-after": str(row.retry_after)}
    assert cancelled


def test_another_models_death_a_reload_and_an_absent_serve_end_nothing() -> None:
    other = {"state": "restarting", "why": "killed", "restarts": 5}
    suspect = {"state": "suspect", "why": "no answer", "restarts": 0}
    reports = [{"m": READY, "other": other}, {}, {"m": suspect}, {"m": {**READY, "loads": 2}}]

    async def answering() -> None:
        while serve.asked < 10:
            await asyncio.sleep(0.001)

    serve = Serve(*reports)
    outcome(serve, answering)


def test_the_errors_of_an_answer_are_its_own() -> None:
    async def answering() -> None:
        raise ValueError("its own")

    with pytest.raises(ValueError, match="its own"):
        outcome(Serve({"m": READY}), answering)


def test_a_client_that_has_gone_ends_its_answer() -> None:
    ended = []

    async def answering() -> None:
        try:
            await never()
        finally:
            ended.append(True)

    async def go() -> None:
        request = asyncio.ensure_future(
            Deaths(Serve({"m": READY})).unless_it_dies(INFO, answering())
        )
        await asyncio.sleep(0.01)
        request.cancel()
        with pytest.raises(asyncio.CancelledError):
            await request
        assert ended

    asyncio.run(go())
