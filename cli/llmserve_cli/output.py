"""What measurements print: tables and files for data, a bar on standard error for progress."""

from __future__ import annotations

import os
import sys
from collections import Counter
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from llmserve.measure.results import Result
    from llmserve.measure.runs import Record, Run
    from llmserve.measure.table import Row

_DASH = Path("-")
_WIDEST = 200


class Meter:
    """A bar on a terminal, nothing elsewhere; it stays out of standard output."""

    def __init__(self, label: str, requests: int | None, duration: float | None) -> None:
        self._label = label
        self._requests = requests
        self._duration = duration
        self._bar: Any = None
        self._task: Any = None

    def __enter__(self) -> Meter:
        if sys.stderr.isatty() and not os.environ.get("NO_COLOR"):
            from rich.console import Console
            from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

            self._bar = Progress(
                TextColumn("{task.description}"),
                BarColumn(),
                TextColumn("{task.fields[done]} requests"),
                TimeElapsedColumn(),
                console=Console(stderr=True),
                transient=True,
            )
            self._bar.start()
            total = self._requests or self._duration
            self._task = self._bar.add_task(self._label, total=total, done=0)
        return self

    @property
    def shows(self) -> bool:
        """Whether there is a terminal to show anything on."""
        return self._bar is not None

    def show(self, done: int, seconds: float) -> None:
        """Show how far it is."""
        if self._bar:
            completed = seconds if self._requests is None else done
            self._bar.update(self._task, completed=completed, done=done)

    def next(self, label: str) -> None:
        """Begin again with another measurement."""
        if self._bar:
            self._bar.reset(self._task, description=label, done=0)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._bar:
            self._bar.stop()


def refuse_two_on_stdout(*files: Path | None) -> None:
    """Refuse two forms of the same data in one stream."""
    if sum(path == _DASH for path in files) > 1:
        raise click.UsageError("only one of --json and --csv can go to standard output")


def check_places(*files: Path | None) -> None:
    """Refuse files that cannot be written, before anything is measured for them."""
    from llmserve.errors import UsageError

    for path in files:
        folder = None if path is None or path == _DASH else path.absolute().parent
        if folder is not None and not os.access(folder, os.W_OK | os.X_OK):
            why = "cannot be written to" if folder.is_dir() else "is no folder"
            raise UsageError(f"cannot write {path}: {folder} {why}")


def told(run: Run, as_json: Path | None, as_csv: Path | None) -> None:
    """Print a run's table, or what was asked for in its place, and write its files."""
    from llmserve.measure.export import to_csv

    save_json(run, as_json)
    if as_csv == _DASH:
        click.echo(to_csv(run), nl=False)
    elif as_csv is not None:
        _write(as_csv, to_csv(run))
    if _DASH not in (as_json, as_csv):
        print_runs([run])
    say_what_is_wrong(run)


def save_json(result: Result, path: Path | None) -> None:
    """Write a result as JSON, to standard output where the path is a dash."""
    from llmserve.measure.results import save, to_json

    if path == _DASH:
        import json

        click.echo(json.dumps(to_json(result), ensure_ascii=False))
    elif path is not None:
        save(result, path)


def print_runs(runs: Sequence[Run]) -> None:
    """Print runs side by side, and beside each what other tools measured."""
    from llmserve.measure.table import rows, shown

    columns: list[str] = []
    texts: dict[str, list[str]] = {}
    for run, table in zip(runs, shown([rows(run) for run in runs]), strict=True):
        columns += [run.subject.name, *(tool.tool for tool in run.tools)]
        for row in table:
            cells = [row.text, *(_of_tool(tool.figures.get(row.name), row) for tool in run.tools)]
            texts.setdefault(row.label, []).extend(cells)
    print_table("Stat", columns, texts)


def print_table(first: str, columns: Sequence[str], texts: dict[str, list[str]]) -> None:
    """Print rows by their labels; a pipe gets the same text as a terminal."""
    from rich import box
    from rich.console import Console
    from rich.table import Table

    table = Table(box=box.ASCII, show_edge=True)
    table.add_column(first)
    for column in columns:
        table.add_column(column, justify="right", overflow="fold")
    for label, cells in texts.items():
        table.add_row(label, *cells)
    width = None if sys.stdout.isatty() else _WIDEST
    # What is printed are names and messages of others, never markup.
    Console(width=width, highlight=False, markup=False, emoji=False).print(table)


def _of_tool(value: float | None, row: Row) -> str:
    if value is None:
        return ""
    return f"{value * 1000 if '(ms)' in row.label else value:.2f}"


def say_what_is_wrong(run: Run) -> None:
    """Say on standard error what must be known to read the figures."""
    if run.interrupted:
        click.echo("llmserve: interrupted, these are the figures until then", err=True)
    if run.ended_early:
        click.echo(f"llmserve: ended early: {run.ended_early}", err=True)
    if not run.records:
        click.echo(
            f"llmserve: no request was done within {run.seconds:.3g} s, {run.unfinished} were "
            "under way: measure for longer",
            err=True,
        )
    if run.loader.warning:
        click.echo(f"llmserve: {run.loader.warning}", err=True)
    if "no tokenizer at hand" in run.load.dataset:
        click.echo(
            "llmserve: the model's tokenizer is not at hand, so prompts have roughly the length "
            "asked for: name it with --repository or --tokenizer",
            err=True,
        )
    say_stand_ins([run])
    for kind, (count, message) in _errors(run.records).items():
        click.echo(f"llmserve: {count} x {kind}: {message}", err=True)


def say_stand_ins(runs: Sequence[Run]) -> None:
    """Say for what stand-ins answered, which nobody may take for the real thing."""
    from llmserve.measure.standins import notes

    for note in notes((run.subject.name, run) for run in runs):
        click.echo(f"llmserve: {note}", err=True)


def _errors(records: Sequence[Record]) -> dict[str, tuple[int, str]]:
    kinds = Counter(record.error for record in records if record.error)
    found = {}
    for kind, count in kinds.items():
        messages = Counter(r.message or "" for r in records if r.error == kind)
        found[kind] = (count, messages.most_common(1)[0][0])
    return found


def write_report(result: Result, folder: Path | None) -> None:
    """Write the report of a result into a folder."""
    if folder is None:
        return
    try:
        written = import_module("llmserve.report").write(result, folder)
    except ModuleNotFoundError as error:
        from llmserve.errors import UsageError

        raise UsageError(
            f"reports need a package that is not here ({error.name})",
            mend="pip install 'llmserve[report]'",
        ) from None
    for path in written or [folder]:
        click.echo(f"llmserve: wrote {path}", err=True)


def _write(path: Path, text: str) -> None:
    from llmserve.errors import UsageError

    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UsageError(f"cannot write {path}: {error.strerror}") from None
