"""The plugin ``deploy``: files that deploy a model repository to other machines."""

from __future__ import annotations

from typing import TYPE_CHECKING

from llmserve.plugin import hookimpl, lazy_command

if TYPE_CHECKING:
    import click


@hookimpl
def llmserve_register_commands(cli: click.Group) -> None:
    path = "llmserve_deploy.commands:deploy"
    summary = "Write the files that deploy a repository to other machines."
    cli.add_command(lazy_command("deploy", path, summary, under="Serve"))
