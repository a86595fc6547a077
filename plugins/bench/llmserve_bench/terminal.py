"""What the commands print: tables on standard output, all else on standard error."""

from __future__ import annotations

import os
import sys
from typing import Any

import click
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table as RichTable

from llmserve_bench.results import Result
from llmserve_bench.tables import Table, notes_of, tables_of

_PIPE_WIDTH = 200


class Progress:
    """A line that changes on a terminal, and elsewhere a line for each step."""

    def __init__(self) -> None:
        self._step = ""
        shown = sys.stderr.isatty() and not os.environ.get("NO_COLOR")
        self._line = Console(stderr=True).status("") if shown else None

    def __enter__(self) -> Progress:
        if self._line:
            self._line.start()
        return self

    def __exit__(self, *error: object) -> None:
        if self._line:
            self._line.stop()

    def step(self, message: str) -> None:
        """Say what is done next; the same is not said twice."""
        if self._line:
            self._line.update(escape(message))
        elif message != self._step:
            click.echo(f"llmserve: {message}", err=True)
        self._step = message

    def show(self, done: int, seconds: float) -> None:
        if self._line:
            self._line.update(escape(f"{self._step}: {done} requests in {seconds:.0f} s"))


def print_result(result: Result) -> None:
    tables = tables_of(result)
    for table in tables:
        if len(tables) > 1:
            click.echo(table.title)
        print_table(table)


def print_notes(result: Result) -> None:
    for note in notes_of(result):
        click.echo(f"llmserve: {note}", err=True)


def print_table(table: Table) -> None:
    """Print a table as wide as the terminal; columns that do not fit follow below.

    Cells fold between words. A word is broken only where it is wider than half of the terminal.
    """
    width = Console().width if sys.stdout.isatty() else _PIPE_WIDTH
    console = Console(width=width, highlight=False, markup=False, emoji=False)
    cells = [[row[at] for row in (table.columns, *table.rows)] for at in range(len(table.columns))]
    longest = [max(map(len, own)) for own in cells]
    words = [max(len(word) for cell in own for word in [*cell.split(), ""]) for own in cells]
    words = [min(own, width // 2 - 4) for own in words]
    waiting = list(range(1, len(cells)))
    while waiting:
        shown = [0, waiting.pop(0)]
        while waiting and sum(words[at] + 3 for at in [*shown, waiting[0]]) < width:
            shown.append(waiting.pop(0))
        widths = {at: longest[at] for at in shown}
        while sum(widths.values()) + 3 * len(widths) >= width:
            # Rich would cut off the last column where several have to fold.
            widths[max(shown, key=lambda at: widths[at] - words[at])] -= 1
        made = RichTable(box=box.ASCII)
        for at in shown:
            side: Any = "left" if table.is_text(at) else "right"
            made.add_column(table.columns[at], justify=side, overflow="fold", width=widths[at])
        for row in table.rows:
            made.add_row(*(row[at] for at in shown))
        console.print(made)
