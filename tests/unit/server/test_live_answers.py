"""Answers to users, judged by the scores that their model gives the same tokens as a prompt."""

from __future__ import annotations

import asyncio
import itertools
import json
import math
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmserve.client import EXPLAINED, Logprob
from llmserve.contract.live_answer import MOST_BYTES, MOST_TOKENS, LiveAnswer
from llmserve.contract.report import FaultReport, ReplicaReport, State
from llmserve.errors import RequestRejectedError, ServerError
from llmserve.repository import repository
from llmserve.server.keep import actions, live_answers
from llmserve.server.keep.certificate import KEPT, MOST_WAITING
from llmserve.server.keep.control import ask, listening
from llmserve.server.keep.desired import OnDemand
from llmserve.server.keep.known_answers import KnownAnswer, KnownAnswers
from llmserve.server.keep.live_answers import UnjudgedError, compare
from llmserve.server.keep.picture import Checked
from llmserve.server.keep.supervisor import Socket, Supervisor
from llmserve.server.settings import ServerSettings
from tests.unit.server.simulated import World

SECRET = "what the user said"
PROMPT = tuple(map(ord, SECRET))
TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"


def answer_of(*logprobs: float, age: float = 0.0) -> LiveAnswer:
    ids = tuple(range(7, 7 + len(logprobs)))
    likeliest = (True,) * len(ids)
    return LiveAnswer("m", {"prompt": SECRET}, ids, logprobs, likeliest, len(PROMPT), age)


def scored(*rows: tuple[float, float]) -> list[Logprob]:
    """Return what a model says of the tokens, and how likely it found another one."""
    found = []
    for at, (logprob, other) in enumerate(rows, 7):
        own, second = Logprob(at, "a", logprob), Logprob(99, "b", other)
        found.append(replace(own, top=(own if logprob >= other else second,)))
    return found


@pytest.mark.parametrize(
    ("rows", "check"),
    [
        ([(-0.5, -3), (-0.6, -3)], None),
        ([(-0.5, -3), (-0.95, -3)], "log-probabilities"),
        ([(math.nan, -3), (-0.6, -3)], "log-probabilities"),
        # It is a tie that another token is a little likelier when it is read.
        ([(-0.75, -0.65), (-0.6, -3)], None),
        ([(-0.75, -0.3), (-0.6, -3)], "answer"),
    ],
)
def test_an_answer_is_judged_by_what_rounding_explains(
    rows: list[tuple[float, float]], check: str | None
) -> None:
    fault = compare(answer_of(-0.5, -0.6), scored(*rows), 0.3)
    assert (fault.check if fault else None) == check
    if fault is not None:
        assert fault.prompt == ""
        assert fault.explained == 0.3
        assert "a user's answer" in fault.in_words()


def test_a_token_that_was_never_the_likeliest_need_not_be() -> None:
    """Sampling and penalties take others: only their scores are compared."""
    answer = replace(answer_of(-3.0), likeliest=(False,))
    assert compare(answer, scored((-3.1, -0.1)), 0.3) is None


Noise = st.lists(st.floats(-1, 1), min_size=1, max_size=40)


@given(noise=Noise, precision=st.sampled_from(sorted(EXPLAINED)), gap=st.floats(0, 3))
def test_rounding_is_never_a_fault(noise: list[float], precision: str, gap: float) -> None:
    """Whatever the scores, if none has changed by more than half of what is explained."""
    half = EXPLAINED[precision] / 2 * 0.999
    answer = answer_of(*(-1.0 - gap - half * each for each in noise))
    now = [(-1.0 - gap + half * each, -1.0 - gap - half * each) for each in noise]
    assert compare(answer, scored(*now), EXPLAINED[precision]) is None


