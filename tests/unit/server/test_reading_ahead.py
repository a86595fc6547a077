"""Models that read their warm prompts whenever they are loaded, in simulated Tritons."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmserve.client import Completion, ModelInfo
from llmserve.contract.report import ModelReport, State, best_of
from llmserve.contract.warm_prompt import WarmPrompt
from llmserve.errors import (
    LLMServeError,
    ModelDiedError,
    ModelNotReadyError,
    RequestRejectedError,
    UsageError,
)
from llmserve.server.keep import actions, health
from llmserve.server.keep.desired import OnDemand
from llmserve.server.keep.reading_ahead import is_reading
from llmserve.server.keep.start_report import StartReport
from llmserve.server.settings import ServerSettings
from tests.unit.server.simulated import World


def warm(*names: str, **options: Any) -> World:
    world = World(*names, **options)
    for memory in world.memory.tritons:
        memory.warm = frozenset({"m"})
    return world


def asked(world: World, triton: int = 0) -> list[str]:
    each = [a for a in world.done if isinstance(a, actions.ReadAhead)]
    return [one.model for one in each if one.triton == triton]


def reading(world: World, triton: int = 0, name: str = "m") -> bool:
    number = world.tritons[triton].load_number(name)
    return is_reading(world.memory.tritons[triton], name, number)


def test_a_model_reads_once_after_each_of_its_loads_and_others_do_not() -> None:
    world = warm("m", "other")
    assert reading(world), "before anything was decided too"
    world.step()
    assert asked(world) == ["m"]
    assert reading(world)
    world.run(world.reads_in + 1)
    assert not reading(world)
    assert not reading(world, name="other")
    assert world.lines == ["m: has read 1,234 tokens of prompts in 5.0 s"]
    world.run(60)
    assert asked(world) == ["m"]
    world.tritons[0].kill("m")
    world.run(20)
    assert world.states()["m"] == "ready"
    assert asked(world) == ["m", "m"]
    assert not reading(world)
    world.outcome(world.order("reload", "m"))
    world.run(20)
    assert asked(world) == ["m"] * 3
    world.tritons[0].end()
    world.run(30)
    assert (world.states()["m"], asked(world)) == ("ready", ["m"] * 4)


def test_every_replica_reads_for_itself() -> None:
    world = warm("m", replicas=2)
    world.run(8)
    assert asked(world, 0) == asked(world, 1) == ["m"]
    world.tritons[1].end()
    world.run(30)
    assert (asked(world, 0), asked(world, 1)) == (["m"], ["m", "m"])


def test_a_model_on_demand_reads_once_it_is_loaded_and_nobody_waits_for_that() -> None:
    world = warm("m", "n", on_demand=OnDemand(max_loaded=1))
    world.run(5)
    assert not asked(world), "it is not loaded"
    hold = world.hold("m")
    assert not world.outcome(hold)
    assert reading(world)
    world.run(8)
    assert (asked(world), reading(world)) == (["m"], False)
    world.release(hold)
    other = world.hold("n")
    assert not world.outcome(other)
    world.release(other)
    assert not world.outcome(world.hold("m"))
    world.run(8)
    assert (asked(world), reading(world)) == (["m", "m"], False)


def test_a_model_that_cannot_read_says_so_once_and_is_ready() -> None:
    world = warm("m")
    world.unread = ("system.txt: it is too long", "more.txt: it is too long")
    world.run(30)
    assert asked(world) == ["m"]
    assert not reading(world)
    assert world.lines == [
        "m: a prompt was not read ahead: system.txt: it is too long",
        "m: a prompt was not read ahead: more.txt: it is too long",
    ]


def test_what_a_process_says_that_has_gone_does_not_count() -> None:
    world = warm("m")
    world.reads_in = 9.0
    world.step()
    world.tritons[0].kill("m")
    world.run_until(lambda: len(asked(world)) == 2)
    world.run(5)
    assert reading(world), "the first process has answered meanwhile, and the second has not"
    assert not [line for line in world.lines if "has read" in line]
    world.run(6)
    assert not reading(world)


@given(st.lists(st.tuples(st.sampled_from(["kill", "end", "reload"]), st.integers(1, 40))))
def test_whatever_happens_a_model_that_is_left_alone_has_read(
    events: list[tuple[str, int]],
) -> None:
    world = warm("m", "other")
    for event, ticks in events[:6]:
        if event == "kill":
            world.tritons[0].kill("m")
        elif event == "end":
            world.tritons[0].end()
        else:
            world.order("reload", "m")
        for _ in range(ticks):
            world.step()
    world.run(120)
    if world.states()["m"] == "ready":
        assert not reading(world)
        assert len(asked(world)) <= 1 + 2 * len(events)


def test_while_the_frontends_start_a_model_has_yet_to_read(tmp_path: Any) -> None:
    prompts = {"m": (WarmPrompt("system.txt", "You help."),)}
    settings = ServerSettings(tmp_path, models=("m", "n"), warm_prompts=prompts)
    report = StartReport(settings)
    report.done({})
    models = asyncio.run(report.answer({"do": "status"})).models
    assert {model.name: model.reading for model in models} == {"m": True, "n": False}


def test_a_model_has_read_once_one_replica_has() -> None:
    has, has_not = (ModelReport("m", State.READY, reading=each) for each in (False, True))
    assert not best_of([has_not, has]).reading
    assert not best_of([has, has_not]).reading
    assert best_of([has_not, has_not]).reading
    assert best_of([has_not, ModelReport("m", State.FAILED)]).reading


class Client:
    """Says what it is asked, after it has failed as its script says."""

    def __init__(self, *script: LLMServeError, task: str = "generate", hidden: int = 0) -> None:
        self.script = [*script]
        self.hidden = hidden
        """How often it is not known yet."""
        self.task = task
        self.asked: list[dict[str, Any]] = []

    async def model(self, name: str) -> ModelInfo:
        self.hidden -= 1
        if self.hidden >= 0:
            raise ModelNotReadyError("Request for unknown model")
        return ModelInfo(name, "unary", False, None, {}, {}, task=self.task)

    async def generate(self, model: str, prompt: str = "", **options: Any) -> Completion:
        self.asked.append(options)
        if self.script:
            raise self.script.pop(0)
        return Completion("x", "length", 57, 1)

    async def compute(self, *_: Any, **__: Any) -> Any:
        raise AssertionError


def test_a_model_reads_what_conversations_begin_with(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(health, "BACK_EVERY", 0.001)
    late = ModelNotReadyError("m is not ready")
    client = Client(late, ModelDiedError("the process that runs 'm' has died"), late)
    assert asyncio.run(health.have_read(client, "m", "You help.", 5.0)) == 57
    first, *_, last = client.asked
    assert first == last
    assert asyncio.run(health.have_read(Client(hidden=3), "m", "You help.", 5.0)) == 57
    assert (last["messages"][0], last["max_tokens"]) == (
        {"role": "system", "content": "You help."}, 1,
    )  # fmt: skip
    monkeypatch.setattr(health, "BACK_WITHIN", 0.0)
    for client, error in (
        (Client(RequestRejectedError("it is too long")), RequestRejectedError),
        (Client(*[late] * 9), ModelNotReadyError),
        (Client(task="embed"), UsageError),
    ):
        with pytest.raises(error):
            asyncio.run(health.have_read(client, "m", "You help.", 5.0))
