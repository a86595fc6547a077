"""The plugin ``scaffold``: a command of llmserve."""

from __future__ import annotations

from typing import TYPE_CHECKING

from llmserve.plugin import hookimpl

if TYPE_CHECKING:
    import click


@hookimpl
def llmserve_register_commands(cli: click.Group) -> None:
    """Add the command; it is imported here, as plugins are listed more often than it is run."""
    from llmserve.scaffold.command.command import main

    cli.add_command(main)
