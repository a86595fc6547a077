"""Options of commands that stand in the contract: those of a request, and those of ``serve``."""

from __future__ import annotations

from collections.abc import Callable
from math import isfinite
from pathlib import Path
from typing import Any, TypeVar

import click

from llmserve.commands import built_models
from llmserve.runtime.contract import INT32, OPTIONS, RequestOption
from llmserve.server import SERVE_OPTIONS, ServeOption

C = TypeVar("C", bound=Callable[..., Any])


def request_option(name: str, *, ours: bool = False) -> Callable[[C], C]:
    """Declare an option of a command that is one of the request.

    A model that is ours has the range of the contract; another server may have another one.
    """
    row = OPTIONS[name]
    flag = f"--{name.replace('_', '-')}"
    if row.kind == "text":
        return click.option(flag, metavar="NAME", help=row.help)
    kind: Any = int if row.kind == "whole" else float
    return click.option(flag, type=range_of(row) if ours else kind, help=row.help)


def range_of(row: RequestOption) -> click.ParamType[Any]:
    """Return the type of an option that is a number, with the range of the contract."""
    high = None if row.high >= INT32 else row.high
    if row.kind == "whole":
        return click.IntRange(int(row.low), None if high is None else int(high))
    return click.FloatRange(row.low, high, min_open=row.above)


class Amount(click.FloatRange):
    """A number that is one: every comparison with nan is false, so that no range refuses it."""

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> float:
        number: float = super().convert(value, param, ctx)
        if not isfinite(number):
            self.fail(f"{number} is no amount.", param, ctx)
        return number


def serve_options(command: C) -> C:
    """Give a command all options of ``serve``, in their order."""
    for name in reversed([*SERVE_OPTIONS]):
        command = serve_option(name)(command)
    return command


def serve_option(name: str) -> Callable[[C], C]:
    """Declare an option of a command that is one of ``serve``."""
    row = SERVE_OPTIONS[name]
    if row.kind == "flag":
        return click.option(*row.flags, name, is_flag=True, help=row.help)
    attributes: dict[str, Any] = {"type": _type_of(row), "help": row.help}
    if row.kind in ("texts", "models"):
        attributes |= {"multiple": True}
    elif row.default not in (None, ""):
        attributes |= {"default": row.default, "show_default": True}
    if row.kind == "models":
        attributes |= {"shell_complete": built_models}
    if row.unit:
        attributes |= {"metavar": row.unit}
    return click.option(*row.flags, name, **attributes)


def _type_of(row: ServeOption) -> click.ParamType[Any]:
    if row.choices:
        return click.Choice(row.choices)
    if row.kind == "whole":
        return click.INT if row.low is None else click.IntRange(min=int(row.low))
    if row.kind == "number":
        return Amount(min=row.low or 0, min_open=row.above)
    if row.kind in ("path", "file", "folder"):
        return click.Path(
            path_type=Path, dir_okay=row.kind != "file", file_okay=row.kind != "folder"
        )
    return click.STRING
