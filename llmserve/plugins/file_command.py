"""Commands that read ``llmserve.toml``: one file for a server and for its deployment."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import click

from llmserve.builder.server_file import SERVER_FILE, ServerFile
from llmserve.errors import UsageError

_META = "llmserve.file"


class FileCommand(click.Command):
    """A command whose options the file may set; those of the command line come first.

    The file is the one that ``--config`` names, or the one that lies here unless the argument
    ``subject`` is given, which it stands for. ``options`` returns the options that it sets, and
    ``verb`` says what the command does.
    """

    def __init__(
        self,
        *args: Any,
        subject: str,
        verb: str,
        options: Callable[[ServerFile], Mapping[str, Any]],
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        self._subject = subject
        self._verb = verb
        self._options = options

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if not ctx.resilient_parsing:
            # The parser empties its list.
            given = self.make_parser(ctx).parse_args(list(args))[0]
            help_option = self.get_help_option(ctx)
            asks_help = help_option is not None and given.get(str(help_option.name)) is True
            if not asks_help and (file := self._file(given)) is not None:
                ctx.default_map = {**(ctx.default_map or {}), **self._options(file)}
                ctx.meta[_META] = file
        return super().parse_args(ctx, args)

    def _file(self, given: Mapping[str, Any]) -> ServerFile | None:
        # What is not given is None, or a mark of newer versions of click.
        texts = {name: value for name, value in given.items() if isinstance(value, str)}
        named, subject = texts.get("config"), texts.get(self._subject)
        if named and subject:
            problem = f"--config {named} says what to {self._verb}"
            raise UsageError(problem, hint=f"leave out {subject}, or --config")
        if subject or not (named or Path(SERVER_FILE).is_file()):
            return None
        path = Path(named or SERVER_FILE)
        if not path.is_file():
            raise UsageError(f"there is no file {path}", hint="name another with --config")
        if not named:
            click.echo(f"llmserve: reading {path}", err=True)
        return ServerFile.read(path, named=bool(named))


def server_file_of(ctx: click.Context) -> ServerFile | None:
    """Return the file that a command has read, if any."""
    file: ServerFile | None = ctx.meta.get(_META)
    return file
