"""The output of a command: tables, a page, CSV, and JSON that can be read back."""

from __future__ import annotations

import csv
import io
import json
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from importlib.resources import files
from math import inf
from pathlib import Path
from statistics import fmean, median

import click
from jinja2 import Environment
from pydantic import TypeAdapter
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.status import Status
from rich.table import Table as RichTable

from llmserve.errors import ConfigError, UsageError
from llmserve_bench.figures import (
    FIGURES,
    Figure,
    figures_of,
    number,
    ranking,
    ratios_of,
    rounds_of,
    summary,
    throughput_figure,
)
from llmserve_bench.results import Case, Record, Result, Run

SCHEMA = 2
COLUMNS = (
    "index", "scheduled", "sent", "first", "done", "latency", "ttft", "time_between_tokens",
    "input_tokens", "output_tokens", "pieces", "finish_reason", "error", "message", "stand_in",
    "adapter", "image",
)  # fmt: skip
_OF_NAMES = (
    "requests", "failed", "output_tokens_per_second", "latency_p50", "latency_p99", "ttft_p50",
)  # fmt: skip
STDOUT = Path("-")
_PIPE_WIDTH = 200
_BUSY = 0.8
_LATE = 0.005
_LATE_SHARE = 0.05
"""Delays of the generator that need no note: in seconds, and as a share of time to first token."""


class Progress(Status):
    """A status line on a terminal; elsewhere, one line per step."""

    def __init__(self) -> None:
        on_terminal = sys.stderr.isatty() and not os.environ.get("NO_COLOR")
        super().__init__("", console=Console(stderr=True, force_terminal=on_terminal))
        self._step = ""

    def step(self, message: str) -> None:
        if not self.console.is_terminal and message != self._step:
            click.echo(f"llmserve: {message}", err=True)
        self._step = message
        self.update(escape(message))

    def count(self, done: int, seconds: float) -> None:
        self.update(escape(f"{self._step}: {done} requests in {seconds:.0f} s"))


def check_outputs(report: Path | None, *outputs: Path | None) -> None:
    """Refuse outputs that could not be written at the end."""
    if outputs.count(STDOUT) > 1:
        raise click.UsageError("only one of --json and --csv can go to standard output")
    folders = [path.absolute().parent for path in outputs if path not in (None, STDOUT)]
    if report is not None:
        # It is created, with its parents.
        ancestors = (report.absolute(), *report.absolute().parents)
        folders.append(next(folder for folder in ancestors if folder.exists()))
    for folder in folders:
        if not folder.is_dir():
            raise UsageError(f"{folder} is not a folder", hint="name another folder")
        if not os.access(folder, os.W_OK | os.X_OK):
            raise UsageError(f"{folder} is not writable", hint="name another folder")


def write(result: Result, report: Path | None, as_json: Path | None, as_csv: Path | None) -> None:
    try:
        # Files first: the reader of standard output may exit before the end.
        if as_json and as_json != STDOUT:
            save(result, as_json)
        if as_csv and as_csv != STDOUT:
            as_csv.write_text(to_csv(result), encoding="utf-8")
        if report:
            page = write_report(result, report)
    finally:
        if as_json == STDOUT:
            click.echo(to_json(result))
        elif as_csv == STDOUT:
            click.echo(to_csv(result), nl=False)
        else:
            print_tables(result)
        for note in notes_of(result):
            click.echo(f"llmserve: {note}", err=True)
    if report:
        click.echo(f"llmserve: wrote {page}", err=True)


@dataclass(frozen=True)
class Table:
    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]

    def is_text(self, column: int) -> bool:
        """Whether a column contains words, which are aligned left, and not numbers."""
        return column == 0 or any(row[column][:1].isalpha() for row in self.rows)


def tables_of(result: Result) -> list[Table]:
    tables = [_figures(result, load) for load in result.loads]
    if result.kind == "compare":
        tables = [*(_ratios(result, load) for load in result.loads), *tables, _losses(result)]
    elif result.kind == "sweep":
        rows = [(case.name, case.state, case.why) for case in result.cases if case.state != "done"]
        unfinished = Table("Not completed", ("Variant", "state", "reason"), rows)
        tables = [_ranking(result), unfinished]
    for case in result.cases:
        tables += _by_name("adapter", case, case.load.adapters, lambda record: record.adapter)
        images = case.load.images
        tables += _by_name("image", case, images, lambda each: each.image, _file_name)
    return [table for table in [*tables, _failures(result)] if table.rows]


