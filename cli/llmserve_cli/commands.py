"""The built-in commands, registered by the hook that plugins use."""

from __future__ import annotations

from typing import TYPE_CHECKING

from llmserve.plugin import hookimpl, lazy_command

if TYPE_CHECKING:
    import click

_COMMANDS = {
    "Serve": {
        "run": ("run", "Build a model, serve it, and talk to it."),
        "adopt": ("adopt", "Take over another server's settings."),
        "build": ("build", "Build a model into a Triton repository."),
        "serve": ("serve", "Serve a model repository with Triton."),
        "chat": ("chat", "Talk to a served model."),
        "query": ("query", "Query a served model and print its answer."),
        "batch": ("batch", "Answer a file of requests."),
        "status": ("running", "Show the state of served models."),
        "reload": ("running", "Load or reload a model in a running server."),
        "unload": ("running", "Unload a model from a running server."),
        "list": ("listing:list_models", "List the models that are built."),
        "adapter": ("adapter", "Add, remove and list a model's adapters."),
        "warm": ("warm", "List and clear what is kept of prompts."),
        "remove": ("remove", "Delete a built model."),
        "export": ("export", "Write a model for a Triton without llmserve."),
        "check": ("check", "Find problems in a model repository."),
        "demo": ("demo", "Build, serve and query a small model."),
    },
    "Extend": {
        "plugins": ("plugins", "List plugins, or the options of one."),
        "plugin": ("plugin", "Create your own plugin."),
        "completion": ("completion", "Print the completion script for a shell."),
    },
}
"""The module and summary of each command, by section, in the order of ``--help``; the module with
the command's function if that has another name."""


@hookimpl
def llmserve_register_commands(cli: click.Group) -> None:
    for section, commands in _COMMANDS.items():
        for name, (module, summary) in commands.items():
            path = module if ":" in module else f"{module}:{name}"
            cli.add_command(lazy_command(name, f"llmserve_cli.{path}", summary, under=section))
