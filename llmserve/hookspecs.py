"""The hooks, typed. ``plugins/README.md`` has each with a whole example and its test.

A plugin is a module with some of these functions, each marked ``@llmserve.hookimpl``, named
by an entry point in the group of the API that it is made for::

    [project.entry-points."llmserve.api1"]
    acme = "acme_llmserve"

Hooks run when something is built or listed, never for a token: they return components, and
what serves a request is the runtime class that a component names. A hook may return an empty
list and must not import torch, transformers or other heavy packages.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, TypeVar

import pluggy

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    import click

    from llmserve.roles import Batching, Formatter, Generator, Recipe, Tokenizer

__all__ = [
    "hookimpl",
    "llmserve_register_batchings",
    "llmserve_register_commands",
    "llmserve_register_formatters",
    "llmserve_register_generators",
    "llmserve_register_recipes",
    "llmserve_register_tokenizers",
]

F = TypeVar("F", bound="Callable[..., Any]")

PROJECT = "llmserve"
hookspec = pluggy.HookspecMarker(PROJECT)
_marker = pluggy.HookimplMarker(PROJECT)


def hookimpl(function: F) -> F:
    """Mark a function as the implementation of the hook whose name it has."""
    return _marker(function)


@hookspec
def llmserve_register_tokenizers() -> Sequence[Tokenizer]:  # type: ignore[empty-body]
    """Return tokenizers: text to ids and back, incrementally, inside Triton.

    >>> @hookimpl
    ... def llmserve_register_tokenizers():
    ...     return [Tokenizer(name="acme", summary="…", runtime="llmserve_acme.tokenizer:Bytes")]
    """


@hookspec
def llmserve_register_generators() -> Sequence[Generator]:  # type: ignore[empty-body]
    """Return generators: ids to more ids on the device, token by token or in batches.

    >>> @hookimpl
    ... def llmserve_register_generators():
    ...     return [Generator(name="acme", summary="…", runtime="llmserve_acme.engine:Engine")]
    """


@hookspec
def llmserve_register_batchings() -> Sequence[Batching]:  # type: ignore[empty-body]
    """Return batching strategies: how requests share the device.

    >>> @hookimpl
    ... def llmserve_register_batchings():
    ...     return [Batching(name="acme", summary="…", runtime="llmserve_acme.driver:Driver")]
    """


@hookspec
def llmserve_register_formatters() -> Sequence[Formatter]:  # type: ignore[empty-body]
    """Return formatters: answers to response tensors.

    >>> @hookimpl
    ... def llmserve_register_formatters():
    ...     tensors = (contract.TEXT_OUTPUT, contract.FINISH_REASON, *contract.USAGE)
    ...     runtime = "llmserve_acme.formatter:Formatter"
    ...     return [Formatter(name="acme", summary="…", runtime=runtime, outputs=tensors)]
    """


@hookspec
def llmserve_register_recipes() -> Sequence[Recipe]:  # type: ignore[empty-body]
    """Return recipes: one choice per role under a name that ``build --plugin`` takes.

    >>> @hookimpl
    ... def llmserve_register_recipes():
    ...     parts = {"tokenizer": "acme", "generator": "transformers"}
    ...     return [Recipe(name="acme", summary="…", batching="dynamic", formatter="text", **parts)]
    """


@hookspec
def llmserve_register_commands(cli: click.Group) -> None:
    """Add subcommands to ``llmserve`` with ``cli.add_command`` or ``@cli.command``.

    >>> @hookimpl
    ... def llmserve_register_commands(cli):
    ...     cli.command("acme-hello")(lambda: print("hello"))
    """
