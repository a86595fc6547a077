from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest

from llmserve.builder.plan import make_plan
from llmserve.errors import UnreachableError, UsageError
from llmserve.measure.bench import OnProgress, Target, ignore
from llmserve.measure.compare import compare
from llmserve.measure.confidence import interval, ratios
from llmserve.measure.job import Place
from llmserve.measure.pairs import PAIRS, Pair
from llmserve.measure.plan import Lengths, Prompts
from llmserve.measure.runs import Load, Record, Run
from llmserve.measure.series import Cell
from llmserve.measure.subjects import Built, Served, parse_subject, with_defaults
from llmserve.registry import Registry
from tests.unit.scripted_triton import scripted
from tests.unit.test_measure_results import RUN


def runs(*latencies: float, failed: bool = False) -> tuple[Run, ...]:
    made = []
    for seconds in latencies:
        record = Record(0, 0.0, 0.0, seconds, seconds, 4, 8, (seconds,), (8,))
        records = (record, replace(record, error="rejected")) if failed else (record,)
        made.append(replace(RUN, records=records, seconds=seconds))
    return tuple(made)


def verdict(one: Cell, other: Cell, metric: str = "latency_mean") -> tuple[str, str]:
    found = next(ratio for ratio in ratios(one, other) if ratio.metric == metric)
    assert found.low <= found.ratio <= found.high
    return found.verdict, found.why


def test_a_clear_difference_is_called_one_in_the_right_direction() -> None:
    slow, fast = Cell("a", "x", runs(1.0, 1.02, 0.99)), Cell("b", "x", runs(0.5, 0.52, 0.49))
    assert verdict(fast, slow)[0] == "better"
    assert verdict(slow, fast)[0] == "worse"
    assert verdict(fast, slow, "requests_per_second")[0] == "better"


def test_a_difference_that_the_spread_swallows_is_not_called_one() -> None:
    one, other = Cell("a", "x", runs(1.0, 0.6, 1.4)), Cell("b", "x", runs(0.9, 0.9, 0.8))
    found, why = verdict(other, one)
    assert found == "no difference"
    assert "holds 1" in why


def test_what_drifts_for_both_alike_does_not_hide_a_difference() -> None:
    # The machine became four times slower over the rounds; the ratio was the same in each.
    one, other = Cell("a", "x", runs(1.0, 2.0, 4.0)), Cell("b", "x", runs(0.8, 1.61, 3.19))
    assert verdict(other, one)[0] == "better"


def test_few_rounds_and_failed_requests_say_nothing() -> None:
    one, other = Cell("a", "x", runs(1.0, 1.0)), Cell("b", "x", runs(0.5, 0.5))
    assert "2 rounds are too few" in verdict(other, one)[1]
    failing = Cell("b", "x", runs(0.5, 0.5, 0.5, failed=True))
    assert "50% of the requests" in verdict(failing, Cell("a", "x", runs(1.0, 1.0, 1.0)))[1]


def test_the_interval_holds_the_truth_as_often_as_it_says() -> None:
    draw = random.Random(1)
    held = 0
    for _ in range(1000):
        found = interval([1.2 * draw.lognormvariate(0, 0.1) for _ in range(5)])
        held += found.low <= 1.2 <= found.high
    assert 0.93 < held / 1000 < 0.97


def test_nothing_measured_gives_no_ratios() -> None:
    assert ratios(Cell("b", "x", ()), Cell("a", "x", ())) == []


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("demo", Served("demo", "demo")),
        ("a=demo@10.0.0.1:8001", Served("a", "demo", "10.0.0.1:8001")),
        ("hf:", Built("hf", "hf", {})),
        ("b=hf:max_batch_size=4,dtype=float32",
         Built("b", "hf", {"max_batch_size": "4", "dtype": "float32"})),
        ("hf:max_batch_size=0", Built("hf:max_batch_size=0", "hf", {"max_batch_size": "0"})),
    ],
)  # fmt: skip
def test_subjects_are_read_as_they_are_written(text: str, expected: Built | Served) -> None:
    assert parse_subject(text) == expected


def test_a_built_subject_has_a_name_that_triton_takes() -> None:
    assert Built("hf:max_batch_size=0", "hf").name == "hf-max_batch_size-0"
    spec = Built("x", "iterative", {"batching": "static", "max_batch_size": "4"})
    made = spec.spec("demo", Path("r"))
    assert (made.batching, dict(made.options)) == ("static", {"max_batch_size": "4"})


def test_every_pair_is_two_subjects_to_build() -> None:
    for pair in PAIRS.values():
        subjects = [parse_subject(text) for text in (pair.first, pair.second)]
        assert len({subject.label for subject in subjects}) == 2
        assert all(isinstance(subject, Built) for subject in subjects)


