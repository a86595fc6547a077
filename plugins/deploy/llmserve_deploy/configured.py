"""What the file says that `llmserve serve` reads too: one file for a server and its deployment."""

from __future__ import annotations

from collections.abc import Mapping
from math import ceil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from llmserve.plugin import ServerFile


class CommandWithFile(click.Command):
    """A command whose options the file may set; those of the command line come first."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if not ctx.resilient_parsing:
            # The parser empties its list.
            given = self.make_parser(ctx).parse_args(list(args))[0]
            if (file := _file(given)) is not None:
                ctx.default_map = {**(ctx.default_map or {}), **settings_of(file)}
        return super().parse_args(ctx, args)


def _file(given: Mapping[str, Any]) -> ServerFile | None:
    """Return the file that is named, or the one that lies here if nothing is named."""
    from llmserve.errors import UsageError
    from llmserve.plugin import SERVER_FILE, ServerFile

    # What is not given is None, or a mark of newer versions of click.
    texts = {name: value for name, value in given.items() if isinstance(value, str)}
    named, repository = texts.get("config"), texts.get("repository")
    if named and repository:
        raise UsageError(
            f"--config {named} says what to deploy", hint=f"leave out {repository}, or --config"
        )
    if repository or not (named or Path(SERVER_FILE).is_file()):
        return None
    path = Path(named or SERVER_FILE)
    if not path.is_file():
        raise UsageError(f"there is no file {path}", hint="name another with --config")
    if not named:
        click.echo(f"llmserve: reading {path}", err=True)
    return _built(ServerFile.read(path))


def _built(file: ServerFile) -> ServerFile:
    """Refuse a file whose models are not built: nothing is built here."""
    from llmserve.errors import UsageError
    from llmserve.plugin import Repository

    present = Repository.open(file.repository).models
    missing = [name for name in file.models if name not in present]
    if missing:
        raise UsageError(
            f"{', '.join(missing)} of {file.path} is not built",
            hint=f"llmserve build --config {file.path}",
        )
    return file


def settings_of(file: ServerFile) -> dict[str, Any]:
    """Return the options of a deployment that the file has, by their names here.

    Addresses, ports, the file with the keys and whether there are keys at all are matters of one
    machine, and are left out: what opens a deployment to everyone is said where it is made.
    """
    settings: dict[str, Any] = {"repository": file.repository, "models": list(file.models)}
    if "replicas" in file.serve:
        settings["replicas"] = file.serve["replicas"]
    if "grace" in file.serve:
        settings["grace"] = ceil(file.serve["grace"])
    return settings
