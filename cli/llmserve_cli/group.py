"""The group of all commands, built-in and from plugins, which use the same hook."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any

import click

from llmserve import __version__
from llmserve.commands import printable
from llmserve_cli import commands, interrupts, missing_packages, other_tools
from llmserve_cli.usage import Group

SECTIONS = ("Serve", "Measure", "Extend")
"""The sections of ``--help``, in order; plugins may add others."""
_NAMES_OF_PLUGINS = ("LLMSERVE_PLUGINS", "LLMSERVE_BLOCK_PLUGINS")


class OutputClosed(Exception):
    """The reader of the output closed the pipe; click would report an ordinary failure."""


class Commands(Group):
    """Commands by name; plugins are loaded only if a command is not built in."""

    def __init__(self, *args: Any, **extra: Any) -> None:
        super().__init__(*args, **extra)
        self._plugin_of: dict[str, str] = {}
        self._command = ""
        self._has_plugins = False
        self.add_from(commands.llmserve_register_commands)

    def add_from(self, register: Callable[..., None], plugin: str = "") -> None:
        """Add the commands of an implementation of the hook; the first command of a name wins."""
        # A separate group, so that a plugin cannot modify this one.
        group = click.Group()
        register(cli=group)
        for name, command in group.commands.items():
            if self.commands.setdefault(name, command) is not command:
                click.echo(f"llmserve: command {name} of plugin {plugin} already exists", err=True)
            elif plugin:
                self._plugin_of[name] = plugin

    def make_context(self, *args: Any, **extra: Any) -> click.Context:
        """Parse the arguments; click prints help and the version while it does so."""
        with _translated_errors():
            return super().make_context(*args, **extra)

    def invoke(self, ctx: click.Context) -> Any:
        interrupts.raise_on_interrupt()
        with _translated_errors():
            _note_unmatched_names()
            return super().invoke(ctx)

    def plugin_of_command(self) -> str | None:
        """Return the plugin of the current command; None if the command is built in."""
        return self._plugin_of.get(self._command)

    def list_commands(self, ctx: click.Context) -> list[str]:
        del ctx
        self._add_plugins()
        return list(self.commands)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Return a command by its name; a plugin cannot replace a built-in command."""
        if cmd_name not in self.commands:
            self._add_plugins()
        command: Any = super().get_command(ctx, cmd_name)
        if path := getattr(command, "llmserve_path", ""):
            module, _, name = path.partition(":")
            with interrupts.while_importing():
                loaded = getattr(import_module(module), name)
            loaded.llmserve_section = command.llmserve_section
            loaded.epilog = loaded.epilog or other_tools.of_options(cmd_name)
            command = self.commands[cmd_name] = loaded
        return command  # type: ignore[no-any-return]

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Find the command of a command line, or name the package to install for it."""
        if args[0] in other_tools.COMMANDS:
            # A command of a plugin goes before a habit.
            self._add_plugins()
        args = other_tools.translated(args, known=self.commands)
        self._command = args[0]
        if words := other_tools.advice(args[0]):
            raise click.UsageError(f"no command is called {args[0]!r}: {words}")
        if args[0] in missing_packages.COMMANDS and self.get_command(ctx, args[0]) is None:
            package = missing_packages.COMMANDS[args[0]]
            raise click.UsageError(f"{args[0]} {missing_packages.comes_with(package)}")
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the commands in sections; those of plugins have the plugin's name appended."""
        sections: dict[str, list[tuple[str, str]]] = {name: [] for name in SECTIONS}
        for name in self.list_commands(ctx):
            command = self.commands[name]
            if command.hidden:
                continue
            section = getattr(command, "llmserve_section", "") or "Plugins"
            mark = f" ({self._plugin_of[name]})" if name in self._plugin_of else ""
            summary = command.get_short_help_str(limit=1000).removesuffix(".")
            sections.setdefault(section, []).append((name, summary + mark))
        width = max(len(name) for rows in sections.values() for name, _ in rows)
        for section, rows in sections.items():
            if rows:
                with formatter.section(section):
                    formatter.write_dl([(name.ljust(width), summary) for name, summary in rows])

    def _add_plugins(self) -> None:
        if self._has_plugins:
            return
        self._has_plugins = True
        from llmserve.errors import reason
        from llmserve.plugin import Registry

        registry = Registry.load(components=False)
        for plugin, register in registry.implementations("llmserve_register_commands"):
            try:
                self.add_from(register, plugin.name)
            except KeyboardInterrupt:
                raise
            except BaseException as error:
                click.echo(f"llmserve: plugin {plugin} adds no commands: {reason(error)}", err=True)


def _note_unmatched_names() -> None:
    # The import is slow, and hardly anybody needs it.
    if not any(os.environ.get(variable) for variable in _NAMES_OF_PLUGINS):
        return
    with interrupts.while_importing():
        from llmserve.plugin import Registry
    for words in Registry.unmatched_names(os.environ):
        # Without the prefix of what `run` repeats of its server: it has said so itself.
        click.echo(printable(f"note: {words}"), err=True)


@contextmanager
def _translated_errors() -> Iterator[None]:
    try:
        yield
    except BrokenPipeError:
        raise OutputClosed from None
    except KeyboardInterrupt as error:
        # As another exception: click would print an empty line for KeyboardInterrupt.
        raise click.Abort from error


@click.group(
    cls=Commands,
    epilog=other_tools.of_commands(),
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
@click.version_option(__version__, message="llmserve %(version)s")
def cli() -> None:
    """Serve language models with NVIDIA Triton.

    \b
    llmserve run demo
    llmserve build --plugin hf --model demo
    llmserve serve
    llmserve query demo "Once upon a time"
    """
