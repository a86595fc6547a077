"""The plugin ``bench``: the commands ``bench``, ``compare``, ``sweep`` and ``report``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from llmserve.plugin import hookimpl, lazy_command

if TYPE_CHECKING:
    import click

_COMMANDS = {
    "bench": "Measure a served model.",
    "compare": "Compare several models in interleaved rounds.",
    "sweep": "Find the fastest way to serve a model.",
    "report": "Recreate the report of a saved measurement.",
}


@hookimpl
def llmserve_register_commands(cli: click.Group) -> None:
    for name, summary in _COMMANDS.items():
        path = f"llmserve_bench.commands:{name}"
        cli.add_command(lazy_command(name, path, summary, under="Measure"))
