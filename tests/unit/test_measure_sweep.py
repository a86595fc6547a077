from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from threading import Timer
from typing import Any

import pytest

from llmserve.errors import ConfigError, ServerError, UsageError
from llmserve.measure import sweep as module
from llmserve.measure.bench import Target
from llmserve.measure.codec import encode
from llmserve.measure.grid import make_variants, parse_varied
from llmserve.measure.job import Place
from llmserve.measure.plan import Prompts
from llmserve.measure.ranking import rank, stop_losers
from llmserve.measure.results import load
from llmserve.measure.runs import Load
from llmserve.measure.series import Sweep, Variant
from llmserve.measure.subjects import Built
from llmserve.measure.sweep import Sweeping, sweep
from tests.unit.scripted_triton import scripted
from tests.unit.test_measure_results import RUN


def variant(name: str, throughput: float, latency: float, *, rounds: int = 1) -> Variant:
    return Variant(
        name, {}, {}, "waiting", "", (RUN,) * rounds, throughput, latency, latency <= 1.0
    )


def test_every_combination_is_a_variant_and_builds_stay_together() -> None:
    varied = parse_varied(["concurrency=1,8", "max_batch_size=4,16"])
    made = make_variants(varied)
    assert [v.name for v in made] == [
        "max_batch_size=4 concurrency=1",
        "max_batch_size=4 concurrency=8",
        "max_batch_size=16 concurrency=1",
        "max_batch_size=16 concurrency=8",
    ]
    assert made[0].build == {"max_batch_size": "4"}
    assert made[0].load == {"concurrency": "1"}


@pytest.mark.parametrize(
    "texts",
    [[], ["x"], ["x="], ["=1"], ["x=1", "x=2"], ["concurrency=1", "rate=2"]],
)
def test_what_varies_nothing_is_refused(texts: list[str]) -> None:
    with pytest.raises(UsageError):
        parse_varied(texts)


@pytest.mark.parametrize("value", ["0", "x", "-1", "1.5"])
def test_a_concurrency_that_is_none_is_refused(value: str) -> None:
    with pytest.raises(UsageError, match="is no load"):
        make_variants({"concurrency": (value,)})


def test_what_cannot_win_is_stopped_and_says_why() -> None:
    judged = stop_losers(
        [variant("best", 100, 0.5), variant("near", 80, 0.5), variant("far", 40, 0.2)], 1.0, None
    )
    assert [v.state for v in judged] == ["waiting", "waiting", "stopped"]
    assert "40.0 tokens/s" in judged[2].why
    assert "100.0" in judged[2].why


def test_after_more_rounds_less_is_forgiven() -> None:
    both = [variant("best", 100, 0.5, rounds=2), variant("near", 75, 0.5, rounds=2)]
    assert stop_losers(both, None, None)[1].state == "stopped"
    assert stop_losers([replace(v, runs=(RUN,)) for v in both], None, None)[1].state == "waiting"


def test_what_is_over_the_limit_stops_nobody_and_stops_itself_when_far_over() -> None:
    judged = stop_losers(
        [variant("fast, too late", 500, 9.0), variant("in time", 100, 0.5)], 1.0, None
    )
    assert [v.state for v in judged] == ["stopped", "waiting"]
    assert "limit is 1000 ms" in judged[0].why


def test_where_nobody_holds_the_limit_the_nearest_goes_on() -> None:
    judged = stop_losers([variant("a", 500, 9.0), variant("b", 100, 3.0)], 1.0, None)
    assert [v.state for v in judged] == ["stopped", "waiting"]


def test_the_ranking_puts_those_within_the_limit_first() -> None:
    done = [
        replace(variant(name, rate, late), state="done")
        for name, rate, late in (("a", 900, 2.0), ("b", 100, 0.5), ("c", 200, 0.9))
    ]
    assert rank([*done, variant("d", 950, 0.1)]) == ("c", "b", "a")


class World:
    """Serves a scripted model as any variant; what is slow, broken or interrupted is settable."""

    def __init__(self, url: dict[str, str]) -> None:
        self.url = url
        self.served: list[str] = []
        self.broken = ""
        self.interrupt_at = -1

    @contextmanager
    def serving(self, variants: list[Built], model: str, *, report: Any) -> Iterator[list[Target]]:
        label = variants[0].label
        if len(self.served) == self.interrupt_at:
            self.interrupt_at = -1
            raise KeyboardInterrupt
        self.served.append(label)
        if self.broken and self.broken in label:
            raise ServerError("the model failed to load")
        yield [Target("whole", Place(self.url["slow" if "=2" in label else "quick"]), label)]


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    with scripted(first=0.03, tokens=(4,)) as quick, scripted(first=0.2, tokens=(4,)) as slow:
        world = World({"quick": quick.url, "slow": slow.url})
        # Building and serving is what the live test is for; here it is what is done with it.
        monkeypatch.setattr(module, "serving", world.serving)
        yield world


