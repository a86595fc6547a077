"""The parts of the bench that can be wrong without anybody noticing."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

BENCH = Path(__file__).parents[1] / "bench"


@pytest.fixture(autouse=True)
def bench_on_the_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCH))


def test_a_line_compares_round_by_round() -> None:
    from rounds import Line, Target

    line = Line("x", "tokens/s", [10.0, 40.0, 30.0], [10.0, 10.0, 10.0], Target(3.0))
    assert line.ratios == [1.0, 3.0, 4.0]
    assert line.cells()[3:] == ["3.00", "1.00 to 4.00", "≥ 3", "reached"]
    assert not Target(1.3, at_least=False).met(1.31)


def test_both_sides_take_turns_and_warm_up() -> None:
    from rounds import in_turns

    order: list[str] = []

    def side(name: str) -> float:
        order.append(name)
        return float(len(order))

    ours, theirs = in_turns(lambda: side("ours"), lambda: side("theirs"), 2)
    assert order == ["ours", "theirs", "theirs", "ours", "ours", "theirs"]
    assert (ours, theirs) == ([4.0, 5.0], [3.0, 6.0])


def test_a_load_is_the_same_each_time_and_as_dense_as_asked() -> None:
    from served import Load

    load = Load.poisson(2000, 10.0, seed=3)
    assert load == Load.poisson(2000, 10.0, seed=3)
    assert load.arrivals[-1] == pytest.approx(200.0, rel=0.1)
    assert (min(load.lengths), max(load.lengths)) == (8, 256)


def test_prompts_share_no_beginning() -> None:
    from shapes import Prompts, as_text, prompt_ids

    prompts = Prompts()
    assert len({ids[0] for ids in prompts.ids(40) + prompts.ids(24)}) == 64
    assert prompts.texts(1) == [as_text(prompt_ids(64))]
    assert as_text([3, 5]) == "w3 w5"


def test_a_worker_that_dies_says_why(tmp_path: Path) -> None:
    import sys

    from workers import Worker

    with (
        pytest.raises(RuntimeError, match=r"No module named .ctranslate2."),
        Worker.start(Path(sys.executable), "worker_ctranslate2.py"),
    ):
        pass


def test_an_unknown_row_is_told_with_those_that_there_are() -> None:
    from table import _names

    with pytest.raises(argparse.ArgumentTypeError, match="no row speed: there are whole-prefix"):
        _names("speed")
