"""The built-in commands, registered by the hook that plugins use."""

from __future__ import annotations

from typing import TYPE_CHECKING

from llmserve.plugin import hookimpl, lazy_command

if TYPE_CHECKING:
    import click

_COMMANDS = {
    "Serve": {
        "build": ("build", "Build a model into a Triton repository."),
        "serve": ("serve", "Serve a model repository with Triton."),
        "query": ("query", "Query a served model and print its answer."),
        "status": ("running", "Show the state of served models."),
        "reload": ("running", "Load or reload a model in a running server."),
        "unload": ("running", "Unload a model from a running server."),
        "remove": ("remove", "Delete a model from a repository."),
        "check": ("check", "Find problems in a model repository."),
        "demo": ("demo", "Build, serve and query a small model."),
    },
    "Extend": {
        "plugins": ("plugins", "List plugins, or the options of one."),
        "plugin": ("plugin", "Create your own plugin."),
        "completion": ("completion", "Print the completion script for a shell."),
    },
}
"""The module and summary of each command, by section, in the order of ``--help``."""


@hookimpl
def llmserve_register_commands(cli: click.Group) -> None:
    for section, commands in _COMMANDS.items():
        for name, (module, summary) in commands.items():
            path = f"llmserve_cli.{module}:{name}"
            cli.add_command(lazy_command(name, path, summary, under=section))
