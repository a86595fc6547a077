"""The group of all commands: our own and those of plugins, added by the same hook."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any

import click

from llmserve import __version__
from llmserve_cli import commands, interrupts
from llmserve_cli.usage import Group

SECTIONS = ("Serve", "Measure", "Extend")
"""The sections of ``--help``, in its order; a plugin may bring more."""
NOT_INSTALLED = dict.fromkeys(("bench", "compare", "sweep", "report"), "llmserve-bench")
"""Commands that a distribution of ours brings, for who types one without having it."""


class OutputClosed(Exception):
    """Who read our output has seen enough; click would make an ordinary failure of it."""


class Commands(Group):
    """Commands by name; those of plugins are looked up only where ours do not do."""

    def __init__(self, *args: Any, **extra: Any) -> None:
        super().__init__(*args, **extra)
        self._plugin_of: dict[str, str] = {}
        self._asked_for = ""
        self._has_plugins = False
        self.add_from(commands.llmserve_register_commands)

    def add_from(self, register: Callable[..., None], plugin: str = "") -> None:
        """Add what an implementation of the hook registers; a name belongs to who comes first."""
        # A group of its own, so that a plugin cannot reach into ours.
        own = click.Group()
        register(cli=own)
        for name, command in own.commands.items():
            if self.commands.setdefault(name, command) is not command:
                click.echo(f"llmserve: {name} of plugin {plugin} is taken already", err=True)
            elif plugin:
                self._plugin_of[name] = plugin

    def make_context(self, *args: Any, **extra: Any) -> click.Context:
        """Print help and the version, which click does while it reads the arguments."""
        with _end_of_output():
            return super().make_context(*args, **extra)

    def invoke(self, ctx: click.Context) -> Any:
        interrupts.end_in_order()
        with _end_of_output():
            return super().invoke(ctx)

    def whose(self) -> str | None:
        """Name the plugin of the command that was asked for; None where it is ours."""
        return self._plugin_of.get(self._asked_for)

    def list_commands(self, ctx: click.Context) -> list[str]:
        del ctx
        self._add_plugins()
        return list(self.commands)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Return a command by its name; ours cannot be replaced by a plugin's."""
        if cmd_name not in self.commands:
            self._add_plugins()
        found: Any = super().get_command(ctx, cmd_name)
        if path := getattr(found, "llmserve_path", ""):
            module, _, name = path.partition(":")
            command = getattr(import_module(module), name)
            command.llmserve_section = found.llmserve_section
            found = self.commands[cmd_name] = command
        return found  # type: ignore[no-any-return]

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Find the command of a command line, or say what to install for it."""
        self._asked_for = args[0]
        if args[0] in NOT_INSTALLED and self.get_command(ctx, args[0]) is None:
            package = NOT_INSTALLED[args[0]]
            raise click.UsageError(f"{args[0]} comes with {package}: pip install {package}")
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the commands in sections; one of a plugin is marked with the plugin's name."""
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
        from llmserve.registry import Registry

        registry = Registry.load(components=False)
        for plugin, register in registry.implementations("llmserve_register_commands"):
            try:
                self.add_from(register, plugin.name)
            except (Exception, SystemExit) as error:
                click.echo(f"llmserve: plugin {plugin} adds no commands: {reason(error)}", err=True)


@contextmanager
def _end_of_output() -> Iterator[None]:
    try:
        yield
    except BrokenPipeError:
        raise OutputClosed from None
    except KeyboardInterrupt as error:
        # Under another name: click would print an empty line for it.
        raise click.Abort from error


@click.group(
    cls=Commands,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
@click.version_option(__version__, message="llmserve %(version)s")
def cli() -> None:
    """Serve language models with NVIDIA Triton.

    \b
    llmserve build --plugin hf --model demo
    llmserve serve
    llmserve query demo "Once upon a time"
    """
