"""How plugins add commands to the command line."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    import click

C = TypeVar("C")


def section(name: str) -> Callable[[C], C]:
    """Put a command under a heading of ``llmserve --help``: Serve, Measure or Extend."""

    def mark(command: C) -> C:
        command.llmserve_section = name  # type: ignore[attr-defined]
        return command

    return mark


def lazy_command(name: str, path: str, summary: str, *, under: str = "") -> click.Command:
    """Return a command whose module is imported only when the command runs.

    ``path`` is ``"module:command"``. ``llmserve --help`` shows ``summary``, under the heading
    ``under``, as with :func:`section`.
    """
    import click

    command = click.Command(name, short_help=summary)
    command.llmserve_path = path  # type: ignore[attr-defined]
    return section(under)(command)
