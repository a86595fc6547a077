from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from llmserve.errors import ConfigError
from llmserve.measure.results import (
    Cell,
    Comparison,
    Load,
    LoaderCost,
    ModelFigures,
    Ratio,
    Record,
    Run,
    ServerFigures,
    Subject,
    Sweep,
    ToolFigures,
    Variant,
    from_json,
    load,
    save,
    to_json,
)

SUBJECT = Subject("demo", "demo", "127.0.0.1:8001", "stream", {"max_batch_size": 8})
LOAD = Load(8, None, None, 2, None, 1, True, 0, "synthetic", {"max_tokens": 8}, 0.5, None)
RECORDS = (
    Record(0, 0.0, 0.001, 0.1, 0.4, 5, 7, (0.1, 0.25, 0.4), (1, 3, 3), "length"),
    Record(1, 0.0, 0.001, None, 0.2, None, None, error="rejected", message="the queue is full"),
)
SERVER = ServerFigures(
    (ModelFigures("demo", 2, 1, 2, 1, 0.5, 0.1, 0, 0.4, 0, {"2": 1}),), {"a": 1.5}
)
RUN = Run(
    SUBJECT, LOAD, "2026-01-01T00:00:00+00:00", 0.5, RECORDS, SERVER,
    LoaderCost(1, 0.01, 0.02, 0.0001), (ToolFigures("perf-analyzer", "2.51", "x", {"p": 1.0}),),
)  # fmt: skip
RATIO = Ratio("latency_p50", "concurrency 8", "b", "a", 0.5, 0.4, 0.6, "better", "because")
COMPARISON = Comparison(
    "a against b", "2026", (SUBJECT, SUBJECT), ("concurrency 8",), 1,
    (Cell("a", "concurrency 8", (RUN,)),), (RATIO,),
)  # fmt: skip
VARIANT = Variant(
    "x", {"max_batch_size": 8}, {"concurrency": 2}, "done", "", (RUN,), 1.0, 2.0, True
)
SWEEP = Sweep(
    "demo", "2026", "hf", "demo", {"max_batch_size": (4, 8)}, (VARIANT,), ("x",), 3, 0.5, None
)  # fmt: skip


@pytest.mark.parametrize("result", [RUN, COMPARISON, SWEEP], ids=["run", "comparison", "sweep"])
def test_what_was_saved_is_read_back(result: Run | Comparison | Sweep, tmp_path: Path) -> None:
    save(result, tmp_path / "result.json")
    assert load(tmp_path / "result.json") == result
    assert [path.name for path in tmp_path.iterdir()] == ["result.json"]


def test_a_runs_file_has_its_summary_for_other_readers() -> None:
    content = json.loads(json.dumps(to_json(RUN)))
    assert content["summary"]["requests_per_second"] == 2.0
    assert content["summary"]["errors"] == {"rejected": 1}


@pytest.mark.parametrize("content", [{}, [], "x", {"kind": "run"}, {"kind": "y", "schema": 1}])
def test_what_is_no_result_is_told_as_such(content: object) -> None:
    with pytest.raises(ConfigError, match="no result"):
        from_json(content)


def test_another_schema_is_refused_with_both_numbers() -> None:
    with pytest.raises(ConfigError, match="schema 99, this llmserve reads 1"):
        from_json({"kind": "run", "schema": 99})


def test_what_cannot_be_written_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot write"):
        save(RUN, tmp_path / "missing" / "result.json")
    with pytest.raises(ConfigError, match="cannot read"):
        load(tmp_path / "missing.json")


def test_an_interval_without_end_is_json_that_everybody_reads(tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    endless = replace(COMPARISON, ratios=(replace(RATIO, low=0.0, high=float("inf")),))
    save(endless, path)

    def refuse(name: str) -> None:
        raise AssertionError(f"{name} is no JSON")

    json.loads(path.read_text(), parse_constant=refuse)
    assert load(path) == endless
