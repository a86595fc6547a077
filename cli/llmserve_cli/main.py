"""The group of all commands, and what happens to errors."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any, NoReturn

import click

# Loaded by name, so that a command pays only for itself.
COMMANDS = {
    "build": "build",
    "serve": "serve",
    "query": "query",
    "plugins": "plugins",
    "plugin": "plugin",
    "check": "check",
    "bench": "bench",
    "compare": "compare",
    "sweep": "sweep",
    "report": "report",
    "demo": "demo",
    "completion": "completion",
}


TRACEBACK = "LLMSERVE_TRACEBACK"
BROKEN_PIPE = 141
"""As a shell tells of a program that SIGPIPE has ended."""


class ReaderGone(Exception):
    """Who read our output has seen enough; click would make an ordinary failure of it."""


class Commands(click.Group):
    """Our commands, and those that plugins add."""

    def make_context(self, *args: Any, **extra: Any) -> click.Context:
        """Print help and the version, which click does while it reads the arguments."""
        with _noticing_a_closed_pipe():
            return super().make_context(*args, **extra)

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command."""
        with _noticing_a_closed_pipe():
            return super().invoke(ctx)

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return our commands in the order in which one meets them, then the plugins'."""
        self._add_plugins_commands()
        return [*COMMANDS, *sorted(super().list_commands(ctx))]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Return a command by its name; ours cannot be replaced by a plugin's."""
        if module := COMMANDS.get(cmd_name):
            command = getattr(import_module(f"llmserve_cli.{module}"), module)
            assert isinstance(command, click.Command)  # noqa: S101
            return command
        self._add_plugins_commands()
        return super().get_command(ctx, cmd_name)

    def _add_plugins_commands(self) -> None:
        from llmserve.plugins import reason
        from llmserve.registry import Registry

        for plugin, register in Registry.load().implementations("llmserve_register_commands"):
            # A group of its own, so that a plugin cannot reach into ours.
            added = click.Group()
            try:
                register(cli=added)
            except (Exception, SystemExit) as error:
                click.echo(f"llmserve: plugin {plugin} adds no commands: {reason(error)}", err=True)
                continue
            for name, command in added.commands.items():
                if name in COMMANDS or self.commands.setdefault(name, command) is not command:
                    click.echo(f"llmserve: {name} of plugin {plugin} is taken already", err=True)


def _show_version(ctx: click.Context, param: click.Parameter, wanted: bool) -> None:
    del param
    if wanted and not ctx.resilient_parsing:
        from llmserve import __version__

        click.echo(f"llmserve {__version__}")
        ctx.exit()


@click.group(
    cls=Commands,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
@click.option(
    "--version",
    is_flag=True,
    expose_value=False,
    is_eager=True,
    callback=_show_version,
    help="Show the version and exit.",
)
def cli() -> None:
    """Serve language models with NVIDIA Triton.

    \b
    llmserve build --plugin hf --model demo    a Triton model repository and its client
    llmserve serve                             a real Triton, here or in a container
    llmserve query demo "Once upon a time"     the answer
    """


def main(args: list[str] | None = None) -> None:
    """Run the command line: one line for each error, and an exit code that fits it."""
    from llmserve.errors import LLMServeError

    try:
        result: Any = cli.main(args=args, prog_name="llmserve", standalone_mode=False)
        sys.exit(result if isinstance(result, int) else 0)
    except LLMServeError as error:
        _fail(str(error), error.exit_code)
    except click.ClickException as error:
        error.show()
        sys.exit(error.exit_code)
    except (click.Abort, KeyboardInterrupt):
        _fail("interrupted", 130)
    except ReaderGone:
        _forget_output()
        sys.exit(BROKEN_PIPE)
    except SystemExit:
        raise
    except BaseException as error:
        # Not only Exception: a panic in a library written in Rust is none.
        _fail_unforeseen(error)


@contextmanager
def _noticing_a_closed_pipe() -> Iterator[None]:
    try:
        yield
    except BrokenPipeError:
        raise ReaderGone from None


def _fail(problem: str, code: int) -> NoReturn:
    click.echo(f"llmserve: {problem}", err=True)
    sys.exit(code)


def _fail_unforeseen(error: BaseException) -> NoReturn:
    from llmserve.plugins import reason

    if os.environ.get(TRACEBACK):
        import traceback

        traceback.print_exception(error)
    if isinstance(error, OSError):
        what, mend = "the system refused", "shows where"
        _forget_output()
    else:
        what, mend = "this is a bug", "shows where, which belongs in a report"
    _fail(f"{what}: {reason(error)}: running it again with {TRACEBACK}=1 {mend}", 1)


def _forget_output() -> None:
    """Keep Python from writing, at its end, what could not be written before."""
    if sys.stdout is not None:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
