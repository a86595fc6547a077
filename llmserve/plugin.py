"""What a plugin is written with: the one import for everything that runs where models are built.

    from llmserve.plugin import Option, Tokenizer, hookimpl

What runs inside Triton imports :mod:`llmserve.runtime` instead. Importing this module loads
neither torch nor transformers nor click; what needs protobuf or the model sources is loaded when
it is first used.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import TYPE_CHECKING, Any, TypeVar

from llmserve.builder.causal import (
    DTYPE_OPTION,
    PLACEMENT_OPTIONS,
    check_causal,
    place_causal_model,
    place_instances,
)
from llmserve.builder.context import BuildContext, Container
from llmserve.builtin import DECOUPLED_OPTION
from llmserve.errors import (
    ConfigError,
    IncompatibleError,
    LLMServeError,
    ModelSourceError,
    OptionError,
    OutputError,
    PluginError,
    UsageError,
)
from llmserve.hookspecs import hookimpl
from llmserve.options import INT32_MAX, Option, Value
from llmserve.repository.problems import CheckedModel, Problem
from llmserve.repository.source import DEMO, ModelSource, read_object
from llmserve.repository.source_files import check_vocabulary, tokenizer_files, weight_files
from llmserve.roles import (
    Backend,
    Batching,
    Formatter,
    Frontend,
    Generator,
    Pair,
    Place,
    Recipe,
    Tokenizer,
    ToolParser,
)
from llmserve.runtime import contract
from llmserve.runtime.contract import Tensor
from llmserve.tools import ToolPart, ToolReader

if TYPE_CHECKING:
    import click

    from llmserve.builder.ensemble import Assembly
    from llmserve.repository.config import ModelConfig, add_inputs, add_outputs, set_parameters
    from llmserve.repository.manifest import Manifest

__all__ = [
    "DECOUPLED_OPTION",
    "DEMO",
    "DTYPE_OPTION",
    "INT32_MAX",
    "PLACEMENT_OPTIONS",
    "Assembly",
    "Backend",
    "Batching",
    "BuildContext",
    "CheckedModel",
    "ConfigError",
    "Container",
    "Formatter",
    "Frontend",
    "Generator",
    "IncompatibleError",
    "LLMServeError",
    "Manifest",
    "ModelConfig",
    "ModelSource",
    "ModelSourceError",
    "Option",
    "OptionError",
    "OutputError",
    "Pair",
    "Place",
    "PluginError",
    "Problem",
    "Recipe",
    "Tensor",
    "Tokenizer",
    "ToolParser",
    "ToolPart",
    "ToolReader",
    "UsageError",
    "Value",
    "add_inputs",
    "add_outputs",
    "check_causal",
    "check_vocabulary",
    "contract",
    "hookimpl",
    "lazy_command",
    "place_causal_model",
    "place_instances",
    "read_object",
    "section",
    "set_parameters",
    "tokenizer_files",
    "weight_files",
]

_LOADED_WHEN_USED = {
    "Assembly": "llmserve.builder.ensemble",
    "Manifest": "llmserve.repository.manifest",
    "ModelConfig": "llmserve.repository.config",
    "add_inputs": "llmserve.repository.config",
    "add_outputs": "llmserve.repository.config",
    "set_parameters": "llmserve.repository.config",
}

C = TypeVar("C")


def section(name: str) -> Callable[[C], C]:
    """Put a command under a heading of ``llmserve --help``: Serve, Measure or Extend."""

    def mark(command: C) -> C:
        command.llmserve_section = name  # type: ignore[attr-defined]
        return command

    return mark


def lazy_command(name: str, path: str, summary: str, *, under: str = "") -> click.Command:
    """Make a command whose module is imported when somebody runs it.

    ``path`` is ``"module:command"``. ``llmserve --help`` shows ``summary``, under a heading as
    :func:`section` puts it.
    """
    import click

    command = click.Command(name, short_help=summary)
    command.llmserve_path = path  # type: ignore[attr-defined]
    return section(under)(command)


def __getattr__(name: str) -> Any:
    home = _LOADED_WHEN_USED.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(home), name)
