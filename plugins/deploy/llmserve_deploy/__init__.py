"""The plugin ``deploy``: files that take a repository to more machines."""

from __future__ import annotations

from typing import TYPE_CHECKING

from llmserve.plugin import hookimpl, lazy_command

if TYPE_CHECKING:
    import click


@hookimpl
def llmserve_register_commands(cli: click.Group) -> None:
    path, summary = (
        "llmserve_deploy.commands:deploy",
        "Write what takes a repository to more machines.",
    )
    cli.add_command(lazy_command("deploy", path, summary, under="Serve"))
