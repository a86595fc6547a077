"""Progress on stderr: one line that changes on a terminal, plain lines elsewhere."""

from __future__ import annotations

import os
import shutil
import sys
from time import monotonic
from typing import TYPE_CHECKING

import click

from llmserve.texts import printable

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.status import Status as RichStatus

    from llmserve.builder.progress import PartDone

_BESIDE_WORDS = 46
"""The columns that a spinner, a bar, a share and the time left take."""


class Status:
    """Shows what a long operation is doing; it prints nothing to stdout.

    >>> with Status("building") as status:  # doctest: +SKIP
    ...     status.update("copying weights")
    """

    def __init__(self, message: str) -> None:
        self._message = message
        self._live: RichStatus | None = None
        self._since = 0.0

    def __enter__(self) -> Status:
        if sys.stderr.isatty() and not os.environ.get("NO_COLOR"):
            from rich.console import Console

            self._live = Console(stderr=True).status(self._message)
            self._live.start()
        return self

    def update(self, message: str) -> None:
        """Show a new message; a repeated message is not printed again."""
        from llmserve.builder.progress import Note, PartDone

        if isinstance(message, Note):
            self.note(f"llmserve: {message}")
            return
        is_new = message != self._message
        if is_new:
            self._message, self._since = message, monotonic()
        if self._live and isinstance(message, PartDone):
            self._live.update(_bar(message, monotonic() - self._since))
        elif not is_new:
            return
        elif self._live:
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


def _bar(part: PartDone, seconds: float) -> RenderableType:
    """Return words, a bar and the time left, if it goes on as it went."""
    from rich.progress_bar import ProgressBar
    from rich.table import Table
    from rich.text import Text

    left = round(seconds * (1 - part.share) / part.share) if part.share else 0
    minutes = f"{left // 60}:{left % 60:02} left" if left else ""
    bar = ProgressBar(total=1, completed=part.share, width=24)
    grid = Table.grid(padding=(0, 1))
    # One line, however long a name is: the words give way to the rest of it.
    room = shutil.get_terminal_size().columns - _BESIDE_WORDS
    grid.add_column(no_wrap=True, overflow="ellipsis", max_width=max(room, 10))
    grid.add_row(Text(printable(part)), bar, f"{part.share:.0%}", minutes)
    return grid
