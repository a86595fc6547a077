"""Options of commands that are options of a request."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import click

from llmserve.contract.options import OPTIONS

C = TypeVar("C", bound=Callable[..., Any])


def request_option(name: str) -> Callable[[C], C]:
    """Declare an option of a command that is one of the request."""
    row = OPTIONS[name]
    flag = f"--{name.replace('_', '-')}"
    return click.option(flag, type=int if row.kind == "whole" else float, help=row.help)
