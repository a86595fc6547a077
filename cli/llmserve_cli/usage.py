"""Usage errors, in the format of all errors: the problem and the fix."""

from __future__ import annotations

from typing import Any

import click

from llmserve.plugin import near
from llmserve_cli.other_tools import advice

HelpShown: Any = getattr(click.exceptions, "NoArgsIsHelpError", ())
"""Newer versions of click raise this for a group without a command; its message is the help."""


_NUMBERS = {"integer": "a whole number", "float": "a number"}
"""Types by the names that click has for them, and what a reader calls them."""


class Group(click.Group):
    """A group that suggests the most similar command for a misspelt one."""

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        name = args[0]
        if not name.startswith("-") and self.get_command(ctx, name) is None:
            see_help = f"{ctx.command_path} --help"
            hint = near(name, self.list_commands(ctx), place=see_help)
            hint = f"see {see_help}" if name == "help" else hint
            raise click.UsageError(f"no command is called {name!r}: {hint}")
        return super().resolve_command(ctx, args)


def explain_usage(error: click.ClickException) -> str:
    """Describe an error of click in one line."""
    ctx = getattr(error, "ctx", None) or click.Context(click.Command(None), info_name="llmserve")
    command, page = ctx.command_path.removeprefix("llmserve "), f"{ctx.command_path} --help"
    see_help = f"see {page}"
    if isinstance(error, click.BadOptionUsage) and "requires an argument" in error.message:
        return f"{error.option_name} needs a value"
    if isinstance(error, click.NoSuchOption):
        hint = advice(command, error.option_name) or near(
            error.option_name, error.possibilities or (), place=page, few=0
        )
        return f"{command} has no option {error.option_name}: {hint}"
    if isinstance(error, click.MissingParameter) and error.param is not None:
        choices, is_all = _choices(error.param, ctx)
        hint = f"choose one of {', '.join(choices)}" if choices and is_all else see_help
        return f"{command} needs {_name(error.param)}: {hint}"
    if isinstance(error, click.BadParameter) and error.param is not None:
        if isinstance(error.param.type, click.Choice):
            value = error.message.split(" is not ")[0]
            every = ", ".join(error.param.type.choices)
            return f"{_name(error.param)} cannot be {value}: choose one of {every}"
        return f"{_name(error.param)}: {what_is_wrong(error)}"
    text = _one_line(error.format_message())
    # Messages of click itself start with a capital letter and do not name a fix.
    return f"{text[0].lower()}{text[1:]}: {see_help}" if text[:1].isupper() else text


def _choices(param: click.Parameter, ctx: click.Context) -> tuple[list[str], bool]:
    """Return values that a parameter accepts, which the shell completes, and if these are all."""
    items = param.shell_complete(ctx, "")
    plain = [item.value for item in items if item.type == "plain"]
    return plain, len(plain) == len(items)


def what_is_wrong(error: click.BadParameter) -> str:
    """Say what is wrong with a value, without click's names of types.

    >>> what_is_wrong(click.BadParameter("'hot' is not a valid float range."))
    "'hot' is not a number"
    """
    value, invalid, kind = _one_line(error.message).partition(" is not a valid ")
    ours = _NUMBERS.get(kind.removesuffix(" range"))
    return f"{value} is not {ours}" if ours else f"{value}{invalid}{kind}"


def _name(param: click.Parameter) -> str:
    """Return what a parameter is called first in the help; of an option its long name."""
    if not isinstance(param, click.Option):
        return param.human_readable_name
    return next((name for name in param.opts if name.startswith("--")), param.opts[0])


def _one_line(text: str) -> str:
    return " ".join(text.split()).removesuffix(".")
