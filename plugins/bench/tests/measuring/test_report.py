"""Results as files, tables, Markdown and a page."""

from __future__ import annotations

import csv
import io
import json
import os
import re
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from llmserve.client import ToolCall
from llmserve.errors import ConfigError
from llmserve_bench.losses import is_valid_call
from llmserve_bench.output import (
    COLUMNS,
    conditions_of,
    load,
    notes_of,
    print_tables,
    save,
    tables_of,
    to_csv,
    to_json,
    write_report,
)
from llmserve_bench.results import Loss, Result

from .examples import make_case, make_comparison, make_result, make_sweep

if TYPE_CHECKING:
    from llmserve_bench.plots import Plot

RESULTS = {
    "bench": make_result("bench", [make_case("iterative", failing=2)]),
    "compare": make_comparison((2, 16)),
    "sweep": make_sweep(),
}


@pytest.fixture(params=RESULTS)
def result(request: pytest.FixtureRequest) -> Result:
    return RESULTS[request.param]


def test_a_saved_result_is_read_back_and_gives_the_same_self_contained_page(
    result: Result, tmp_path: Path
) -> None:
    save(result, tmp_path / "result.json")
    assert load(tmp_path / "result.json") == result
    first = write_report(result, tmp_path / "one")
    second = write_report(load(tmp_path / "result.json"), tmp_path / "two")
    assert first.read_bytes() == second.read_bytes()
    page = first.read_text()
    assert [path.name for path in first.parent.iterdir()] == ["report.html"]
    assert all(escape(table.title) in page for table in tables_of(result))
    assert all(f"<dt>{name}</dt>" in page for name in conditions_of(result))
    assert page.count('src="data:image/svg+xml') == len(plots_of(result)) >= 1
    assert not re.findall(r'(?:src|href)="(?!data:)', page)


def plots_of(result: Result) -> list[Plot]:
    # Every worker imports this module, and matplotlib takes a second.
    from llmserve_bench import plots

    return plots.plots_of(result)


def test_a_distribution_names_its_load() -> None:
    captions = [plot.caption for plot in plots_of(RESULTS["compare"]) if "Distr" in plot.title]
    assert len(captions) == 2
    assert all(caption.startswith("All rounds at concurrency 16,") for caption in captions)


def test_the_file_has_the_figures_for_programs_in_other_languages(result: Result) -> None:
    content = json.loads(to_json(result), parse_constant=pytest.fail)
    (first, *_), kind = content["summary"]["cases"], content["kind"]
    assert first["rounds"][0]["latency_p99"] > 0
    assert first["errors"] == ({"rejected": 2} if kind == "bench" else {})
    assert bool(content["summary"]["ratios"]) == (kind == "compare")
    assert bool(content["summary"]["ranking"]) == (kind == "sweep")


def test_an_unbounded_interval_is_standard_json() -> None:
    json.loads(to_json(make_comparison(rounds=1)), parse_constant=pytest.fail)


@pytest.mark.parametrize("text", ["{", "[]", "3", '{"schema": 2}', '{"schema": 2, "cases": 3}'])
def test_a_file_that_is_not_a_result_is_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "x.json").write_text(text)
    with pytest.raises(ConfigError, match="is not a result"):
        load(tmp_path / "x.json")


def test_another_schema_is_refused_with_both_numbers(tmp_path: Path) -> None:
    (tmp_path / "x.json").write_text('{"schema": 1}')
    with pytest.raises(ConfigError, match="has schema 1, this llmserve-bench reads 2"):
        load(tmp_path / "x.json")
    with pytest.raises(ConfigError, match="cannot write"):
        save(RESULTS["bench"], tmp_path / "missing" / "x.json")


def test_a_pipe_is_written_to_and_a_link_stays_one(tmp_path: Path) -> None:
    pipe, link = tmp_path / "pipe", tmp_path / "link.json"
    os.mkfifo(pipe)
    with ThreadPoolExecutor(1) as pool:
        reader = pool.submit(pipe.read_text)
        save(RESULTS["bench"], pipe)
        assert json.loads(reader.result(timeout=60))["kind"] == "bench"
    assert pipe.is_fifo()
    link.symlink_to(tmp_path / "result.json")
    save(RESULTS["bench"], link)
    assert link.is_symlink()
    assert load(tmp_path / "result.json") == RESULTS["bench"]
    with pytest.raises(ConfigError, match="cannot write"):
        save(RESULTS["bench"], tmp_path)


