"""What a report says of its figures, and when it says nothing."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from llmserve.measure.results import Comparison, Sweep
from llmserve.report import page, verdicts, write
from tests.unit.report_examples import make_comparison, make_run, make_sweep


def findings(comparison: Comparison) -> str:
    return "\n".join(verdicts.findings(comparison, "concurrency 16"))


def test_conclusions_have_the_ratio_and_its_spread() -> None:
    comparison = make_comparison(requests=40)
    row = next(row for row in comparison.ratios if row.metric == "requests_per_second")
    said = f"served {row.ratio:.2f} x the requests per second of static, which is better"
    assert f"{said} ({row.low:.2f} to {row.high:.2f} over 3 rounds)" in findings(comparison)


def test_a_difference_that_the_spread_swallows_is_not_called_one() -> None:
    comparison = make_comparison(requests=30)
    ratios = [
        replace(row, ratio=1.1, low=0.9, high=1.3, verdict="no difference", why="it holds 1")
        for row in comparison.ratios
    ]
    said = findings(replace(comparison, ratios=tuple(ratios)))
    assert (
        "the difference between inflight and static is within the spread (1.10 x; it holds 1)"
        in said
    )
    assert "better" not in said
    assert "worse" not in said


def test_one_round_is_said_to_tell_nothing_of_the_spread(tmp_path: Path) -> None:
    comparison = make_comparison(requests=20, rounds=1)
    ratios = [
        replace(row, low=0.0, high=float("inf"), verdict="no difference", why="1 round is too few")
        for row in comparison.ratios
    ]
    comparison = replace(comparison, ratios=tuple(ratios))
    assert "cannot be told from chance" in findings(comparison)
    write(comparison, tmp_path)
    assert "| 0.00 x | any |" in (tmp_path / "report.md").read_text()


def test_what_makes_figures_doubtful_comes_first() -> None:
    run = make_run("static", requests=20, failing=3)
    run = replace(run, interrupted=True, loader=replace(run.loader, warning="it came late"))
    warnings = "\n".join(page(run).warnings)
    assert "interrupted" in warnings
    assert "it came late" in warnings
    assert "3 requests failed" in warnings


def test_what_a_setting_does_is_judged_within_the_limit() -> None:
    from llmserve.report.metrics import metric
    from llmserve.report.variants import setting_figures

    def best(sweep: Sweep, setting: str) -> list[str] | None:
        ranked = [part for name in sweep.ranking for part in sweep.variants if part.name == name]
        figures = setting_figures(sweep, ranked, metric("output_tokens_per_second"))
        found = [figure for figure in figures if figure and figure.title.startswith(setting)]
        return [row[1] for row in found[0].table.rows] if found and found[0].table else None

    # At 16 requests under way, no variant is within 1.3 seconds: there is nothing to hold 4 to.
    assert len(best(make_sweep(None), "concurrency") or []) == 2
    assert best(make_sweep(1.3), "concurrency") is None
    assert best(make_sweep(None), "batching") != best(make_sweep(1.3), "batching")
