"""Models that are asked their known answers again, by engines whose scores are noisy."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import pytest

from llmserve.contract.report import FaultReport
from llmserve.server.keep import actions
from llmserve.server.keep.answer_checks import check_answers
from llmserve.server.keep.certificate import INTERVAL, OVERDUE, SHARE
from llmserve.server.keep.known_answers import PROMPTS, KnownAnswer, KnownAnswers, compare
from llmserve.server.keep.picture import Checked, ModelPicture, TritonPicture
from tests.unit.server.noisy_engine import NOISE, Engine, known_of
from tests.unit.server.simulated import World


def guarded(
    known: KnownAnswers, answer: Callable[[str], KnownAnswer], *, replicas: int = 1
) -> World:
    """Return a `serve` of one model whose answers are checked."""
    world = World("m", replicas=replicas)

    def check(asked: actions.CheckAnswer) -> Checked:
        then = known.answers[asked.number]
        fault = compare(then, answer(then.prompt), known.explained)
        return Checked("m", 0, 0.05, len(known.answers), fault)

    world.check = check
    for memory in world.memory.tritons:
        memory.certifies = True
    return world


def checks(world: World) -> int:
    return world.memory.tritons[0].models["m"].certificate.checks


@pytest.mark.parametrize("precision", NOISE)
def test_rounding_is_no_alarm_in_a_day(precision: str) -> None:
    """24 hours of a fake clock: each engine takes other tokens now and then, and that is a tie."""
    engine = Engine(NOISE[precision])
    known, others = known_of(engine, precision), 0

    def answer(prompt: str) -> KnownAnswer:
        nonlocal others
        found = engine.answer(prompt)
        then = next(each for each in known.answers if each.prompt == prompt)
        others += [t.token for t in found.tokens] != [t.token for t in then.tokens]
        return found

    world = guarded(known, answer)
    while world.now < 1000.0 + 24 * 3600:
        world.step(2.0)
    assert checks(world) > 10_000
    assert others > 1000, "no answer has parted, so that nothing was shown"
    assert world.memory.tritons[0].models["m"].certificate.faults == 0
    assert world.reported == []
    assert world.lines == []


def again(engine: Engine) -> Callable[[str], KnownAnswer]:
    """Return the last answer instead of the one that was asked for."""
    last = engine.answer(PROMPTS[-1])

    def answer(prompt: str) -> KnownAnswer:
        nonlocal last
        stale, last = last, engine.answer(prompt)
        return replace(last, tokens=stale.tokens)

    return answer


def stuck(engine: Engine) -> Callable[[str], KnownAnswer]:
    """KnownAnswer one of the prompts from a page of the cache that belongs to another."""

    def answer(prompt: str) -> KnownAnswer:
        found = engine.answer(prompt)
        read = PROMPTS[0] if prompt == PROMPTS[1] else prompt
        return replace(found, tokens=engine.answer(read).tokens)

    return answer


def nothing(engine: Engine) -> Callable[[str], KnownAnswer]:
    return lambda prompt: replace(engine.answer(prompt), tokens=())


def other_ids(engine: Engine) -> Callable[[str], KnownAnswer]:
    def answer(prompt: str) -> KnownAnswer:
        found = engine.answer(prompt)
        return replace(found, ids=(1, *found.ids))

    return answer


def not_numbers(engine: Engine) -> Callable[[str], KnownAnswer]:
    def answer(prompt: str) -> KnownAnswer:
        found = engine.answer(prompt)
        tokens = [replace(each, logprob=math.nan) for each in found.tokens]
        return replace(found, tokens=tuple(tokens))

    return answer


FAULTS: dict[str, Callable[[Engine], Callable[[str], KnownAnswer]]] = {
    "other weights": lambda engine: replace(engine, weights=2).answer,
    "the last answer again": again,
    "a stuck page": stuck,
    "no answer": nothing,
    "another tokenizer": other_ids,
    "no numbers": not_numbers,
}


@pytest.mark.parametrize("precision", NOISE)
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_found_and_ends_by_the_same_test(fault: str, precision: str) -> None:
    engine = Engine(NOISE[precision])
    known = known_of(engine, precision)
    answers: dict[str, Callable[[str], KnownAnswer]] = {"now": engine.answer}
    world = guarded(known, lambda prompt: answers["now"](prompt))
    world.run(120)
    assert world.reported == []

    answers["now"] = FAULTS[fault](engine)
    world.run_until(lambda: world.reported)
    found = world.reported[0].fault
    assert found is not None
    assert found.prompt in PROMPTS
    assert world.lines == [f"m: its answers are wrong ({found.in_words()})"]
    model = world.memory.tritons[0].models["m"]
    assert model.report().state.answers, "users may still be answered"

    answers["now"] = engine.answer
    took = world.run_until(lambda: len(world.reported) == 2)
    assert world.reported[1].fault is None
    assert took >= len(PROMPTS), "all of them must have come again"
    assert world.lines[-1] == "m: its answers are right again"


def test_a_fault_is_found_within_a_round_of_questions() -> None:
    engine = Engine(NOISE["int8"])
    world = guarded(known_of(engine, "int8"), stuck(engine))
    assert world.run_until(lambda: world.reported) <= (INTERVAL + 2) * len(PROMPTS) + 3


def test_one_wrong_answer_alone_is_no_fault() -> None:
    engine = Engine(NOISE["float32"])
    known = known_of(engine, "float32")
    number = 0

    def answer(prompt: str) -> KnownAnswer:
        nonlocal number
        number += 1
        return replace(engine, weights=2 if number == 3 else 1).answer(prompt)

    world = guarded(known, answer)
    world.run(600)
    assert number > 50
    assert world.reported == []


def test_a_slow_model_is_asked_for_a_hundredth_of_the_time() -> None:
    world = World("m")
    world.memory.tritons[0].certifies = True
    asked = []

    def check(_: actions.CheckAnswer) -> Checked:
        asked.append(world.now)
        return Checked("m", 0, 4.0, 3)

    world.check = check
    world.run(4000)
    assert len(asked) == pytest.approx(4000 * SHARE / 4.0, abs=1)


def test_a_model_is_asked_while_it_is_idle_and_once_if_it_never_is() -> None:
    engine = Engine(0.0)
    world = guarded(known_of(engine, "float32"), engine.answer)
    model = world.tritons[0].of("m")

    def work(seconds: float) -> None:
        until = world.now + seconds
        while world.now < until:
            model.seconds += 0.2
            world.step()

    work(OVERDUE - 10)
    assert checks(world) == 0
    work(30)
    assert checks(world) == 1
    work(60)
    assert checks(world) == 1
    world.run(30)
    assert checks(world) > 3


def test_a_model_in_a_container_is_asked_as_one_that_is_never_idle() -> None:
    memory = guarded(known_of(Engine(0.0), "float32"), Engine(0.0).answer).memory.tritons[0]
    seen = TritonPicture({"m": ModelPicture()}, is_hidden=True)
    asked = [now for now in range(1000, 2000) if check_answers(memory, seen, float(now))]
    assert asked == [1000 + OVERDUE]


def test_a_replica_with_a_fault_is_told_from_the_others() -> None:
    engine = Engine(0.0)
    known = known_of(engine, "float32")
    world = guarded(known, engine.answer, replicas=2)

    def check(asked: actions.CheckAnswer) -> Checked:
        wrong = FaultReport("answer", "another", "p") if asked.triton == 1 else None
        return Checked("m", 0, 0.05, 4, wrong)

    world.check = check
    world.run(60)
    one, other = (each.models["m"].certificate for each in world.memory.tritons)
    assert one.fault is None
    assert other.fault is not None
    assert [each.triton for each in world.reported] == [1]


def test_what_cannot_be_asked_is_no_fault() -> None:
    world = World("m")
    world.memory.tritons[0].certifies = True
    world.check = lambda _: Checked("m", 0, 0.1, 0, problem="it tells no log-probabilities")
    world.run(300)
    certificate = world.memory.tritons[0].models["m"].certificate
    assert certificate.report().problem == "it tells no log-probabilities"
    assert world.reported == []


def test_a_model_that_is_loaded_again_is_asked_at_once_from_the_first_answer_on() -> None:
    engine = Engine(0.0)
    world = guarded(known_of(engine, "float32"), engine.answer)
    world.run(12)
    triton, memory = world.tritons[0], world.memory.tritons[0]
    numbers = []
    triton.of("m").all_loads += 1
    for _ in range(12):
        actions_ = check_answers(memory, triton.picture(world.now), world.now)
        numbers += [each.number for each in actions_ if isinstance(each, actions.CheckAnswer)]
        world.now += 0.25
    assert numbers == [0]
