"""Progress on stderr: one line that changes on a terminal, plain lines elsewhere."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING

import click

from llmserve_cli.terminal import printable

if TYPE_CHECKING:
    from rich.status import Status as RichStatus


class Status:
    """Shows what a long operation is doing; it prints nothing to stdout.

    >>> with Status("building") as status:  # doctest: +SKIP
    ...     status.update("copying weights")
    """

    def __init__(self, message: str) -> None:
        self._message = message
        self._live: RichStatus | None = None

    def __enter__(self) -> Status:
        if sys.stderr.isatty() and not os.environ.get("NO_COLOR"):
            from rich.console import Console

            self._live = Console(stderr=True).status(self._message)
            self._live.start()
        return self

    def update(self, message: str) -> None:
        """Show a new message; a repeated message is not printed again."""
        if message == self._message:
            return
        self._message = message
        if self._live:
            from rich.markup import escape

            self._live.update(escape(message))
        else:
            click.echo(f"llmserve: {message}", err=True)

    def note(self, line: str) -> None:
        """Print a line that stays."""
        if self._live:
            self._live.console.print(printable(line), markup=False, highlight=False)
        else:
            click.echo(printable(line), err=True)

    def __exit__(self, *error: object) -> None:
        if self._live:
            self._live.stop()
