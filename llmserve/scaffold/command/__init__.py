"""The plugin ``scaffold``: a command of llmserve."""

from __future__ import annotations

from typing import TYPE_CHECKING

from llmserve.plugin import hookimpl

if TYPE_CHECKING:
    import click


@hookimpl
def llmserve_register_commands(cli: click.Group) -> None:
    """Add the command; it is imported only here, to keep listing plugins fast."""
    from llmserve.scaffold.command.command import main

    cli.add_command(main)
