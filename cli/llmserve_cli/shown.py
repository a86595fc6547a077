"""Comparisons and sweeps on a terminal."""

from __future__ import annotations

from collections.abc import Callable
from statistics import fmean
from types import TracebackType
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from llmserve.measure.runs import Run
    from llmserve.measure.series import Comparison, Ratio, Sweep
    from llmserve_cli.loads import Asked


class Steps:
    """A bar for each of many measurements, and a line for each where there is no terminal."""

    def __init__(self, asked: Asked) -> None:
        from llmserve_cli.output import Meter

        self._meter = Meter("", asked.requests, asked.duration)

    def __enter__(self) -> Steps:
        self._meter.__enter__()
        return self

    def begin(self, label: str, at: int, of: int) -> Callable[[int, float], None]:
        """Go on to the next measurement."""
        if self._meter.shows:
            self._meter.next(f"{at + 1}/{of} {label}")
        else:
            click.echo(f"llmserve: {at + 1}/{of} {label}", err=True)
        return self._meter.show

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._meter.__exit__(kind, error, trace)


def print_comparison(found: Comparison) -> None:
    """Print the means over rounds of every subject, a table per load, then the ratios."""
    from llmserve_cli.output import print_table, say_stand_ins

    for load in found.loads:
        cells = [cell for cell in found.cells if cell.load == load and cell.runs]
        if not cells:
            continue
        texts: dict[str, list[str]] = {}
        for at, cell in enumerate(cells):
            for label, value in _means(cell.runs).items():
                texts.setdefault(label, ["-"] * len(cells))[at] = f"{value:.2f}"
        click.echo(f"{load}, means of {len(cells[0].runs)} rounds")
        print_table("Stat", [cell.subject for cell in cells], texts)
        _print_ratios([ratio for ratio in found.ratios if ratio.load == load])
    say_stand_ins([run for cell in found.cells for run in cell.runs])
    if found.interrupted:
        click.echo("llmserve: interrupted, these are the rounds until then", err=True)


def print_sweep(found: Sweep) -> None:
    """Print all variants, the best first and those that were stopped last."""
    from llmserve.measure.standins import MARK, stood_in
    from llmserve_cli.output import print_table, say_stand_ins

    places = {name: at for at, name in enumerate(found.ranking)}
    order = sorted(
        found.variants, key=lambda v: (places.get(v.name, len(places)), -(v.throughput or 0.0))
    )
    texts = {}
    for variant in order:
        place = places.get(variant.name)
        latency = "-" if variant.latency is None else f"{variant.latency * 1000:.1f}"
        texts[f"{variant.name}{MARK if stood_in(variant.runs) else ''}"] = [
            "-" if place is None else str(place + 1),
            "-" if variant.throughput is None else f"{variant.throughput:.1f}",
            latency,
            str(len(variant.runs)),
            variant.state if variant.within is not False else f"{variant.state}, over the limit",
            variant.why,
        ]
    columns = ["rank", "OP tokens/sec", "P99 latency (ms)", "rounds", "state", "why"]
    print_table("Variant", columns, texts)
    say_stand_ins([run for variant in order for run in variant.runs])


def _means(runs: tuple[Run, ...]) -> dict[str, float]:
    from llmserve.measure.table import rows

    values: dict[str, list[float]] = {}
    for run in runs:
        for row in rows(run):
            if row.value is not None:
                values.setdefault(row.label, []).append(row.value)
    return {label: fmean(found) for label, found in values.items()}


def _print_ratios(ratios: list[Ratio]) -> None:
    from llmserve_cli.output import print_table

    if not ratios:
        return
    texts = {
        f"{ratio.subject} / {ratio.against}: {ratio.metric.replace('_', ' ')}": [
            f"{ratio.ratio:.2f}",
            f"{ratio.low:.2f} to {ratio.high:.2f}",
            ratio.verdict,
        ]
        for ratio in ratios
    }
    print_table("Ratio", ["ratio", "95 % interval", "verdict"], texts)
