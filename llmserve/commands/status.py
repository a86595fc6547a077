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

_BAR = 24
_BESIDE_WORDS = 22
"""The columns that a spinner, a share and the time left take."""
_FEWEST = 10
"""The columns of words, or of a bar, that are worth showing."""
_EVERY = 30.0
"""The seconds after which it is said how far a part is, where there is no terminal."""


class Status:
    """Shows what a long operation is doing; it prints nothing to stdout.

    >>> with Status("building") as status:  # doctest: +SKIP
    ...     status.update("copying weights")
    """

    def __init__(self, message: str) -> None:
        self._message = message
        self._live: RichStatus | None = None
        self._since = self._said = 0.0
        self._notes: set[str] = set()

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
            if message not in self._notes:
                self._notes.add(message)
                self.note(f"llmserve: {message}")
            return
        is_new = message != self._message
        if is_new:
            self._message, self._since = message, monotonic()
        if self._live and isinstance(message, PartDone):
            self._live.update(_bar(message, monotonic() - self._since))
        elif self._live and is_new:
            from rich.markup import escape

            self._live.update(escape(message))
        elif not self._live:
            self._print(message, is_new=is_new)

    def _print(self, message: str, *, is_new: bool) -> None:
        """Print a line for what is new, and now and then one for how much of a part is done."""
        from llmserve.builder.progress import PartDone

        now = monotonic()
        if is_new:
            self._said = now
            click.echo(f"llmserve: {printable(message)}", err=True)
        elif isinstance(message, PartDone) and now - self._said >= _EVERY:
            self._said = now
            parts = (f"{message.share:.0%}", message.amount, _left(message, now - self._since))
            said = ", ".join(part for part in parts if part)
            click.echo(f"llmserve: {printable(message)}: {said}", err=True)

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
    """Return one line: words, a bar, the share and the time left, however narrow a terminal is."""
    from rich.progress_bar import ProgressBar
    from rich.table import Table
    from rich.text import Text

    left = _left(part, seconds)
    # What is least needed gives way: the bar, then the words, which are told before.
    room = shutil.get_terminal_size().columns - _BESIDE_WORDS - (len(part.amount) + 1)
    has_bar = room - _BAR - 1 >= _FEWEST
    room -= _BAR + 1 if has_bar else 0
    cells: list[RenderableType] = []
    grid = Table.grid(padding=(0, 1))
    if room >= _FEWEST:
        grid.add_column(no_wrap=True, overflow="ellipsis", max_width=room)
        cells.append(Text(printable(part)))
    if has_bar:
        cells.append(ProgressBar(total=1, completed=part.share, width=_BAR))
    cells += [f"{part.share:.0%}", Text(part.amount, overflow="ellipsis", no_wrap=True), left]
    grid.add_row(*(cell for cell in cells if cell))
    return grid


def _left(part: PartDone, seconds: float) -> str:
    """Say how long the rest takes, by default if it goes on as it went."""
    left = part.left
    if left is None and not part.amount and part.share:
        left = seconds * (1 - part.share) / part.share
    if not left or round(left) < 1:
        return ""
    minutes, rest = divmod(round(left), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02} left" if hours else f"{minutes}:{rest:02} left"
