"""The number of threads follows what other programs leave: when, and that nothing else changes."""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import openvino
import pytest
from hypothesis import given
from hypothesis import strategies as st

import llmserve
from llmserve.runtime import Engine
from llmserve.testing import ByteTokenizer, fake
from llmserve_openvino.compiled import THREADS
from llmserve_openvino.engine import OpenVinoGenerator
from llmserve_openvino.runner import make_runner
from llmserve_openvino.threads import CoreUse, ThreadChoice, core_use
from llmserve_openvino.workarounds import read_model

PERIOD = 5.0
FLOAT32 = {"INFERENCE_PRECISION_HINT": "f32", "KV_CACHE_PRECISION": "f32"}
# In a period of a second: what this process used, what its threads waited, what others used.
Load = tuple[float, float, float]
IDLE, BESIDE_TWO, BESIDE_ONE = (1.9, 0.0, 0.1), (1.0, 1.0, 1.0), (1.33, 0.6, 0.67)
ONE_BESIDE_TWO, ONE_BESIDE_ONE, ONE_ALONE = (0.67, 0.3, 1.33), (0.99, 0.0, 1.0), (0.99, 0.0, 0.02)
UNASKED = (0.01, 0.0, 1.9)


class Machine:
    """Time that passes in periods, and what is used in each."""

    def __init__(self) -> None:
        self.use = CoreUse(0, 0, 0, 0)

    def pass_period(self, load: Load) -> None:
        own, waited, others = (PERIOD * part for part in load)
        use = self.use
        self.use = CoreUse(
            use.at + PERIOD, use.own + own, use.waited + waited, use.everyone + own + others
        )

    def choice(self, threads: int, cores: int = 2) -> ThreadChoice:
        choice = ThreadChoice(threads, cores, lambda: self.use, lambda: self.use.at)
        choice.wanted()
        return choice

    def follow(self, choice: ThreadChoice, loads: Iterable[Load]) -> list[int]:
        """Return how many threads there are after each period."""
        numbers = []
        for load in loads:
            self.pass_period(load)
            choice.threads = choice.wanted()
            numbers.append(choice.threads)
        return numbers


def test_threads_wait_for_other_programs_to_stay_before_they_leave_them_a_core() -> None:
    machine = Machine()
    choice = machine.choice(2)
    assert machine.follow(choice, [IDLE] * 50) == [2] * 50
    assert machine.follow(choice, [BESIDE_TWO, BESIDE_TWO, IDLE, BESIDE_TWO]) == [2] * 4
    assert machine.follow(choice, [BESIDE_TWO] * 3) == [2, 1, 1]
    assert machine.follow(choice, [ONE_BESIDE_TWO, ONE_BESIDE_ONE] * 20) == [1] * 40
    assert machine.follow(choice, [ONE_ALONE] * 6) == [1, 1, 1, 1, 1, 2]


def test_one_other_program_gets_a_core() -> None:
    machine = Machine()
    choice = machine.choice(2)
    assert machine.follow(choice, [BESIDE_ONE] * 3 + [ONE_BESIDE_ONE] * 20)[2:] == [1] * 21


def test_what_is_used_while_nothing_is_asked_counts_for_nothing() -> None:
    machine = Machine()
    choice = machine.choice(2)
    assert machine.follow(choice, [UNASKED] * 50) == [2] * 50
    # Nor does what was used while nobody looked for long.
    assert machine.follow(choice, [BESIDE_TWO, BESIDE_TWO]) == [2, 2]
    for _ in range(10):
        machine.pass_period(BESIDE_TWO)
    assert machine.follow(choice, [IDLE]) == [2]


def test_a_number_that_does_not_last_is_tried_ever_less_often() -> None:
    """More threads, each time they are there, find the cores taken."""
    machine = Machine()
    choice = machine.choice(2)
    numbers = []
    for _ in range(2000):
        load = ONE_ALONE if choice.threads == 1 else BESIDE_TWO
        numbers += machine.follow(choice, [load])
    changes = sum(one != other for one, other in itertools.pairwise(numbers))
    assert 2 < changes < 24
    assert sum(number == 2 for number in numbers[500:]) < 50


def test_as_many_threads_stay_as_there_are_free_cores() -> None:
    machine = Machine()
    choice = machine.choice(16, cores=16)
    assert machine.follow(choice, [(15.0, 0.0, 1.0)] * 9) == [16] * 9
    assert machine.follow(choice, [(11.0, 5.0, 5.0)] * 3)[-1] == 11
    assert machine.follow(choice, [(11.0, 0.0, 4.4)] * 20) == [11] * 20
    assert machine.follow(choice, [(11.0, 0.0, 0.5)] * 6)[-1] == 16


LOADS = st.tuples(st.floats(0, 64), st.floats(0, 64), st.floats(0, 64))


@given(st.integers(1, 64), st.integers(1, 64), st.lists(LOADS, max_size=60))
def test_whatever_is_used_there_is_a_thread_and_none_too_many(
    threads: int, cores: int, loads: list[Load]
) -> None:
    machine = Machine()
    numbers = machine.follow(machine.choice(threads, cores), loads)
    assert all(1 <= number <= threads for number in numbers)


