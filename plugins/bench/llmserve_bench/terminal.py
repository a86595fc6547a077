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
from llmserve_bench.tables import Table, tables_of

_PIPE_WIDTH = 200


class Progress:
    """A line that changes on a terminal, and elsewhere a line for each step."""

    def __init__(self) -> None:
        self._step = ""
        on_terminal = sys.stderr.isatty() and not os.environ.get("NO_COLOR")
        self._status = Console(stderr=True).status("") if on_terminal else None

    def __enter__(self) -> Progress:
        if self._status:
            self._status.start()
        return self

    def __exit__(self, *error: object) -> None:
        if self._status:
            self._status.stop()

    def step(self, message: str) -> None:
        if self._status:
            self._status.update(escape(message))
        elif message != self._step:
            click.echo(f"llmserve: {message}", err=True)
        self._step = message

    def count(self, done: int, seconds: float) -> None:
        if self._status:
            self._status.update(escape(f"{self._step}: {done} requests in {seconds:.0f} s"))


def print_tables(result: Result) -> None:
    tables = tables_of(result)
    for table in tables:
        if len(tables) > 1:
            click.echo(table.title)
        _print_table(table)


def _print_table(table: Table) -> None:
    """Print a table, as wide as the terminal at most."""
    width = None if sys.stdout.isatty() else _PIPE_WIDTH
    made = RichTable(box=box.ASCII)
    for at, column in enumerate(table.columns):
        side: Any = "left" if table.is_text(at) else "right"
        made.add_column(column, justify=side, overflow="fold")
    for row in table.rows:
        made.add_row(*row)
    console = Console(width=width, highlight=False, markup=False, emoji=False)
    # Not printed by rich, which ends the process where nobody reads it.
    with console.capture() as text:
        console.print(made)
    click.echo(text.get(), nl=False)