def test_what_answers_lose_is_a_table_and_a_picture(tmp_path: Path) -> None:
    plain = make_comparison((2, 16))
    first, second = dict.fromkeys(case.subject.name for case in plain.cases)
    losses = (
        Loss(first, 10.0, 1.0, 1.0, 2 * 10**9, 1.0),
        Loss(second, 10.5, 0.875, None, 10**9, 2 / 3),
    )
    result = replace(plain, losses=losses)
    table = tables_of(result)[-1]
    assert [row[3:] for row in table.rows] == [
        ["2", "10", "+0.0%", "100%", "100%", "100%"],
        ["1", "10.5", "+5.0%", "88%", "-", "67%"],
    ]
    assert len(plots_of(result)) == len(plots_of(plain)) + 1
    save(result, tmp_path / "result.json")
    assert load(tmp_path / "result.json") == result
    unknown = replace(plain, losses=(Loss(first), Loss(second)))
    assert {cell for row in tables_of(unknown)[-1].rows for cell in row[3:]} == {"-"}
    assert len(plots_of(unknown)) == len(plots_of(plain))


@pytest.mark.parametrize(
    ("name", "arguments", "valid"),
    [
        ("get_weather", '{"city": "Oslo"}', True),
        ("convert_money", '{"amount": 20, "currency": "yen"}', True),
        ("convert_money", '{"amount": "20", "currency": "yen"}', False),
        ("convert_money", '{"amount": true, "currency": "yen"}', False),
        ("get_weather", "{}", False),
        ("get_weather", '{"city": "Oslo", "day": 1}', False),
        ("get_weather", '["Oslo"]', False),
        ("get_weather", '{"city": "Os', False),
        ("get_wind", '{"city": "Oslo"}', False),
    ],
)
def test_a_call_is_valid_with_all_its_arguments(name: str, arguments: str, valid: bool) -> None:
    assert is_valid_call(ToolCall(0, arguments, "id", name)) == valid


def test_csv_has_one_request_per_line_and_empty_cells_for_missing_values() -> None:
    rows = list(csv.DictReader(io.StringIO(to_csv(RESULTS["bench"]))))
    assert tuple(rows[0]) == COLUMNS
    assert len(rows) == 98
    assert (rows[0]["error"], rows[0]["latency"], rows[0]["first"]) == ("rejected", "", "")
    record = RESULTS["bench"].runs[0].records[5]
    assert float(rows[5]["latency"]) == pytest.approx(record.latency, abs=1e-6)


def test_notes_report_what_makes_figures_unreliable() -> None:
    (case,) = RESULTS["bench"].cases
    (run,) = case.runs
    assert notes_of(RESULTS["bench"]) == []

    def notes_with(**changes: object) -> str:
        changed = replace(case, runs=(replace(run, **changes),))  # type: ignore[arg-type]
        return "\n".join(notes_of(make_result("bench", [changed])))

    assert "80 ms late" in notes_with(generator=replace(run.generator, late=0.08))
    assert "use more --processes" in notes_with(generator=replace(run.generator, busy=0.95))
    assert "measure for longer" in notes_with(records=())
    with_stand_in = make_result("bench", [make_case("static", stand_in=True)])
    assert notes_of(with_stand_in) == [
        "static: a stand-in answered in place of TensorRT-LLM, which differs in speed"
    ]
    assert "static (stand-in)" in tables_of(with_stand_in)[0].columns
    assert "TensorRT-LLM" in to_csv(with_stand_in)
    ended = replace(RESULTS["bench"], ended_early="no Triton answers", interrupted=True)
    assert [note.partition(":")[0] for note in notes_of(ended)] == ["interrupted", "ended early"]


def test_the_ranking_marks_variants_over_the_limit_and_has_the_spread() -> None:
    table, *_ = tables_of(make_sweep(limit=0.001))
    assert [row[-1] for row in table.rows] == ["over the limit"] * 3
    unlimited, *_ = tables_of(make_sweep(limit=None))
    assert "limits" not in unlimited.columns
    table, *_ = tables_of(make_sweep())
    assert all(" to " in row[2] for row in table.rows)


@pytest.mark.parametrize("width", [60, 120])
def test_tables_fit_the_terminal_and_lose_nothing(
    result: Result, width: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    print_tables(result)
    printed = re.sub(r"\x1b\[\d*m", "", capsys.readouterr().out)
    assert max(map(len, printed.splitlines())) <= width
    for cell in (cell for table in tables_of(result) for row in table.rows for cell in row):
        if cell.isalnum() and len(cell) < 8:
            assert cell in printed


def test_names_and_messages_are_escaped(tmp_path: Path) -> None:
    evil = "<script>alert(1)</script> | `x` & *y*"
    case = make_case("static", name=evil, failing=3)
    page = write_report(make_result("bench", [case], title=evil), tmp_path).read_text()
    assert "<script" not in page
    assert "&lt;script&gt;" in page
    assert all("<script" not in plot.svg for plot in plots_of(make_result("bench", [case])))


def test_a_report_is_written_even_without_records_or_runs(tmp_path: Path) -> None:
    (case,) = RESULTS["bench"].cases
    empty = replace(case.runs[0], records=(), seconds=1.0, server=None)
    for cases in ([replace(case, runs=(empty,))], [replace(case, runs=())]):
        for kind in ("bench", "compare", "sweep"):
            assert write_report(make_result(kind, cases), tmp_path)