def test_what_is_used_is_that_of_this_machine() -> None:
    before = core_use()
    until = time.process_time() + 0.2
    while time.process_time() < until:
        pass
    after = core_use()
    assert before is not None
    assert after is not None
    assert after.own - before.own >= 0.2
    assert after.at > before.at
    # Others may compute as well; the system counts in hundredths of a second, on all cores.
    assert after.everyone - before.everyone >= 0.1
    assert after.waited >= before.waited


def test_a_system_that_does_not_tell_leaves_the_threads_alone(tmp_path: Path) -> None:
    assert core_use(tmp_path) is None
    choice = ThreadChoice(2, 2, lambda: None, itertools.count(0.0, PERIOD).__next__)
    assert [choice.wanted() for _ in range(20)] == [2] * 20


class Asked:
    """Asks for a number of threads of a runner, or for another after so many passes."""

    def __init__(self, threads: int, numbers: Iterator[int]) -> None:
        self.threads, self._numbers = threads, numbers

    def wanted(self) -> int:
        return next(self._numbers, self.threads)


def generator(source: Path, output: Path, **options: Any) -> OpenVinoGenerator:
    built = llmserve.build("openvino", str(source), output=output, dtype="float32", **options)
    settings = {**built.manifest.components["generator"]["settings"], "threads": 0}
    return OpenVinoGenerator(settings, built.folder / "1")


def texts(engine: Engine, between: Callable[[], None] = lambda: None) -> list[list[int]]:
    requests = [
        fake.generation([40 + n, 50, 60], 40, decode=lambda ids: "x" * len(ids)) for n in range(3)
    ]
    for request in requests:
        engine.admit(request)
    while engine.busy:
        assert not engine.step().failed
        between()
    return [request.token_ids for request in requests]


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="there is one core")
def test_answers_go_on_while_the_number_of_threads_changes(
    converted: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("LLMSERVE_THREADS", raising=False)
    engine = generator(converted, tmp_path / "models").stepper(ByteTokenizer())
    runner: Any = engine._runner
    expected = texts(engine)
    most = runner._compiled.threads
    assert runner._choice.threads == most > 1
    runner._choice = Asked(most, itertools.chain([most] * 3, itertools.repeat(1)))
    seen = []

    def wait() -> None:
        # In this test, the change comes within a few steps.
        if runner._coming is not None:
            runner._coming.result(60)
        seen.append(runner._compiled.threads)

    assert texts(engine, wait) == expected
    assert seen[0] == most
    assert seen[-1] == runner._choice.threads == 1
    assert sorted(seen, reverse=True) == seen
    assert texts(engine) == expected


def test_a_model_that_cannot_be_compiled_again_stays(
    converted: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    engine = generator(converted, tmp_path / "models").stepper(ByteTokenizer())
    runner: Any = engine._runner
    expected = texts(engine)

    def wait() -> None:
        if runner._coming is not None:
            runner._coming.exception(60)

    # There may be no memory now, and some later.
    runner._choice = Asked(2, itertools.repeat(1))
    with monkeypatch.context() as patch:
        patch.setattr("llmserve_openvino.runner.memory", type("Nothing", (), {"free": 0.0}))
        assert texts(engine, wait) == expected
    assert runner._choice.threads == 2
    assert caplog.text.count("there is no memory to change that now") == 1
    assert texts(engine, wait) == expected
    assert runner._choice.threads == runner._compiled.threads == 1
    runner._choice = Asked(1, itertools.repeat(2))
    monkeypatch.setattr(runner, "_compile", lambda _: 1 / 0)
    assert texts(engine, wait) == expected
    assert runner._choice is None
    assert runner._compiled.threads == 1


@pytest.mark.parametrize("options", [{"threads": 1}, {"exact_batches": True}], ids=str)
def test_a_number_that_was_chosen_stays(
    converted: Path, tmp_path: Path, options: dict[str, Any]
) -> None:
    built = llmserve.build("openvino", str(converted), output=tmp_path, dtype="float32", **options)
    settings = built.manifest.components["generator"]["settings"]
    runner: Any = OpenVinoGenerator(settings, built.folder / "1")._runner
    assert runner._choice is None


def test_what_a_build_compares_is_compiled_once(converted: Path) -> None:
    graph = read_model(str(converted / "openvino_model.xml"))
    runner: Any = make_runner(graph, {}, cache_tokens=64)
    assert runner._choice is None


@pytest.mark.parametrize("exact", [False, True])
def test_pages_of_another_number_of_threads_are_not_those_of_an_exact_model(
    converted: Path, exact: bool
) -> None:
    graph = read_model(str(converted / "openvino_model.xml"))
    one, two = (
        make_runner(graph, {THREADS: number, **FLOAT32}, cache_tokens=96, exact=exact).page_form
        for number in (1, 2)
    )
    assert (one == two) is not exact


def test_openvino_keeps_the_number_of_threads_of_a_compiled_model() -> None:
    """Otherwise it need not be compiled again."""
    ops = openvino.opset13
    ids = ops.parameter([-1], openvino.Type.f32)
    model = openvino.Core().compile_model(
        openvino.Model([ops.relu(ids)], [ids]), "CPU", {"INFERENCE_NUM_THREADS": 1}
    )
    with pytest.raises(RuntimeError):
        model.set_property({"INFERENCE_NUM_THREADS": 2})
