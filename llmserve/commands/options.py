"""Options that several commands have: which server is asked, and what is sent with a request."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, TypeVar

import click

from llmserve.plugins.options import parse_assignments

C = TypeVar("C", bound=Callable[..., object])
_REPOSITORY = click.option(
    "--repository",
    type=click.Path(path_type=Path, file_okay=False),
    help="Model repository, to select the server that serves it.",
)
_SELECTS = (
    click.option(
        "--url", envvar="LLMSERVE_URL", help="gRPC address, to select a server (or LLMSERVE_URL)."
    ),
    _REPOSITORY,
)
_ASKS = (
    click.option(
        "--url",
        envvar="LLMSERVE_URL",
        help="gRPC address (default: that of `llmserve serve` if it runs here, else "
        "127.0.0.1:8001).",
    ),
    _REPOSITORY,
    click.option(
        "--openai",
        metavar="URL",
        help="Ask a server with OpenAI's API, as in http://127.0.0.1:8080/v1, with the key in "
        "OPENAI_API_KEY.",
    ),
)


def asks_a_server(command: C) -> C:
    """Give a command ``--url``, ``--repository`` and ``--openai``.

    :func:`llmserve.server.url_for` says which server the first two mean.
    """
    return _with(_ASKS, command)


def selects_a_server(command: C) -> C:
    """Give a command ``--url`` and ``--repository``, for :func:`llmserve.server.find_one`."""
    return _with(_SELECTS, command)


def _with(options: Iterable[Callable[[C], C]], command: C) -> C:
    for option in reversed(tuple(options)):
        command = option(command)
    return command


def assigned(assignments: Iterable[str]) -> dict[str, Any]:
    """Return the options of a request that are given as ``--set KEY=VALUE``.

    >>> assigned(["temperature=0.7", "ignore_eos=true", "stop_words=END"])
    {'temperature': 0.7, 'ignore_eos': True, 'stop_words': 'END'}
    """
    return {key: _value(text) for key, text in parse_assignments(assignments).items()}


def _value(text: str) -> bool | int | float | str:
    """Interpret numbers, true and false as JSON, and anything else as text."""
    try:
        value = json.loads(text, parse_constant=str)
    except (ValueError, RecursionError):
        return text
    return value if isinstance(value, (bool, int, float)) else text