@pytest.mark.parametrize("name", PAIRS)
def test_every_pair_can_be_built(name: str, tmp_path: Path) -> None:
    for built in variants_of(PAIRS[name], {"max_batch_size": "4"}):
        plan = make_plan(built.spec("demo", tmp_path), Registry.load())
        assert plan.options["max_batch_size"] == 4


def variants_of(pair: Pair, asked: dict[str, str]) -> list[Built]:
    texts = [parse_subject(text) for text in (pair.first, pair.second)]
    built = [subject for subject in texts if isinstance(subject, Built)]
    return with_defaults(with_defaults(built, asked), pair.defaults(asked))


def test_what_only_one_variant_knows_goes_to_that_one_and_is_told() -> None:
    told: list[str] = []
    variants = [Built("hf", "hf"), Built("one", "iterative", {"max_batch_size": "2"})]
    made = with_defaults(
        variants, {"decoupled": "true", "max_batch_size": "4", "speed": "9"}, report=told.append
    )
    assert dict(made[0].settings) == {"decoupled": "true", "max_batch_size": "4", "speed": "9"}
    # What nobody knows goes to all, for the build to refuse.
    assert dict(made[1].settings) == {"max_batch_size": "2", "speed": "9"}
    assert told == ["decoupled=true is for hf alone"]


def test_a_pair_with_an_engine_is_built_with_it_in_place_of_the_llm_api() -> None:
    hf, trtllm = variants_of(PAIRS["hf-trtllm"], {})
    assert dict(hf.settings) == {}
    assert dict(trtllm.settings) == {"layout": "llmapi", "stand_in": "true"}
    hf, trtllm = variants_of(PAIRS["hf-trtllm"], {"engine": "/engine", "dtype": "float16"})
    assert dict(hf.settings) == {"dtype": "float16"}
    assert dict(trtllm.settings) == {"engine": "/engine", "dtype": "float16"}


def test_wrong_settings_of_a_subject_are_told() -> None:
    with pytest.raises(UsageError):
        parse_subject("hf:max_batch_size")


def test_subjects_see_the_same_requests_in_every_round() -> None:
    prompts = Prompts(input_tokens=Lengths(8, 3), output_tokens=Lengths(4, 2))
    load = Load.open(40.0, requests=6, warmup=1)
    with scripted(first=0.1, tokens=(1,)) as quick, scripted(first=0.4, tokens=(1,)) as slow:
        targets = [
            Target("whole", Place(quick.url), name="quick"),
            Target("whole", Place(slow.url), name="slow"),
        ]
        infos = [target.info() for target in targets]
        found = compare(targets, infos, [load], prompts, rounds=3)
        assert len(quick.stop()) == len(slow.stop()) == 3 * 7
    quick_cell, slow_cell = found.cells
    assert [cell.subject for cell in found.cells] == ["quick", "slow"]
    for one, other in zip(quick_cell.runs, slow_cell.runs, strict=True):
        assert [r.scheduled for r in one.records] == [r.scheduled for r in other.records]
        assert one.load == other.load
    assert len({run.load.seed for run in quick_cell.runs}) == 3
    latency = next(ratio for ratio in found.ratios if ratio.metric == "latency_p50")
    # How sure it is depends on how calm the machine is; on which side it lies does not.
    assert latency.ratio > 1.5


@pytest.mark.parametrize("warmup", [1, 0], ids=["seen by the warm-up", "seen by the load"])
def test_a_server_that_dies_leaves_the_rounds_before_it(
    warmup: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("llmserve.measure.bench.GIVE_UP", 0.5)
    with scripted(first=0.01, tokens=(1,)) as lasting, scripted(first=0.01, tokens=(1,)) as dying:
        targets = [
            Target("whole", Place(lasting.url), name="lasting"),
            Target("whole", Place(dying.url), name="dying"),
        ]
        infos = [target.info() for target in targets]

        def on_step(label: str, at: int, of: int) -> OnProgress:
            # Four measurements are done: two rounds.
            if at == 4:
                dying.process.kill()
                dying.process.wait()
            return ignore

        load = Load.closed(2, requests=40, warmup=warmup)
        found = compare(targets, infos, [load], Prompts(), rounds=5, on_step=on_step)
    assert found.ended_early is not None
    assert "round 3 of 5: dying" in found.ended_early
    assert "no Triton answers" in found.ended_early
    assert not found.interrupted
    assert [len(cell.runs) for cell in found.cells if cell.subject == "dying"] == [2]
    assert len(found.ratios) > 0


def test_a_subject_that_was_never_there_is_an_error() -> None:
    with scripted(first=0.01, tokens=(1,)) as server:
        target = Target("whole", Place(server.url))
        infos = [target.info()] * 2
    with pytest.raises(UnreachableError):
        compare([target, target], infos, [Load.closed(1, requests=1)], Prompts(), rounds=3)
