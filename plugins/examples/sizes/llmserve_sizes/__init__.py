"""The plugin ``sizes``: a command, and no component."""

from __future__ import annotations

from typing import TYPE_CHECKING

from llmserve.plugin import hookimpl

if TYPE_CHECKING:
    import click


@hookimpl
def llmserve_register_commands(cli: click.Group) -> None:
    # Imported here because the hook is called only when a command line is parsed, but the module is
    # imported whenever plugins are listed.
    from llmserve_sizes.command import sizes

    cli.add_command(sizes)