def notes_of(result: Result) -> list[str]:
    notes = ["interrupted: these are the figures so far"] if result.interrupted else []
    if result.ended_early:
        notes.append(f"ended early: {result.ended_early}")
    notes += result.problems
    for part in _distinct(part for case in result.cases for part in case.stand_ins):
        names = _distinct(case.subject.name for case in result.cases if part in case.stand_ins)
        notes.append(
            f"{', '.join(names)}: a stand-in answered in place of {part}, which differs in speed"
        )
    notes += [
        f"no request finished within {run.seconds:.3g} s: measure for longer"
        for run in result.runs
        if not run.records
    ]
    if any("estimated" in case.load.prompts for case in result.cases):
        notes.append(
            "the model's tokenizer was not found, so the prompts' lengths are only approximate: "
            "name it with --repository or --tokenizer"
        )
    return notes + _notes_on_generator(result.runs)


def _notes_on_generator(runs: Sequence[Run]) -> list[str]:
    """Return a note if the load generator may have distorted the figures."""
    if (busy := max((run.generator.busy for run in runs), default=0.0)) > _BUSY:
        return [
            f"the load generator used {busy:.0%} of a core and may have been the bottleneck: "
            "use more --processes"
        ]
    # Relative to what is measured: 50 ms is little in an answer of 10 s but much in one of 60 ms.
    for run in sorted(runs, key=lambda run: -run.generator.late):
        first = median(record.first_token for record in run.good) if run.good else inf
        if (late := run.generator.late) > max(_LATE, _LATE_SHARE * first):
            return [
                f"the load generator was up to {late * 1000:.0f} ms late: the machine was busy, "
                "and times may be off by that much"
            ]
    return []


def conditions_of(result: Result) -> dict[str, str]:
    cases, machine, load = result.cases, result.machine, result.cases[0].load
    end = f"{load.requests} requests" if load.requests else f"{load.duration:g} s"
    arrivals = f"{load.arrivals} arrivals, " if load.rate else ""
    limits = {"latency": load.limit_latency, "first token": load.limit_ttft}
    cost = max((run.generator.busy for run in result.runs), default=0.0)
    hardware = (machine.get("cpu"), f"{machine.get('cores')} cores", machine.get("gpu"))
    builds = (f"{c.subject.name}: {_settings(c.subject.build)}" for c in cases if c.subject.build)
    engines = (f"{c.subject.name}: {c.subject.engine}" for c in cases if c.subject.engine)
    conditions = {
        "Load": f"{', '.join(result.loads)}; {arrivals}{end}, {load.warmup} for warm-up",
        "Rounds": "" if result.kind == "bench" else str(result.rounds),
        "Prompts": "; ".join(_distinct(case.load.prompts for case in cases)),
        "Request options": _settings(load.options),
        "Adapters": ", ".join(name or "none" for name in load.adapters),
        "Images": ", ".join(Path(name).name or "none" for name in load.images),
        "Answers": "streamed" if load.stream else "in one piece",
        "Limits": ", ".join(f"{name} {v * 1000:g} ms" for name, v in limits.items() if v),
        "Seed": str(load.seed),
        "Builds": "; ".join(_distinct(builds)),
        "Engines": "; ".join(_distinct(engines)),
        "Server": ", ".join(_distinct(case.subject.server or case.subject.url for case in cases)),
        "Machine": ", ".join(part for part in hardware if part),
        "Software": f"llmserve {machine.get('llmserve')}, Python {machine.get('python')}",
        "Load generator": f"up to {number(cost * 100)} % of a core, {load.processes} process(es)",
        "Started": result.started.replace("T", " ").replace("+00:00", " UTC"),
    }
    return {name: value for name, value in conditions.items() if value}