class Client:
    """A model that reads characters, and finds each token ``level`` likely wherever it stands."""

    def __init__(self, level: float = -0.5) -> None:
        self.level, self.template, self.context = level, TEMPLATE, 4096
        self.inputs = {"logprobs", "prompt_only", "prompt_logprobs", "input_ids", "max_tokens"}
        self.asked: list[dict[str, Any]] = []
        self.refuses = ""

    async def model(self, name: str, *, refresh: bool = False) -> Any:
        return SimpleNamespace(
            inputs=self.inputs, made_by_llmserve="1",
            input_of=lambda name: name in self.inputs or None,
        )  # fmt: skip

    async def generate(self, name: str, prompt: str = "", **options: Any) -> Any:
        self.asked.append({"prompt": prompt, **options})
        if self.refuses:
            raise RequestRejectedError(self.refuses)
        if options.get("prompt_only"):
            ids = options.get("input_ids") or [*map(ord, prompt or str(options.get("messages")))]
            said = {"ids": ids, "chat_template": self.template, "context_length": self.context}
            return SimpleNamespace(text=json.dumps(said))
        entries = [
            {"id": each, "token": "x", "logprob": self.level,
             "top": [{"id": each, "token": "x", "logprob": self.level}]}
            for each in options.get("input_ids", ())
        ]  # fmt: skip
        tokens = tuple(Logprob(9, "x", self.level) for _ in range(options["max_tokens"]))
        entries[0]["logprob"] = None
        return SimpleNamespace(extra={"prompt_logprobs": json.dumps(entries)}, logprobs=tokens)


def judged(client: Client, answer: LiveAnswer, explained: float = 0.1) -> FaultReport | None:
    return asyncio.run(live_answers.judge(client, "m", answer, explained))


def test_a_model_reads_the_answer_after_its_prompt_and_finds_nothing_of_it_kept() -> None:
    client = Client()
    for _ in range(2):
        assert judged(client, answer_of(-0.5, -0.52)) is None
    scores = [each for each in client.asked if "prompt_logprobs" in each]
    assert [each["input_ids"] for each in scores] == [[*PROMPT, 7, 8]] * 2
    salts = {each["cache_salt"] for each in scores}
    assert len(salts) == 2, "with the same salt, it would find its own pages"
    fault = judged(client, answer_of(-0.5, -2.0))
    assert fault is not None
    assert SECRET not in str(fault)


def test_no_word_of_a_user_is_in_what_a_program_prints_of_an_answer() -> None:
    said = repr(answer_of(-0.5))
    assert SECRET not in said
    assert "7" not in said


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda client: client.inputs.remove("prompt_logprobs"), "no log-probabilities"),
        (lambda client: client.inputs.remove("prompt_only"), "how it reads"),
        (lambda client: setattr(client, "context", len(PROMPT) + 1), "fills"),
    ],
)
def test_what_cannot_be_judged_says_why(change: Callable[[Client], Any], why: str) -> None:
    client = Client()
    change(client)
    with pytest.raises(UnjudgedError, match=why):
        judged(client, answer_of(-0.5))


def test_an_answer_of_an_adapter_is_judged_with_it() -> None:
    client, answer = Client(), answer_of(-0.5, -0.5)
    answer = replace(answer, asked={**answer.asked, "adapter": "sql"})
    assert judged(client, answer) is None
    again = live_answers.judge_again(client, "m", answer, 0.1)
    assert asyncio.run(again) is None
    assert len(client.asked) == 6
    assert {each.get("adapter") for each in client.asked} == {"sql"}
    client.refuses = "there is no adapter 'sql'"
    with pytest.raises(UnjudgedError, match="any more: there is no adapter"):
        judged(client, answer)


def test_an_adapter_that_was_replaced_is_no_fault_of_its_model(tmp_path: Path) -> None:
    model = repository.Model(tmp_path / "m")
    files = tmp_path / "m/1/adapters/sql"
    answer = answer_of(-0.5, age=3.0)
    now = time.time()
    assert live_answers.with_adapter_files(answer, model, now) is answer, "it has none"
    live_answers.check_adapter(answer, model)
    answer = replace(answer, asked={**answer.asked, "adapter": "sql"})
    assert live_answers.with_adapter_files(answer, model, now + 60) is None, "it has gone"
    files.mkdir(parents=True)
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        (files / name).write_text("one", encoding="utf-8")
    assert live_answers.with_adapter_files(answer, model, now) is None, "it came meanwhile"
    known = live_answers.with_adapter_files(answer, model, now + 60)
    assert known is not None
    live_answers.check_adapter(known, model)
    (files / "adapter_model.safetensors").write_text("other", encoding="utf-8")
    with pytest.raises(UnjudgedError, match="its adapter is another by now"):
        live_answers.check_adapter(known, model)
    up = replace(answer, asked={"adapter": "../adapters/sql"})
    assert live_answers.with_adapter_files(up, model, now + 60) is None


def test_a_prompt_that_is_another_one_by_now_judges_nothing() -> None:
    with pytest.raises(UnjudgedError, match="differently"):
        judged(Client(), replace(answer_of(-0.5), input_tokens=3))
    client = Client()
    client.template = "{{ strftime_now('%d') }}"
    chat = replace(answer_of(-0.5), asked={"messages": [{"role": "user", "content": "hi"}]})
    with pytest.raises(UnjudgedError, match="the day"):
        judged(client, chat)