def asked(**changes: Any) -> Sweeping:
    def make(concurrency: int | None, rate: float | None, info: Any) -> Load:
        return Load.closed(concurrency or 2, requests=4, warmup=0)

    given: dict[str, Any] = {
        "plugin": "hf", "model": "demo", "varied": {"max_batch_size": ("1", "2", "3")},
        "common": {}, "prompts": Prompts(), "make_load": make, "rounds": 2,
    }  # fmt: skip
    return Sweeping(**{**given, **changes})


def test_a_sweep_measures_stops_and_ranks(world: World, tmp_path: Path) -> None:
    world.broken = "=3"
    found = sweep(asked(), tmp_path / "state.json")
    states = {v.name: (v.state, len(v.runs)) for v in found.variants}
    assert states == {
        "max_batch_size=1": ("done", 2),
        "max_batch_size=2": ("stopped", 1),
        "max_batch_size=3": ("failed", 0),
    }
    assert found.ranking == ("max_batch_size=1",)
    assert found.variants[2].why == "the model failed to load"
    # What was stopped or has failed is not built again.
    assert world.served == [f"max_batch_size={n}" for n in (1, 2, 3, 1)]
    assert encode(load(tmp_path / "state.json")) == encode(found)


def test_an_interrupted_sweep_goes_on_where_it_was(world: World, tmp_path: Path) -> None:
    world.interrupt_at = 1
    first = sweep(asked(), tmp_path / "state.json")
    assert first.interrupted
    assert [len(v.runs) for v in first.variants] == [1, 0, 0]
    second = sweep(asked(), tmp_path / "state.json")
    assert not second.interrupted
    assert world.served == [f"max_batch_size={n}" for n in (1, 2, 3, 1, 3)]
    assert encode(second.variants[0].runs[0]) == encode(first.variants[0].runs[0])
    assert [v.state for v in second.variants] == ["done", "stopped", "done"]
    # And what is complete is only read.
    assert sweep(asked(), tmp_path / "state.json").ranking == second.ranking
    assert len(world.served) == 5


def test_the_state_of_another_sweep_is_not_continued(world: World, tmp_path: Path) -> None:
    world.interrupt_at = 0
    sweep(asked(), tmp_path / "state.json")
    for other in (asked(rounds=3), asked(model="gpt2"), asked(settings={"requests": 9})):
        with pytest.raises(ConfigError, match="is of another sweep"):
            sweep(other, tmp_path / "state.json")


def test_variants_of_one_build_are_served_once(world: World, tmp_path: Path) -> None:
    varied = {"max_batch_size": ("1",), "concurrency": ("1", "2")}
    found = sweep(asked(varied=varied, rounds=1), tmp_path / "state.json")
    assert isinstance(found, Sweep)
    assert world.served == ["max_batch_size=1"]
    assert [v.runs[0].load.concurrency for v in found.variants] == [1, 2]


def test_a_sweep_that_is_complete_says_so(world: World, tmp_path: Path) -> None:
    told: list[str] = []
    one = asked(varied={"max_batch_size": ("1",)}, rounds=1, report=told.append)
    sweep(one, tmp_path / "state.json")
    assert not [line for line in told if "has it all already" in line]
    sweep(one, tmp_path / "state.json")
    assert told[-1].startswith(f"{tmp_path / 'state.json'} has it all already")
    assert len(world.served) == 1


def test_a_variant_whose_server_dies_has_failed_and_the_others_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("llmserve.measure.bench.GIVE_UP", 0.5)

    @contextmanager
    def serving(variants: list[Built], model: str, *, report: Any) -> Iterator[list[Target]]:
        with scripted(first=0.02, tokens=(4,)) as server:
            if "=1" in variants[0].label:
                Timer(2.0, server.process.kill).start()
            yield [Target("whole", Place(server.url), variants[0].label)]

    # The first is asked for long enough to see its server die, the second is not.
    counts = iter([1000, 4])

    def make(concurrency: int | None, rate: float | None, info: Any) -> Load:
        return Load.closed(2, requests=next(counts), warmup=0)

    monkeypatch.setattr(module, "serving", serving)
    varied = {"max_batch_size": ("1", "2")}
    found = sweep(asked(varied=varied, rounds=1, make_load=make), tmp_path / "state.json")
    assert [variant.state for variant in found.variants] == ["failed", "done"]
    assert "the server was gone while it was measured" in found.variants[0].why
