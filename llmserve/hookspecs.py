"""The hooks, typed. ``plugins/README.md`` has each with a whole example and its test.

A plugin is a module with some of these functions, each marked ``@llmserve.plugin.hookimpl``, and
an entry point that names it (``llmserve.api``).

They run when something is built, listed or checked, never for a request, and import nothing heavy.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import pluggy

if TYPE_CHECKING:
    import click

    from llmserve import roles
    from llmserve.repository.problems import CheckedModel, Problem

PROJECT = "llmserve"
hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)


@hookspec
def llmserve_register_tokenizers() -> Sequence[roles.Tokenizer]:  # type: ignore[empty-body]
    """Return tokenizers: text to ids and back, incrementally, inside Triton."""


@hookspec
def llmserve_register_generators() -> Sequence[roles.Generator]:  # type: ignore[empty-body]
    """Return generators: ids to more ids on the device, token by token or in batches."""


@hookspec
def llmserve_register_batchings() -> Sequence[roles.Batching]:  # type: ignore[empty-body]
    """Return batching strategies: how requests share the device."""


@hookspec
def llmserve_register_formatters() -> Sequence[roles.Formatter]:  # type: ignore[empty-body]
    """Return formatters: answers to response tensors, and what an answer is held to."""


@hookspec
def llmserve_register_recipes() -> Sequence[roles.Recipe]:  # type: ignore[empty-body]
    """Return recipes: one component per role under a name that ``build --plugin`` takes."""


@hookspec
def llmserve_register_backends() -> Sequence[roles.Backend]:  # type: ignore[empty-body]
    """Return Triton backends written in Python, which the embedded server is to have."""


@hookspec
def llmserve_register_frontends() -> Sequence[roles.Frontend]:  # type: ignore[empty-body]
    """Return what listens before Triton and speaks another protocol; ``serve`` starts it."""


@hookspec
def llmserve_register_tool_parsers() -> Sequence[roles.ToolParser]:  # type: ignore[empty-body]
    """Return parsers: how a family of models writes that it calls tools."""


@hookspec
def llmserve_register_commands(cli: click.Group) -> None:
    """Add subcommands to ``llmserve``, with ``cli.add_command`` or ``@cli.command``."""


@hookspec
def llmserve_check_model(model: CheckedModel) -> Sequence[Problem]:  # type: ignore[empty-body]
    """Return what only this plugin can see to be wrong with a model, whoever built it."""