def _figures(result: Result, load: str) -> Table:
    cases = [case for case in result.cases if case.load.label == load and case.runs]
    by_case = [rounds_of(case) for case in cases]
    tools = [tool for case in cases for run in case.runs for tool in run.tools]
    rows = []
    for figure in dict.fromkeys([*FIGURES.values(), *(f for rounds in by_case for f in rounds)]):
        cells = [_mean(figure, rounds.get(figure, ())) for rounds in by_case]
        if any(cells):
            by_tool = [tool.figures.get(figure.name) for tool in tools]
            texts = ["" if value is None else figure.text(value) for value in by_tool]
            rows.append([figure.title, *(cell or "-" for cell in cells), *texts])
    means = ": mean (lowest to highest)" if result.rounds > 1 else ""
    names = [*(case.name for case in cases), *(tool.tool for tool in tools)]
    return Table(f"Figures, {load}{means}", ["Figure", *names], rows)


def _by_name(
    what: str,
    case: Case,
    names: Sequence[str],
    name_of: Callable[[Record], str],
    title_of: Callable[[str], str] = str,
) -> list[Table]:
    """Return the figures of the requests for each name, which ran beside the others."""
    shown = [FIGURES[name] for name in _OF_NAMES]
    rows = []
    for name in dict.fromkeys(names):
        found = [
            figures_of(replace(run, records=records, server=None), case.load)
            for run in case.runs
            for records in [tuple(each for each in run.records if name_of(each) == name)]
        ]
        cells = [_mean(each, [f[each.name] for f in found if each.name in f]) for each in shown]
        rows.append([title_of(name) or "none", *(cell or "-" for cell in cells)])
    columns = [what.capitalize(), *(figure.title for figure in shown)]
    return [Table(f"By {what}, {case.name}, {case.load.label}", columns, rows)] if rows else []


def _file_name(path: str) -> str:
    return Path(path).name


def _mean(figure: Figure, values: Sequence[float]) -> str:
    if not values:
        return ""
    low, high = figure.text(min(values)), figure.text(max(values))
    return low if low == high else f"{figure.text(fmean(values))} ({low} to {high})"


def _ratios(result: Result, load: str) -> Table:
    rows = [
        (
            FIGURES[ratio.figure].label,
            ratio.name,
            number(ratio.ratio),
            "-" if ratio.high is None else f"{number(ratio.low)} to {number(ratio.high)}",
        )
        for ratio in ratios_of(result)
        if ratio.load == load
    ]
    first = result.cases[0].name
    columns = "Figure", "model", f"ratio to {first}", "95 % interval"
    return Table(f"Compared with {first}, {load}", columns, rows)


def _losses(result: Result) -> Table:
    """Return what a choice costs: how fast each is under each load, its memory, its answers."""
    rate = throughput_figure(result)
    rows = []
    for loss in result.losses:
        cases = {c.load.label: c for c in result.cases if c.subject.name == loss.name}
        rates = [
            _mean(rate, rounds_of(cases[load]).get(rate, ())) if load in cases else ""
            for load in result.loads
        ]
        first = result.losses[0].perplexity
        change = loss.perplexity / first - 1 if loss.perplexity and first else None
        kept = loss.alike, loss.json, loss.tool_calls
        rows.append(
            [
                loss.name,
                *(rate or "-" for rate in rates),
                "-" if loss.memory is None else number(loss.memory / 1e9),
                "-" if loss.perplexity is None else number(loss.perplexity),
                "-" if change is None else f"{change:+.1%}",
                *("-" if each is None else f"{each:.0%}" for each in kept),
            ]
        )
    rates = [f"{rate.label}, {load}" for load in result.loads]
    columns = ("Model", *rates, "memory (GB)", "perplexity", "change", "tokens alike", "JSON kept")
    columns = (*columns, "calls kept")
    return Table("What each costs", columns, rows)


def _ranking(result: Result) -> Table:
    rows, rate = [], throughput_figure(result)
    has_limits = any(case.load.limit_latency or case.load.limit_ttft for case in result.cases)
    for rank, case in enumerate(ranking(result.cases), 1):
        row = [case.name, str(rank), _mean(rate, case.rounds), number(case.latency_p99 * 1000)]
        limits = "within" if case.within_limits else "over the limit"
        rows.append([*row, limits] if has_limits else row)
    columns = ["Variant", "rank", f"{rate.label} (rounds)", "P99 latency (ms)"]
    return Table("Ranking", [*columns, "limits"] if has_limits else columns, rows)


