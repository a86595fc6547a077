"""The plugin ``sizes``: a command, and no component."""

from __future__ import annotations

from typing import TYPE_CHECKING

from llmserve.plugin import hookimpl

if TYPE_CHECKING:
    import click


@hookimpl
def llmserve_register_commands(cli: click.Group) -> None:
    """Add ``llmserve sizes``."""
    # Here and not above: the hook is called when a command line is read, the module is imported
    # whenever plugins are listed.
    from llmserve_sizes.command import sizes

    cli.add_command(sizes)
