"""Our own commands, registered by the hook that plugins use."""

from __future__ import annotations

import click

from llmserve.plugin import hookimpl, section
from llmserve_cli.build import build
from llmserve_cli.check import check
from llmserve_cli.completion import completion
from llmserve_cli.demo import demo
from llmserve_cli.plugin import plugin
from llmserve_cli.plugins import plugins
from llmserve_cli.query import query
from llmserve_cli.running import reload, status
from llmserve_cli.serve import serve


@hookimpl
def llmserve_register_commands(cli: click.Group) -> None:
    """Register the commands in the order in which one meets them."""
    for command in (build, serve, query, status, reload, check, demo):
        cli.add_command(section("Serve")(command))
    for command in (plugins, plugin, completion):
        cli.add_command(section("Extend")(command))
