"""The plugin ``certify``: whether what a server answers is what the model says.

A check is one promise of a server. It runs in an examination of an endpoint: a model of a Triton,
or a server with OpenAI's API; if the model is at hand, its answers are compared with those. The
command ``certify`` runs all checks; :mod:`llmserve_certify.examine` has what a program needs that
runs them, and the author of one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from llmserve.plugin import hookimpl, lazy_command

if TYPE_CHECKING:
    import click


@hookimpl
def llmserve_register_commands(cli: click.Group) -> None:
    path, summary = "llmserve_certify.commands:certify", "Check a server against its model."
    cli.add_command(lazy_command("certify", path, summary, under="Measure"))
