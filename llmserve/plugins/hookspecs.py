"""The hook specifications. ``plugins/README.md`` has a complete example of each, with its test.

A plugin is a module with some of these functions, each marked ``@llmserve.plugin.hookimpl``, and
an entry point that names the module (``llmserve.plugins.api``).

Hooks run during a build, listing or check, never for a request, and must not import heavy packages.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import pluggy

if TYPE_CHECKING:
    import click

    from llmserve.contract.checks import Check
    from llmserve.plugins import roles
    from llmserve.problems import Problem
    from llmserve.repository.repository import CheckedModel

PROJECT = "llmserve"
hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)


@hookspec
def llmserve_register_tokenizers() -> Sequence[roles.Tokenizer]:  # type: ignore[empty-body]
    """Return tokenizers, which convert text to ids and back, incrementally, inside Triton."""


@hookspec
def llmserve_register_generators() -> Sequence[roles.Generator]:  # type: ignore[empty-body]
    """Return generators, which continue ids on the device, token by token or in batches."""


@hookspec
def llmserve_register_batchings() -> Sequence[roles.Batching]:  # type: ignore[empty-body]
    """Return batching strategies: how requests share the device."""


@hookspec
def llmserve_register_formatters() -> Sequence[roles.Formatter]:  # type: ignore[empty-body]
    """Return formatters, which turn answers into response tensors and may constrain them."""


@hookspec
def llmserve_register_recipes() -> Sequence[roles.Recipe]:  # type: ignore[empty-body]
    """Return recipes: one component per role, under a name that ``build --plugin`` accepts."""


@hookspec
def llmserve_register_backends() -> Sequence[roles.Backend]:  # type: ignore[empty-body]
    """Return Triton backends written in Python, to be installed in the embedded server."""


@hookspec
def llmserve_register_frontends() -> Sequence[roles.Frontend]:  # type: ignore[empty-body]
    """Return frontends: processes in front of Triton that speak another protocol."""


@hookspec
def llmserve_register_tool_parsers() -> Sequence[roles.ToolParser]:  # type: ignore[empty-body]
    """Return parsers for the tool call syntax of a model family."""


@hookspec
def llmserve_register_commands(cli: click.Group) -> None:
    """Add subcommands to ``llmserve``, with ``cli.add_command`` or ``@cli.command``."""


@hookspec
def llmserve_check_model(model: CheckedModel) -> Sequence[Problem]:  # type: ignore[empty-body]
    """Return problems that only this plugin can detect, in any model of a repository."""


@hookspec
def llmserve_register_checks() -> Sequence[Check]:  # type: ignore[empty-body]
    """Return checks that ``llmserve certify`` runs after its own."""