def test_an_answer_that_fills_the_context_is_judged_as_far_as_it_can_be_read() -> None:
    client = Client()
    client.context = len(PROMPT) + 2
    assert judged(client, answer_of(-0.5, -9.0)) is None
    assert client.asked[-1]["input_ids"] == [*PROMPT, 7]


def test_what_is_explained_is_measured_on_the_known_answers() -> None:
    tokens = (Logprob(1, "x", -0.5), Logprob(2, "x", -0.7))
    known = KnownAnswers("fp", 0.1, "", (KnownAnswer("p", False, (5, 6), tokens),))
    assert asyncio.run(live_answers.measure(Client(), "m", known)) == pytest.approx(0.8)
    exact = asyncio.run(live_answers.measure(Client(-0.6), "m", known))
    assert exact == pytest.approx(0.4)
    with pytest.raises(UnjudgedError, match="by 8"):
        asyncio.run(live_answers.measure(Client(-9.0), "m", known))


def test_a_model_that_was_wrong_is_asked_the_same_anew() -> None:
    client = Client()
    again = live_answers.judge_again(client, "m", answer_of(-9.0, -9.0), 0.1)
    assert asyncio.run(again) is None
    assert [each["input_ids"] for each in client.asked if each.get("logprobs")] == [[*PROMPT]]


@pytest.mark.parametrize(
    "change",
    [
        {"ids": []},
        {"ids": None},
        {"logprobs": [0.1, 0.2]},
        {"model": None, "asked": 3},
        {"age": "x"},
    ],
)
def test_what_is_no_answer_is_refused(change: dict[str, Any]) -> None:
    content = answer_of(-0.5).to_json()
    assert LiveAnswer.from_json(json.loads(json.dumps(content))) == answer_of(-0.5)
    with pytest.raises(ValueError):
        LiveAnswer.from_json({**content, **change})
    with pytest.raises(ValueError, match="not an answer"):
        LiveAnswer.from_json({})


def test_the_control_socket_takes_an_answer_and_refuses_what_is_none(tmp_path: Path) -> None:
    offered: list[LiveAnswer] = []
    reconciler: Any = SimpleNamespace(
        judge=offered.append, reports=lambda: [ReplicaReport(State.READY)],
        is_on_demand=False, frontend_reports=tuple, with_demand=lambda model: model,
    )  # fmt: skip
    supervisor = Supervisor([ServerSettings(tmp_path)], [])
    supervisor._end = asyncio.Event()
    largest = replace(answer_of(*[-0.123456] * MOST_TOKENS), asked={"prompt": "x" * 8000})
    assert len(json.dumps(largest.to_json())) < MOST_BYTES

    async def tell(content: Any) -> None:
        async with listening(tmp_path / "sock", Socket(supervisor, reconciler).answer):
            await asyncio.to_thread(ask, tmp_path / "sock", {"do": "judge", "answer": content})

    asyncio.run(tell(largest.to_json()))
    assert offered == [largest]
    with pytest.raises(ServerError):
        asyncio.run(tell({"model": "m"}))
    assert offered == [largest]


# When they are judged

WRONG = FaultReport("log-probabilities", "another one", off_by=3.0, explained=0.5)


def guarded(
    check: Callable[[actions.CheckAnswer], Checked],
    replicas: int = 1,
    on_demand: OnDemand | None = None,
) -> World:
    world = World("m", replicas=replicas, on_demand=on_demand, loaded=("m",))
    world.check = check
    for memory in world.memory.tritons:
        memory.certifies = True
    world.run(30)
    return world


def offer(world: World, **changes: Any) -> None:
    answer = replace(answer_of(-0.5), **changes)
    world.memory.tritons[0].models["m"].certificate.offer(answer, world.now)


class Model:
    """Answers checks, and notes of what it was asked."""

    def __init__(self) -> None:
        self.asked: list[actions.CheckAnswer] = []
        self.wrong: Callable[[actions.CheckAnswer], bool] = lambda _: False
        self.unjudged = ""

    def __call__(self, asked: actions.CheckAnswer) -> Checked:
        self.asked.append(asked)
        fault = WRONG if self.wrong(asked) else None
        unjudged = self.unjudged if asked.live else ""
        return Checked("m", 0, 0.05, 4, None if unjudged else fault, unjudged=unjudged)

    @property
    def live(self) -> list[actions.CheckAnswer]:
        return [each for each in self.asked if each.live is not None]


