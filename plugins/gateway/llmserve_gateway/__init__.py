"""The front door: the OpenAI API before Triton, with keys, limits and metrics."""

from __future__ import annotations

from typing import TYPE_CHECKING

from llmserve.plugin import hookimpl, section

if TYPE_CHECKING:
    import click


@hookimpl
def llmserve_register_commands(cli: click.Group) -> None:
    """Add ``llmserve gateway`` and ``llmserve key``."""
    from llmserve_gateway.commands import gateway, key

    cli.add_command(section("Serve")(gateway))
    cli.add_command(section("Serve")(key))
