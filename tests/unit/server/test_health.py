"""The monitor, with models that answer as the test says."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import pytest

from llmserve.errors import (
    LLMServeError,
    ModelDiedError,
    ModelFailedError,
    RequestRejectedError,
    UnreachableError,
)
from llmserve.server.keep.health import Finding, Monitor, State, Watch, finding

DIED = ModelDiedError("the process that runs 'm' has died")
FAILS = ModelFailedError("the model failed: KeyError: 1")
GONE = UnreachableError("nobody answers")
REFUSED = RequestRejectedError("max_tokens must be above 0")


class Model:
    """A model `m`, and what is seen of it."""

    def __init__(self, *script: LLMServeError | None) -> None:
        self.script = [*script]
        self.asked = 0
        self.counts: Counter[str] = Counter(m=0)
        self.used = 0.0
        self.process = True
        self.starts = 1
        self.task = "generate"
        self.inputs = {"text_input"}
        self.pairs: list[str] | None = None

    async def model(self, name: str) -> Any:
        return SimpleNamespace(inputs=self.inputs, task=self.task)

    async def generate(self, model: str, prompt: str = "", **_: Any) -> None:
        self.asked += 1
        if self.script and (error := self.script.pop(0)):
            raise error
        self.counts["m"] += 1

    async def compute(
        self, model: str, texts: list[str], *, pairs: list[str] | None = None, **_: Any
    ) -> None:
        self.pairs = pairs
        await self.generate(model)

    async def answers(self) -> Mapping[str, int]:
        return dict(self.counts)

    def seconds(self) -> Mapping[str, float]:
        return {"m": self.used}

    def load_number(self, name: str) -> int:
        return self.starts

    def has_processes(self, name: str) -> bool:
        return self.process


def checked(model: Model, times: int = 1, **options: Any) -> Watch:
    watch = Watch("m", state=State.READY)

    async def go() -> None:
        monitor = Monitor(lambda: model, lambda: [watch], model, slow=1.0, **options)
        for _ in range(times):
            await monitor.check()

    asyncio.run(go())
    return watch


def test_an_idle_model_is_asked_once_at_every_check() -> None:
    model = Model()
    assert checked(model, times=4).state is State.READY
    assert model.asked == 4


def test_a_model_that_answers_others_is_not_asked() -> None:
    model = Model()

    async def answers() -> Mapping[str, int]:
        model.counts["m"] += 1
        return dict(model.counts)

    model.answers = answers  # type: ignore[method-assign]
    checked(model, times=4)
    assert model.asked == 1, "at the first check, nothing is known yet"


@pytest.mark.parametrize(
    ("errors", "state"),
    [
        ([GONE], State.SUSPECT),
        ([GONE, None], State.READY),
        ([GONE, GONE], State.RESTARTING),
        ([REFUSED] * 3, State.READY),
        ([DIED, DIED], State.RESTARTING),
    ],
)
def test_silence_counts_and_a_refusal_is_an_answer(
    errors: list[LLMServeError | None], state: State
) -> None:
    assert checked(Model(*errors), times=len(errors)).state is state


def test_a_model_that_fails_is_alive_for_who_restarts_models_and_silent_for_others() -> None:
    assert checked(Model(FAILS, FAILS), times=2).state is State.READY
    assert checked(Model(FAILS, FAILS), times=2, strict=True).state is State.RESTARTING


def test_a_model_that_fails_every_canary_is_told_until_it_answers() -> None:
    model, watch = Model(FAILS, FAILS, None), Watch("m", state=State.READY)
    monitor = Monitor(lambda: model, lambda: [watch], model, slow=1.0)

    async def go() -> list[str]:
        reasons = []
        for _ in range(3):
            await monitor.check()
            reasons.append(monitor.failing("m"))
        return reasons

    assert asyncio.run(go()) == ["", FAILS.problem, ""]


def test_a_death_is_certain_if_its_process_is_missing() -> None:
    model = Model(DIED)
    model.process = False
    watch = checked(model)
    assert (watch.state, watch.why) == (State.RESTARTING, "its process has died")


def test_a_death_of_a_process_that_has_been_replaced_counts_for_nothing() -> None:
    model = Model(DIED)
    model.process = False

    async def generate(model_name: str, prompt: str = "", **_: Any) -> None:
        model.starts += 1
        raise DIED

    model.generate = generate  # type: ignore[method-assign,assignment]
    assert checked(model).state is State.READY


@pytest.mark.parametrize("state", [State.LOADING, State.READY])
def test_the_silence_of_a_process_that_has_been_replaced_ends_no_other(state: State) -> None:
    """The new one would be killed while it loads, and Triton would wait for it for ever."""
    model, watch = Model(), Watch("m", state=State.READY, misses=1)

    async def generate(model_name: str, prompt: str = "", **_: Any) -> None:
        watch.state, watch.misses = state, 1
        model.starts += 1
        raise GONE

    model.generate = generate  # type: ignore[method-assign,assignment]
    monitor = Monitor(lambda: model, lambda: [watch], model, slow=1.0)
    asyncio.run(monitor.check())
    assert watch.state is state


def test_a_model_that_computes_is_not_silent() -> None:
    model = Model(None, GONE, GONE, GONE)

    def seconds() -> Mapping[str, float]:
        model.used += 1.0
        return {"m": model.used}

    model.seconds = seconds  # type: ignore[method-assign]
    assert checked(model, times=4).state is State.READY


@pytest.mark.parametrize(
    ("error", "found"),
    [
        (DIED, Finding.DIED),
        (GONE, Finding.SILENT),
        (REFUSED, Finding.REFUSED),
        (FAILS, Finding.FAILED),
    ],
)
def test_what_a_failure_says_of_the_model(error: LLMServeError, found: Finding) -> None:
    assert finding(error) is found


def test_a_model_that_answers_with_values_is_asked_for_one() -> None:
    model = Model()
    model.task = "rerank"
    model.inputs = {"text_input", "text_pair"}
    checked(model, 1)
    assert (model.asked, model.pairs) == (1, ["a"])


def test_a_model_without_a_task_is_not_asked() -> None:
    model = Model()
    model.task = ""
    checked(model, 1)
    assert model.asked == 0