def certificate(world: World) -> Any:
    return world.memory.tritons[0].models["m"].certificate


def test_a_users_answer_is_judged_once_and_forgotten() -> None:
    model = Model()
    world = guarded(model)
    before = len(model.asked)
    offer(world)
    offer(world)
    world.run(60)
    assert [each.anew for each in model.live] == [False, False]
    assert certificate(world).report().judged == 2
    assert certificate(world).live is None
    # The known answers are asked in their order, with the others between them.
    order = [each.number for each in model.asked[before:] if each.live is None]
    first = order[0]
    assert order == [(first + at) % 4 for at in range(len(order))]
    numbers = [each.number for each in model.asked]
    assert (-1, -1) not in itertools.pairwise(numbers)


def test_a_wrong_answer_to_a_user_is_a_fault_once_it_was_wrong_again() -> None:
    model = Model()
    model.wrong = lambda asked: asked.live is not None
    world = guarded(model)
    offer(world)
    world.run_until(lambda: world.reported)
    assert [each.anew for each in model.live] == [False, False]
    assert world.reported[0].fault == WRONG
    assert len(world.lines) == 1
    assert "a user's answer" in world.lines[0]
    world.run(60)
    assert len(world.reported) == 1, "its known answers come, and it is still wrong"
    assert model.live[-1].anew
    model.wrong = lambda _: False
    world.run_until(lambda: len(world.reported) == 2)
    assert world.reported[1].fault is None
    assert certificate(world).live is None


def test_one_that_is_right_the_second_time_is_no_fault() -> None:
    model = Model()
    model.wrong = lambda asked: asked.live is not None and len(model.live) == 1
    world = guarded(model)
    offer(world)
    world.run(60)
    assert len(model.live) == 2
    assert world.reported == []
    assert certificate(world).live is None


def test_what_cannot_be_judged_is_no_fault_and_no_problem_of_the_others() -> None:
    model = Model()
    model.unjudged = "it tells nothing"
    world = guarded(model)
    offer(world)
    world.run(120)
    report = certificate(world).report()
    assert (report.unjudged, report.judged, report.problem) == ("it tells nothing", 0, "")
    assert len(model.live) == 1
    assert report.checks > 10
    assert world.reported == []


def test_few_are_kept_and_not_for_long() -> None:
    model = Model()
    world = guarded(model)
    busy = world.tritons[0].of("m")
    for _ in range(MOST_WAITING + 3):
        offer(world)
    assert len(certificate(world)._waiting) == MOST_WAITING
    until = world.now + KEPT + 30
    while world.now < until:
        busy.seconds += 0.2
        world.step()
    world.run(120)
    assert len(model.live) <= 1, "one was judged when the model was never idle"
    assert not certificate(world)._waiting


def test_a_model_that_is_never_idle_judges_some() -> None:
    model = Model()
    world = guarded(model)
    busy, until = world.tritons[0].of("m"), world.now + 4 * KEPT
    while world.now < until:
        offer(world)
        busy.seconds += 0.2
        world.step()
    assert len(model.live) >= 1


def test_a_model_that_is_not_loaded_keeps_nothing_for_long() -> None:
    world = guarded(Model(), on_demand=OnDemand())
    offer(world)
    kept = certificate(world)
    world.order("unload", "m")
    world.run(5)
    assert world.states() == {"m": "unloaded"}
    assert kept._waiting
    world.run(KEPT + 5)
    assert not kept._waiting


def test_a_wrong_one_is_not_kept_for_long_either() -> None:
    model = Model()
    model.wrong = lambda asked: asked.live is not None or asked.number == 2
    world = guarded(model)
    world.run_until(lambda: world.reported)
    offer(world)
    assert not certificate(world)._waiting, "it is known to be wrong"
    model.wrong = lambda asked: asked.live is not None
    world.run_until(lambda: len(world.reported) == 2)
    offer(world)
    world.run_until(lambda: len(world.reported) == 3)
    world.run(KEPT + 60)
    assert certificate(world).live is None
    assert len(world.reported) == 4, "its known answers are all that is left to judge it by"


def test_an_answer_of_an_earlier_load_is_not_judged() -> None:
    model = Model()
    world = guarded(model)
    offer(world, age=40.0)
    assert not certificate(world)._waiting, "it was asked for before this load was seen"
    offer(world)
    certificate(world).look(world.now, 0.0, 1)
    assert not certificate(world)._waiting