def _failures(result: Result) -> Table:
    rows = []
    for case in result.cases:
        records = [record for run in case.runs for record in run.records if record.error]
        for kind, count in Counter(record.error or "" for record in records).items():
            messages = Counter(record.message or "" for record in records if record.error == kind)
            rows.append((case.name, kind, str(count), messages.most_common(1)[0][0]))
    return Table("Failed requests", ("Model", "failure", "requests", "message"), rows)


def _settings(settings: Mapping[str, object]) -> str:
    return ", ".join(f"{key} {value}" for key, value in settings.items())


def _distinct(texts: Iterable[str]) -> list[str]:
    return [text for text in dict.fromkeys(texts) if text]


def print_tables(result: Result) -> None:
    """Print the tables of a result, at most as wide as the terminal."""
    width = None if sys.stdout.isatty() else _PIPE_WIDTH
    console = Console(width=width, highlight=False, markup=False, emoji=False)
    tables = tables_of(result)
    for table in tables:
        rich_table = RichTable(box=box.ASCII)
        for at, column in enumerate(table.columns):
            rich_table.add_column(
                column, justify="left" if table.is_text(at) else "right", overflow="fold"
            )
        for row in table.rows:
            rich_table.add_row(*row)
        # Printing with rich would end the process if standard output is closed.
        with console.capture() as text:
            console.print(rich_table)
        title = f"{table.title}\n" if len(tables) > 1 else ""
        click.echo(f"{title}{text.get()}", nl=False)


def write_report(result: Result, folder: Path) -> Path:
    """Write a self-contained page."""
    # Imported here because matplotlib takes as long to import as everything else together.
    from llmserve_bench.plots import plots_of

    environment = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    source = files("llmserve_bench") / "templates" / "report.html.j2"
    page = environment.from_string(source.read_text(encoding="utf-8")).render(
        result=result,
        notes=notes_of(result),
        conditions=conditions_of(result),
        tables=tables_of(result),
        plots=plots_of(result),
    )
    path = folder / "report.html"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        path.write_text(page, encoding="utf-8")
    except OSError as error:
        raise UsageError(f"cannot write a report to {folder}: {error.strerror or error}") from None
    return path


def to_json(result: Result) -> str:
    content = {"schema": SCHEMA, **asdict(result), "summary": summary(result)}
    return json.dumps(content, ensure_ascii=False)


def save(result: Result, path: Path) -> None:
    """Write a result to a file atomically; a pipe or a device is written to directly."""
    atomic = path.is_file() or not path.exists()
    path = path.resolve() if atomic else path  # Replaces the target of a link, not the link.
    draft = path.with_name(f".{path.name}.{os.getpid()}") if atomic else path
    try:
        draft.write_text(to_json(result) + "\n", encoding="utf-8")
        draft.replace(path)
    except OSError as error:
        if atomic:
            draft.unlink(missing_ok=True)
        raise ConfigError(f"cannot write {path}: {error.strerror or error}") from None


def load(path: Path) -> Result:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        schema = content["schema"]
        if schema == SCHEMA:
            return TypeAdapter(Result).validate_python(content)
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror or error}") from None
    except (ValueError, KeyError, TypeError, RecursionError):
        raise ConfigError(f"{path} is not a result file of llmserve-bench") from None
    raise ConfigError(
        f"{path} has schema {schema}, this llmserve-bench reads {SCHEMA}",
        hint="measure again, or use the llmserve that wrote it",
    )


def to_csv(result: Result) -> str:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(COLUMNS)
    for case in result.cases:
        for record in (record for run in case.runs for record in run.records):
            times = ["" if value is None else f"{value:.6f}" for value in _times(record)]
            counts = record.input_tokens, record.output_tokens, len(record.pieces)
            end = record.finish_reason, record.error, record.message, ", ".join(case.stand_ins)
            writer.writerow([record.index, *times, *counts, *end, record.adapter, record.image])
    return text.getvalue()


def _times(record: Record) -> list[float | None]:
    first = record.pieces[0] if record.pieces else None
    times = [record.scheduled, record.sent, first, record.done]
    if record.error is not None:
        return [*times, None, None, None]
    streamed = len(record.pieces) > 1
    return [*times, record.latency, record.first_token if streamed else None, record.token_time]
