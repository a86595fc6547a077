"""The plugin ``bench``: the commands ``bench``, ``compare``, ``sweep`` and ``report``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from llmserve.plugin import hookimpl, section

if TYPE_CHECKING:
    import click


@hookimpl
def llmserve_register_commands(cli: click.Group) -> None:
    """Add the four commands."""
    from llmserve_bench.commands import bench, compare, report, sweep

    for command in (bench, compare, sweep, report):
        cli.add_command(section("Measure")(command))
