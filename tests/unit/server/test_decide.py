"""What is decided: pictures in, actions out, without any Triton."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmserve.contract.report import State
from llmserve.server.keep import actions
from llmserve.server.keep.actions import (
    Action,
    Kill,
    Load,
    Start,
    StartFrontend,
    Stop,
    StopTrying,
)
from llmserve.server.keep.decide import decide
from llmserve.server.keep.desired import Desired, OnDemand
from llmserve.server.keep.memory import FrontendMemory, Memory, TritonMemory
from llmserve.server.keep.picture import (
    Canary,
    FrontendPicture,
    Heard,
    ModelPicture,
    Picture,
    StartPicture,
    TritonPicture,
)
from llmserve.server.run.ends import End
from tests.unit.server.simulated import World

KILLED = End(signal=9)


def one_triton(*names: str, state: State = State.READY, served: bool = True) -> TritonMemory:
    memory = TritonMemory(0)
    for name in names:
        memory.add(name, state, 0.0).served = served
    return memory


def decided(memory: TritonMemory, seen: TritonPicture, now: float = 1.0) -> list[Action]:
    everything = decide(Desired(), Picture(now, (seen,)), Memory([memory]))
    return [action for action in everything if not isinstance(action, actions.Tell)]


# One picture


@pytest.mark.parametrize(
    ("seen", "state", "why", "expected"),
    [
        (ModelPicture(), State.READY, "", []),
        (ModelPicture(died=KILLED), State.RESTARTING, "its process has died: killed by SIGKILL",
         []),
        (ModelPicture(is_stopped=True), State.RESTARTING, "its process is stopped, by a signal",
         [Kill(0, "a")]),
        # The process that loads may be another one than that which answers meanwhile.
        (ModelPicture(is_stopped=True, is_loading=True), State.READY, "", []),
        (ModelPicture(given_up=frozenset({7})), State.READY, "",
         [Kill(0, "a", frozenset({7}), is_death=True)]),
    ],
    ids=["well", "died", "stopped", "stopped while another loads", "given up"],
)  # fmt: skip
def test_what_is_seen_of_a_model_that_answers(
    seen: ModelPicture, state: State, why: str, expected: list[Action]
) -> None:
    memory = one_triton("a")
    assert decided(memory, TritonPicture({"a": seen})) == expected
    assert (memory.models["a"].state, memory.models["a"].why) == (state, why)


@pytest.mark.parametrize(
    ("seen", "served", "state", "expected"),
    [
        (ModelPicture(is_loaded=True), False, State.READY, []),
        (ModelPicture(failure="RuntimeError: busy"), True, State.RESTARTING,
         [StopTrying(0, "a", loaded_before=True)]),
        (ModelPicture(failure="ImportError: no acme", is_hopeless=True), True, State.FAILED,
         [StopTrying(0, "a", loaded_before=True)]),
        (ModelPicture(failure="RuntimeError: busy"), False, State.FAILED,
         [StopTrying(0, "a", loaded_before=False)]),
        (ModelPicture(not_asked="no config.pbtxt"), False, State.FAILED, []),
        (ModelPicture(not_asked="no config.pbtxt"), True, State.RESTARTING, []),
        (ModelPicture(is_loading=True), False, State.LOADING, []),
    ],
    ids=["loaded", "may succeed", "hopeless", "failed at first", "cannot be asked",
         "cannot be asked for a moment", "loads"],
)  # fmt: skip
def test_what_is_seen_of_a_model_that_loads(
    seen: ModelPicture, served: bool, state: State, expected: list[Action]
) -> None:
    memory = one_triton("a", state=State.LOADING, served=served)
    assert decided(memory, TritonPicture({"a": seen})) == expected
    assert memory.models["a"].state is state


@pytest.mark.parametrize(("served", "state"), [(True, State.RESTARTING), (False, State.READY)])
def test_a_triton_that_does_not_begin_to_load_is_restarted_for_a_model_that_it_had(
    served: bool, state: State
) -> None:
    memory = one_triton("a", state=State.LOADING, served=served)
    decided(memory, TritonPicture(), now=20.0)
    assert memory.triton.state is state
    assert memory.models["a"].state is (State.RESTARTING if served else State.FAILED)


def test_a_model_that_waits_for_another_to_load_is_not_taken_for_stuck() -> None:
    """Triton loads one after the other, and begins with the next only at its next look."""
    memory = one_triton("a", "b")
    memory.models["b"].state, memory.models["b"].served = State.LOADING, False
    assert decided(memory, TritonPicture({"a": ModelPicture(is_loading=True)}), 20.0) == []
    assert decided(memory, TritonPicture(), 20.5) == []
    # It must not be loaded later, when nobody expects it.
    assert decided(memory, TritonPicture(), 37.0) == [StopTrying(0, "b", loaded_before=False)]


@pytest.mark.parametrize("served", [False, True])
def test_a_process_that_goes_on_after_an_error_is_ended_if_it_serves_nothing(
    served: bool,
) -> None:
    """Triton would load nothing else meanwhile; of a model that was loaded, another may answer."""
    memory = one_triton("a", state=State.LOADING, served=served)
    seen = TritonPicture({"a": ModelPicture(raised="no weights", is_loading=True)})
    last = [] if served else [Kill(0, "a")]
    assert [decided(memory, seen, now) for now in (1.0, 2.0, 5.0)] == [[], [], last]


def test_a_triton_that_waits_for_a_process_that_died_while_loading_is_restarted() -> None:
    memory = one_triton("a", "b")
    memory.models["a"].state = State.LOADING
    loading = ModelPicture(is_loading=True)
    decided(memory, TritonPicture({"a": replace(loading, died=KILLED)}), 1.0)
    assert memory.triton.alive, "Triton may report it itself"
    assert decided(memory, TritonPicture({"a": loading}), 5.0) == [Start(0, ("a", "b"))]
    assert memory.models["b"].why == "Triton waits for a"


@pytest.mark.parametrize(
    ("seen", "why"),
    [
        (TritonPicture(ended="exit code 1"), "Triton ended: exit code 1"),
        (TritonPicture(is_stopped=True), "Triton is stopped, by a signal"),
    ],
)
def test_a_triton_that_has_ended_or_hangs_is_started_again_with_its_models(
    seen: TritonPicture, why: str
) -> None:
    memory = one_triton("a", "b")
    memory.models["b"].failed(0.0, "no weights")
    assert decided(memory, seen, 1.0) == []
    assert (memory.triton.why, memory.models["a"].code) == (why, "model_died")
    assert decided(memory, seen, 1.6) == [Start(0, ("a",))]
    assert decided(memory, TritonPicture(is_busy=True), 2.0) == []
    assert decided(memory, TritonPicture(start=StartPicture()), 3.0) == []
    assert (memory.triton.state, memory.models["a"].state) == (State.READY, State.READY)
    assert memory.models["b"].state is State.FAILED


def test_a_triton_that_was_started_again_and_cannot_load_any_more_is_restarted_for_a_model() -> (
    None
):
    """As after one of its models was built anew, as an engine of several processes."""
    memory = one_triton("a", "b")
    decided(memory, TritonPicture(ended="exit code 1"), 1.0)
    decided(memory, TritonPicture(ended="exit code 1"), 2.0)
    decided(memory, TritonPicture(start=StartPicture(is_renewable=False)), 3.0)
    decided(memory, TritonPicture({"a": ModelPicture(died=KILLED)}), 4.0)
    assert decided(memory, TritonPicture(), 5.0) == []
    assert decided(memory, TritonPicture(), 6.0) == [Start(0, ("a", "b"))]


def test_a_triton_that_cannot_be_started_stays_down_and_ended() -> None:
    memory, now, done = one_triton("a"), 0.0, list[Action]()
    while not memory.stays_down:
        now += 0.25
        seen = TritonPicture(ended="exit code 1")
        if memory.starting:
            seen = replace(seen, start=StartPicture("no GPU"))
        done += decided(memory, seen, now)
    assert done == [Start(0, ("a",))] * 4 + [Stop(0)]
    assert decided(memory, seen, now + 1) == []
    assert memory.why_it_failed() == {"triton: no GPU"}
    model = memory.models["a"]
    assert (model.state, model.why) == (State.FAILED, "no GPU"), "it is restarted no more either"


@pytest.mark.parametrize(("misses", "state"), [(1, State.SUSPECT), (2, State.RESTARTING)])
def test_a_model_that_misses_two_canaries_is_ended_with_its_parts(
    misses: int, state: State
) -> None:
    memory = one_triton("p", "a")
    memory.models["a"].parts = ("p",)
    missed = TritonPicture(canaries=(Canary(Heard.MISSED, "a", "no answer", 0),))
    for now in range(misses):
        done = decided(memory, missed, float(now))
    assert memory.models["a"].state is state
    assert done == ([Kill(0, "p"), Kill(0, "a")] if misses == 2 else [])


def test_what_a_canary_heard_of_a_process_that_was_replaced_ends_no_other() -> None:
    memory = one_triton("a")
    for heard in (Heard.MISSED, Heard.MISSED, Heard.DIED):
        canary = Canary(heard, "a", "no answer", load_number=1)
        decided(memory, TritonPicture({"a": ModelPicture(load_number=2)}, canaries=(canary,)))
    assert memory.models["a"].state is State.READY


def test_a_missing_folder_is_reported_after_the_time_that_a_build_takes() -> None:
    memory = one_triton("a")
    for now in (0.0, 1.0, 3.0):
        decided(memory, TritonPicture({"a": ModelPicture(has_folder=False)}), now)
        assert bool(memory.models["a"].note) is (now == 3.0)
    decided(memory, TritonPicture({"a": ModelPicture()}), 4.0)
    assert memory.models["a"].note == ""


def test_a_frontend_is_started_again_as_often_as_it_ends() -> None:
    frontend = FrontendMemory("openai", state=State.READY)
    memory, starts, now = Memory([], [frontend]), 0, 0.0
    for _ in range(2000):
        now += 0.5
        seen = FrontendPicture(ended="exit code 1")
        if frontend.is_starting:
            seen = FrontendPicture(start=StartPicture())
        done = decide(Desired(), Picture(now, (), (seen,)), memory)
        starts += StartFrontend(0) in done
    assert 15 < starts < 40, "once a minute at last"


def test_a_triton_that_waits_for_a_dead_process_on_demand_is_restarted_when_others_are_done() -> (
    None
):
    """What is loaded on demand fails alone; whoever uses the others is answered first."""
    world = World("a", "b", on_demand=OnDemand())
    used = world.hold("b")
    world.run_until(lambda: used in world.outcomes)
    hold = world.hold("a")
    world.run_until(lambda: world.tritons[0].of("a").loads_at)
    world.tritons[0].of("a").loads_at = float("inf")
    world.tritons[0].of("a").died = End(code=1)
    world.run_until(lambda: hold in world.outcomes)
    assert "its process died while it was loading: exit code 1" in world.outcomes[hold]
    assert world.states() == {"a": "failed", "b": "ready"}
    assert used.going, "requests that come now wait"
    world.release(used)
    world.run_until(lambda: world.tritons[0].started_with == [("b",)], 5)


def test_a_model_that_takes_too_long_costs_a_restart_at_last() -> None:
    """Triton waits for a process that has ended."""
    world = World("a", "b", on_demand=OnDemand())
    world.reports_ends = False
    world.memory.tritons[0].ready_timeout = 30.0
    used = world.hold("b")
    world.run_until(lambda: used in world.outcomes)
    world.hanging.add("a")
    hold = world.hold("a")
    world.run_until(lambda: hold in world.outcomes)
    assert "it was not loaded within 30 s" in world.outcomes[hold]
    assert world.tritons[0].started_with == [], "the others answer first"
    world.run_until(lambda: world.tritons[0].started_with == [("b",)], 70)


# Loads that never end


@pytest.mark.parametrize("reported", [True, False])
def test_a_reload_that_hangs_is_ended_and_the_others_answer(reported: bool) -> None:
    world = World("a", "b")
    world.memory.tritons[0].ready_timeout = 90.0
    world.hanging.add("a")
    world.reports_ends = reported
    (answers,) = world.tritons[0].of("a").processes
    order = world.order("reload", "a")
    assert 85 < world.run_until(lambda: order in world.outcomes) < 100
    assert "'a' failed to load: it was not loaded within 90 s" in world.outcomes[order]
    assert world.killed() == ["a"]
    world.run(30)
    if reported:
        assert world.tritons[0].of("a").processes == {answers}, "only what loads is ended"
        assert world.states() == {"a": "ready", "b": "ready"}
        assert world.tritons[0].started_with == []
    else:
        assert world.states() == {"a": "failed", "b": "ready"}, "it would hang again"
        assert world.tritons[0].started_with == [("b",)]
    stopped = [each for each in world.done if isinstance(each, StopTrying)]
    assert stopped == [StopTrying(0, "a", loaded_before=True)], "once, or it is loaded again"


@pytest.mark.parametrize("on_demand", [True, False])
def test_a_new_model_whose_load_hangs_fails_alone(on_demand: bool) -> None:
    world = World("a", "b", on_demand=OnDemand() if on_demand else None, loaded=("a",), b=("p",))
    world.memory.tritons[0].ready_timeout = 90.0
    world.hanging.add("b")
    asked = world.hold("b") if on_demand else world.order("reload", "b")
    world.run_until(lambda: asked in world.outcomes)
    assert "it was not loaded within 90 s" in world.outcomes[asked]
    world.run(30)
    assert world.tritons[0].started_with == []
    assert (world.states(), world.serving()) == ({"a": "ready", "b": "failed"}, {"a"})


def test_a_model_whose_load_hangs_after_it_has_died_fails_and_nothing_else_waits() -> None:
    world = World("a", "b")
    world.memory.tritons[0].ready_timeout = 90.0
    world.hanging.add("a")
    world.tritons[0].kill("a")
    world.run_until(lambda: world.states()["a"] == "failed")
    assert world.memory.tritons[0].models["a"].why == "it was not loaded within 90 s"
    assert world.outcome(world.order("reload", "b")) == ""
    assert world.tritons[0].started_with == []
    world.hanging.clear()
    assert world.outcome(world.order("reload", "a")) == ""
    assert world.serving() == {"a", "b"}


def test_a_load_in_triton_itself_that_hangs_costs_a_restart_without_it() -> None:
    """There is no process that could be ended alone."""
    world = World("a", "b")
    world.memory.tritons[0].ready_timeout = 90.0
    world.graphs.add("a")
    world.tritons[0].of("a").processes = set()
    world.hanging.add("a")
    assert "it was not loaded within 90 s" in world.outcome(world.order("reload", "a"))
    world.run(30)
    assert world.tritons[0].started_with == [("b",)]
    assert world.states() == {"a": "failed", "b": "ready"}


def test_a_load_is_late_by_when_it_began_and_not_by_when_it_was_asked_for() -> None:
    """Triton loads one after the other."""
    memory = one_triton("a", "b", state=State.LOADING)
    memory.ready_timeout = 90.0
    loads = ModelPicture(is_loading=True)
    assert decided(memory, TritonPicture({"a": loads}), 1.0) == []
    assert decided(memory, TritonPicture({"a": loads}), 92.0) == [
        Kill(0, "a"), StopTrying(0, "a", loaded_before=True)
    ]  # fmt: skip
    failed = ModelPicture(failure="it ended")
    assert decided(memory, TritonPicture({"a": failed, "b": loads}), 93.0) == []
    assert decided(memory, TritonPicture({"a": failed, "b": loads}), 180.0) == []
    assert memory.models["b"].state is State.LOADING


# What goes on for a while


def test_a_model_that_dies_is_loaded_again_beside_the_others() -> None:
    world = World("a", "b")
    world.tritons[0].kill("a")
    assert world.run_until(lambda: world.states() == {"a": "restarting", "b": "ready"}) < 1
    assert world.run_until(lambda: world.states() == {"a": "ready", "b": "ready"}) < 4
    assert [each for each in world.done if isinstance(each, Load)] == [Load(0, ("a",))]
    assert world.lines[0] == "a: restarting (its process has died: killed by SIGKILL)"
    assert world.lines[-1] == "a: ready"


def test_a_part_that_dies_is_loaded_again_alone() -> None:
    world = World("a", a=("p",))
    world.tritons[0].kill("p")
    world.run_until(lambda: world.states() == {"p": "ready", "a": "ready"} and world.lines)
    assert [each for each in world.done if isinstance(each, Load)] == [Load(0, ("p",))]


def test_a_model_that_dies_again_and_again_stays_down_until_a_user_loads_it() -> None:
    world = World("a", "b")
    while world.states()["a"] != "failed":
        world.tritons[0].kill("a")
        world.run(0.5)
    assert world.serving() == {"b"}
    world.run(100)
    assert world.states()["a"] == "failed"
    assert world.outcome(world.order("reload", "a")) == ""
    assert world.states()["a"] == "ready"


def test_a_model_on_demand_that_died_too_often_leaves_no_part_in_memory() -> None:
    world = World("a", "b", on_demand=OnDemand(), loaded=("a", "b"), a=("p", "q"), b=("p",))
    while world.states()["a"] != "failed":
        world.tritons[0].kill("a")
        world.run(0.5)
    used = world.hold("a")
    world.run_until(lambda: world.serving() == {"b", "p"}, 5)
    assert world.memory.tritons[0].models["a"].why.startswith("its process has died")
    assert "is tried again in" in world.outcome(used)
    assert "is tried again in" in world.outcome(world.hold("a"))
    world.run(10)
    assert world.outcome(world.hold("a")) == ""
    assert world.serving() == {"a", "b", "p", "q"}


def test_a_user_reloads_a_model_while_the_old_one_answers() -> None:
    world = World("a", a=("p",))
    order = world.order("reload", "a")
    while order not in world.outcomes:
        world.step()
        assert world.states()["a"] == "ready"
    assert world.tritons[0].of("a").loads == world.tritons[0].of("p").loads == 1
    assert "a: is loaded again, as a user asks" in world.lines


def test_a_reload_that_fails_leaves_the_old_model_and_says_why() -> None:
    world = World("a")
    world.broken["a"] = "no weights"
    assert world.outcome(world.order("reload", "a")) == (
        "model 'a' failed to load: no weights: its previous version, if any, keeps running"
    )
    assert world.states() == {"a": "ready"}
    assert "a: failed to load again, and runs as before: no weights" in world.lines
    assert [each for each in world.done if isinstance(each, StopTrying)] == [
        StopTrying(0, "a", loaded_before=True)
    ], "or Triton would try it again and again"


@pytest.mark.parametrize("reported", [True, False])
def test_a_process_that_dies_while_another_answers_is_no_death_of_the_model(reported: bool) -> None:
    """Triton may report it; if it waits for that process instead, it loads nothing any more."""
    world = World("a", "b")
    order = world.order("reload", "a")
    world.step()
    model = world.tritons[0].of("a")
    model.loads_at, model.died = float("inf"), KILLED
    world.run(1)
    assert world.states() == {"a": "ready", "b": "ready"}, "the old one answers"
    if reported:
        model.loads_at, model.failure = None, "its process ended"
        assert "failed to load: its process ended" in world.outcome(order)
        world.run(30)
    else:
        assert world.outcome(order) == ""
    assert world.tritons[0].started_with == ([] if reported else [("a", "b")])
    assert world.states() == {"a": "ready", "b": "ready"}


def test_the_one_that_answers_may_die_while_another_is_loaded() -> None:
    world = World("a")
    order = world.order("reload", "a")
    world.step()
    world.tritons[0].kill("a")
    world.step()
    assert world.states() == {"a": "restarting"}
    assert world.outcome(order) == ""
    assert world.tritons[0].started_with == []


def test_a_triton_that_does_not_begin_to_load_a_model_that_answers_is_restarted() -> None:
    world = World("a", "b")
    order = world.order("reload", "a")
    world.step()
    world.tritons[0].of("a").loads_at = None
    assert world.outcome(order) == ""
    assert "triton: restarting (Triton does not load a)" in world.lines
    assert world.tritons[0].started_with == [("a", "b")]


@pytest.mark.parametrize("name", ["a", "b"])
def test_a_triton_that_waits_for_what_could_not_be_started_is_restarted(name: str) -> None:
    """As for a process that found no file any more; b is new."""
    world = World("a")
    order = world.order("reload", name)
    world.step()
    world.tritons[0].of(name).loads_at = float("inf")
    world.tritons[0].is_stuck = True
    world.broken["b"] = "Python model file not found"
    assert ("Python model file not found" in world.outcome(order)) is (name == "b")
    assert f"triton: restarting (Triton waits for {name})" in world.lines
    assert (world.states()["a"], world.serving()) == ("ready", {"a"})


def test_a_new_model_whose_process_could_not_be_started_on_demand_fails_alone() -> None:
    world = World("a", "b", on_demand=OnDemand(), loaded=("a",))
    hold = world.hold("b")
    world.step()
    world.tritons[0].of("b").loads_at = float("inf")
    world.tritons[0].is_stuck = True
    world.run_until(lambda: hold in world.outcomes, 10)
    assert "its process could not be started" in world.outcomes[hold]
    world.run_until(lambda: world.tritons[0].started_with == [("a",)], 5)


@pytest.mark.parametrize("on_demand", [True, False])
def test_a_new_model_that_ends_triton_itself_does_not_take_the_others_with_it(
    on_demand: bool,
) -> None:
    world = World("a", "b", on_demand=OnDemand() if on_demand else None, loaded=("a",))
    world.deadly.add("b")
    asked = world.hold("b") if on_demand else world.order("reload", "b")
    world.run_until(lambda: asked in world.outcomes)
    assert "Triton does not start with it: exit code 1" in world.outcomes[asked]
    world.run(60)
    assert world.states() == {"a": "ready", "b": "failed"}
    assert world.serving() == {"a"}
    assert world.tritons[0].started_with == [("a", "b"), ("a",)]


def test_a_replica_that_stays_down_leaves_the_others_to_an_order() -> None:
    world = World("a", replicas=3)
    order = world.order("reload", "a")
    world.step()
    world.memory.tritons[0].triton.failed(world.now, "no GPU")
    assert world.outcome(order) == ""
    assert [triton.of("a").loads for triton in world.tritons] == [0, 1, 1]


def test_a_part_that_is_needed_again_is_not_unloaded() -> None:
    world = World("a", "b", on_demand=OnDemand(), loaded=("a",), a=("p",), b=("p",))
    world.order("unload", "a")
    world.step()
    hold = world.hold("b")
    world.run_until(lambda: hold in world.outcomes)
    world.run(20)
    assert world.serving() == {"b", "p"}
    assert world.dropped() == ["a"]


def test_a_model_that_is_unloaded_leaves_the_parts_of_one_that_failed_meanwhile() -> None:
    """The load of that is still followed: it fails once Triton is back."""
    world = World("a", "b", on_demand=OnDemand(), loaded=("b",), a=("p",), b=("p",))
    hold = world.hold("a")
    world.step()
    world.tritons[0].end()
    world.removed.add("a")
    world.run_until(lambda: world.tritons[0].starts_at)
    order = world.order("unload", "b")
    world.run_until(lambda: hold in world.outcomes and order in world.outcomes)
    assert "a is gone" in world.outcomes[hold]
    world.run(20)
    assert world.serving() == set()


def test_a_new_model_that_fails_leaves_nothing_behind() -> None:
    world = World("a")
    world.parts["b"], world.broken["b"] = ("p", "q"), "no weights"
    assert "failed to load: no weights" in world.outcome(world.order("reload", "b"))
    assert world.states() == {"a": "ready", "b": "failed"}
    assert world.serving() == {"a"}
    world.broken.clear()
    assert world.outcome(world.order("reload", "b")) == ""
    assert world.serving() == {"a", "b", "p", "q"}


def test_a_model_whose_files_find_no_place_is_not_loaded() -> None:
    world = World("a")
    world.not_asked = "OSError: [Errno 28] No space left on device"
    assert "No space left" in world.outcome(world.order("reload", "b"))
    assert world.states()["b"] == "failed"
    world.not_asked = ""
    assert world.outcome(world.order("reload", "b")) == ""


@pytest.mark.parametrize("mends", [True, False])
def test_a_model_whose_process_did_not_respond_is_loaded_again(mends: bool) -> None:
    world = World("a")
    world.broken["b"] = "its process did not respond for a second, or ended"
    order = world.order("reload", "b")
    if mends:
        world.run_until(lambda: "b: is loaded again, since it did not respond" in world.lines)
        world.broken.clear()
    assert bool(world.outcome(order)) is not mends
    tries = world.lines.count("b: is loaded again, since it did not respond")
    assert tries == (1 if mends else 2)


def test_an_order_given_while_triton_restarts_is_refused_and_one_before_that_waits() -> None:
    world = World("a")
    order = world.order("reload", "b")
    world.step()
    world.tritons[0].end()
    assert world.outcome(order) == ""
    assert world.tritons[0].started_with == [("a", "b")]
    world.tritons[0].end()
    world.step()
    assert world.outcome(world.order("unload", "a")) == (
        "Triton is restarting: wait until it is ready"
    )


def test_one_replica_after_another_is_changed_and_the_others_answer() -> None:
    world = World("a", replicas=3)
    order = world.order("reload", "a")
    while order not in world.outcomes:
        world.step()
        loading = [t for t in world.tritons if t.of("a").loads_at is not None]
        assert len(loading) <= 1
    assert [triton.of("a").loads for triton in world.tritons] == [1, 1, 1]
    world.broken["a"] = "no weights"
    assert world.outcome(world.order("reload", "a"))
    assert sum(isinstance(each, Load) for each in world.done) == 4, "the others are left alone"


# Unloading


def test_a_user_unloads_a_model_with_the_parts_that_no_other_has() -> None:
    world = World("a", "b", a=("p", "q"), b=("p",))
    assert world.outcome(world.order("unload", "a")) == ""
    assert world.dropped() == ["a", "q"], "the model before its parts"
    assert world.states() == {"p": "ready", "b": "ready"}
    assert world.lines[-1] == "a: unloaded"
    assert world.outcome(world.order("unload", "p")) == "p is a part of b: unload b"
    assert world.outcome(world.order("unload", "x")).startswith("no model 'x' is served")


def test_a_user_may_unload_all_that_answers() -> None:
    """It is no failure, not even if Triton then ends."""
    world = World("a")
    assert world.outcome(world.order("unload", "a")) == ""
    assert not world.memory.tritons[0].has_failed
    world.tritons[0].end()
    world.run(10)
    assert world.tritons[0].started_with == [()]
    assert world.memory.tritons[0].triton.state is State.READY


def test_if_all_models_have_failed_nothing_is_left_to_answer() -> None:
    world = World("a")
    world.memory.tritons[0].models["a"].failed(0.0, "no weights")
    assert world.memory.tritons[0].has_failed
    assert world.memory.tritons[0].why_it_failed() == {"a: no weights"}


def test_a_model_that_calls_its_parts_has_them_until_its_process_ends() -> None:
    """It answers its last request until then."""
    world = World("a", a=("p",))
    model = world.tritons[0].of("a")
    model.lingers = True
    order = world.order("unload", "a")
    for _ in range(100):
        world.step()
        model.seconds += 0.01
    assert world.dropped() == ["a"]
    model.processes = set()
    assert world.outcome(order) == ""
    assert world.dropped() == ["a", "p"]
    assert world.killed() == []


def test_processes_that_triton_forgets_are_ended_unless_they_work() -> None:
    world = World("a")
    world.tritons[0].of("a").lingers = True
    order = world.order("unload", "a")
    for _ in range(100):
        world.step()
        world.tritons[0].of("a").seconds += 0.01
    assert world.killed() == []
    assert world.outcome(order) == ""
    assert world.killed() == ["a"]
    assert any("its processes are ended" in line for line in world.lines)


def test_no_process_of_a_triton_that_has_ended_is_waited_for_or_killed() -> None:
    """Their numbers may be those of others by then."""
    world = World("a", "b")
    world.tritons[0].of("a").lingers = True
    order = world.order("unload", "a")
    world.run_until(lambda: world.dropped() == ["a"])
    world.tritons[0].end()
    assert world.outcome(order) == ""
    assert world.killed() == []
    assert world.tritons[0].started_with == [("b",)]


def test_a_process_that_waits_for_what_triton_computes_is_ended_later() -> None:
    world = World("a", a=("q",))
    world.graphs.add("q")
    world.tritons[0].of("q").processes = set()
    world.tritons[0].of("a").lingers = True
    order = world.order("unload", "a")
    assert world.run_until(lambda: order in world.outcomes) > 60


def test_a_triton_that_does_not_unload_a_model_is_restarted_without_it() -> None:
    world = World("a", "b")
    world.tritons[0].obeys = False
    assert world.outcome(world.order("unload", "a")) == ""
    assert world.tritons[0].started_with == [("b",)]
    assert "triton: restarting (Triton does not unload a)" in world.lines
    assert world.lines.index("a: unloaded") > 0


def test_an_unload_waits_for_a_load_and_that_is_no_reason_for_a_restart() -> None:
    world = World("a", "b")
    world.tritons[0].of("a").loads_at = world.now + 100
    order = world.order("unload", "a")
    world.run(90)
    assert world.dropped() == []
    assert world.outcome(order) == ""
    assert world.tritons[0].started_with == []


@pytest.mark.parametrize("on_demand", [True, False])
def test_a_model_that_hangs_when_it_is_loaded_again_is_unloaded_at_last(on_demand: bool) -> None:
    """Nothing else is loaded meanwhile: its place is needed."""
    world = World("a", "b", on_demand=OnDemand(max_loaded=1) if on_demand else None, loaded=("a",))
    world.memory.tritons[0].ready_timeout = 90.0
    world.tritons[0].kill("a")
    world.run_until(lambda: world.tritons[0].of("a").loads_at)
    world.tritons[0].of("a").loads_at = float("inf")
    waits = world.hold("b") if on_demand else world.order("unload", "a")
    world.run_until(lambda: waits in world.outcomes)
    assert world.outcomes[waits] == ""
    assert world.tritons[0].started_with == [()]
    assert "triton: restarting (Triton waits for a)" in world.lines


def test_parts_that_a_model_that_was_built_anew_has_no_more_are_unloaded() -> None:
    world = World("a", "b", a=("p", "q"), b=("p",))
    world.parts["a"] = ()
    assert world.outcome(world.order("reload", "a")) == ""
    world.run(5)
    assert world.dropped() == ["q"], "another has p as well"
    assert world.serving() == {"a", "b", "p"}


# On demand


def test_a_model_is_loaded_when_it_is_held_and_makes_place_when_it_is_not() -> None:
    world = World("a", "b", on_demand=OnDemand(max_loaded=1), a=("p",))
    hold = world.hold("a")
    world.run_until(lambda: hold in world.outcomes)
    assert world.serving() == {"a", "p"}
    other = world.hold("b")
    world.run(5)
    assert (hold.going, other.place) == (True, 1)
    world.release(hold)
    world.run_until(lambda: other in world.outcomes)
    assert world.serving() == {"b"}
    assert world.states() == {"a": "unloaded", "b": "ready"}


def test_a_model_is_unloaded_once_it_computes_nothing() -> None:
    world = World("a", on_demand=OnDemand(unload_after=5), loaded=("a",))
    for _ in range(40):
        world.step()
        world.tritons[0].of("a").seconds += TICK_OF_WORK
    assert world.states()["a"] == "unloaded", "it gets no canaries from the beginning"
    assert world.dropped() == []
    world.run_until(lambda: world.dropped() == ["a"])


TICK_OF_WORK = 0.2


def test_who_waits_for_a_model_of_a_triton_that_stays_down_is_refused() -> None:
    world = World("a", on_demand=OnDemand(), loaded=("a",))
    order = world.order("reload", "a")
    world.step()
    world.memory.tritons[0].lost(world.now, "no GPU")
    world.memory.tritons[0].triton.failed(world.now, "no GPU")
    assert world.outcome(order) == "Triton has ended"
    assert world.outcome(world.hold("a")) == "Triton has ended"


def test_a_model_that_fails_in_one_replica_is_loaded_in_none() -> None:
    world = World("a", on_demand=OnDemand(), replicas=2)
    hold = world.hold("a")
    world.step()
    world.tritons[1].of("a").loads_at = None
    world.tritons[1].of("a").failure = "no weights"
    world.run_until(lambda: hold in world.outcomes)
    assert "'a' could not be loaded (no weights)" in world.outcomes[hold]
    assert world.serving(0) == world.serving(1) == set()


def test_a_triton_that_ends_has_what_is_on_demand_from_its_start() -> None:
    world = World("a", "b", on_demand=OnDemand())
    hold = world.hold("a")
    world.step()
    world.tritons[0].end()
    world.run_until(lambda: hold in world.outcomes)
    assert (world.outcomes[hold], world.serving()) == ("", {"a"})
    assert world.tritons[0].started_with == [("a",)]


def test_a_model_that_is_unloaded_while_triton_starts_with_it_is_not_served() -> None:
    world = World("a", on_demand=OnDemand(), loaded=("a",))
    world.tritons[0].end()
    world.run_until(lambda: world.tritons[0].starts_at)
    assert world.outcome(world.order("unload", "a")) == ""
    assert world.serving() == set()


def test_a_model_without_a_folder_is_offered_no_more() -> None:
    world = World("a", "b", on_demand=OnDemand())
    world.removed.add("a")
    world.run(1)
    assert world.memory.demand is not None
    assert world.memory.demand.offered == ["a", "b"], "a build may be replacing it"
    world.run(3)
    assert world.memory.demand.offered == ["b"]
    assert world.states() == {"b": "unloaded"}


# Whatever happens

_FAULTS = st.lists(
    st.tuples(
        st.sampled_from(
            ["kill", "stop model", "end", "stop", "miss", "break", "mend", "reload", "unload",
             "hold", "release", "disobey", "hang", "hang unseen"]
        ),
        st.sampled_from("abc"),
        st.integers(0, 1),
        st.floats(0.0, 8.0),
    ),
    max_size=12,
)  # fmt: skip


@settings(deadline=None, max_examples=60)
@given(_FAULTS, st.booleans(), st.integers(1, 2))
def test_whatever_happens_it_comes_to_what_is_desired_or_says_why(
    faults: list[tuple[str, str, int, float]], on_demand: bool, replicas: int
) -> None:
    world = World(
        "a", "b", "c", replicas=replicas, a=("p",),
        on_demand=OnDemand(max_loaded=2) if on_demand else None,
    )  # fmt: skip
    for memory in world.memory.tritons:
        memory.ready_timeout = 40.0
    for fault, name, number, seconds in faults:
        triton = world.tritons[number % replicas]
        if fault == "kill":
            triton.kill(name)
        elif fault == "stop model":
            triton.of(name).is_stopped = bool(triton.of(name).processes)
        elif fault == "end":
            triton.end()
        elif fault == "stop":
            triton.is_stopped = triton.starts_at is None
        elif fault == "miss":
            triton.hear(Heard.MISSED, name)
        elif fault == "break":
            world.broken[name] = "no weights"
        elif fault == "mend":
            world.broken.pop(name, None)
        elif fault == "disobey":
            triton.obeys = False
        elif fault.startswith("hang"):
            world.hanging.add(name)
            world.reports_ends = fault == "hang"
        elif fault in ("reload", "unload"):
            world.order("reload" if fault == "reload" else "unload", name)
        elif fault == "hold" and on_demand:
            world.hold(name)
        elif fault == "release" and world.desired.holds:
            world.release(world.desired.holds[0])
        world.run(seconds)
    world.broken.clear()
    world.hanging.clear()
    for triton in world.tritons:
        triton.obeys = True
    for second in range(400):
        if second in (5, 200):
            for triton in world.tritons:
                for name in triton.models:
                    triton.hear(Heard.ANSWERED, name)
            for hold in list(world.desired.holds):
                # Whoever unloads a model waits for who uses it.
                assert hold in world.outcomes or hold.place, "who waits is told where"
                if second == 200:
                    world.release(hold)
        world.step(1.0)
    assert not world.desired.orders, "every order is carried out or refused"
    for number, memory in enumerate(world.memory.tritons):
        if memory.stays_down:
            assert memory.triton.why
            continue
        assert memory.triton.alive
        serving = world.serving(number)
        for model in memory.models.values():
            assert model.state in (State.READY, State.FAILED, State.UNLOADED)
            assert (model.name in serving) is (model.state is State.READY)
            assert model.why or model.state is not State.FAILED
        assert serving <= memory.models.keys(), "nothing is served that nobody wants"
        if on_demand:
            assert len({*"abc"} & serving) <= 2
