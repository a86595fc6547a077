"""Options of commands that are options of a request."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import click

from llmserve.runtime.contract import INT32, OPTIONS, RequestOption

C = TypeVar("C", bound=Callable[..., Any])


def request_option(name: str, *, ours: bool = False) -> Callable[[C], C]:
    """Declare an option of a command that is one of the request.

    A model that is ours has the range of the contract; another server may have another one.
    """
    row = OPTIONS[name]
    flag = f"--{name.replace('_', '-')}"
    kind: Any = int if row.kind == "whole" else float
    return click.option(flag, type=range_of(row) if ours else kind, help=row.help)


def range_of(row: RequestOption) -> click.ParamType[Any]:
    """Return the type of an option that is a number, with the range of the contract."""
    high = None if row.high >= INT32 else row.high
    if row.kind == "whole":
        return click.IntRange(int(row.low), None if high is None else int(high))
    return click.FloatRange(row.low, high, min_open=row.above)
