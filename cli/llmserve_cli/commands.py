"""Our own commands, registered by the hook that plugins use."""

from __future__ import annotations

from typing import TYPE_CHECKING

from llmserve.plugin import hookimpl, lazy_command

if TYPE_CHECKING:
    import click

_COMMANDS = {
    "Serve": {
        "build": ("build", "Build a model into a Triton repository."),
        "serve": ("serve", "Serve a model repository with Triton."),
        "query": ("query", "Ask a served model and print its answer."),
        "status": ("running", "Tell how the models of a server are."),
        "reload": ("running", "Have a running server take a model in anew."),
        "check": ("check", "Find what would not load in a repository."),
        "demo": ("demo", "Build, serve and query a small model."),
    },
    "Extend": {
        "plugins": ("plugins", "List plugins, or the options of one."),
        "plugin": ("plugin", "Write a plugin of your own."),
        "completion": ("completion", "Print the completion script of a shell."),
    },
}
"""By heading, in the order in which one meets them: the module of each, and what it does."""


@hookimpl
def llmserve_register_commands(cli: click.Group) -> None:
    for heading, commands in _COMMANDS.items():
        for name, (module, summary) in commands.items():
            path = f"llmserve_cli.{module}:{name}"
            cli.add_command(lazy_command(name, path, summary, under=heading))
