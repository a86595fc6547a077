"""The API for plugin code that runs where models are built, in a single module.

    from llmserve.plugin import Option, Tokenizer, hookimpl

Code that runs inside Triton imports :mod:`llmserve.runtime` instead. Importing this module loads
neither torch nor transformers nor click; names that need protobuf are loaded on first use.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import TYPE_CHECKING, Any, TypeVar

from llmserve.builder.causal import DTYPE_OPTION as DTYPE_OPTION
from llmserve.builder.causal import PLACEMENT_OPTIONS as PLACEMENT_OPTIONS
from llmserve.builder.causal import check_causal as check_causal
from llmserve.builder.causal import place_causal_model as place_causal_model
from llmserve.builder.causal import place_instances as place_instances
from llmserve.builder.context import BuildContext as BuildContext
from llmserve.builder.context import Container as Container
from llmserve.builtin import DECOUPLED_OPTION as DECOUPLED_OPTION
from llmserve.client.tools.parts import ToolPart as ToolPart
from llmserve.client.tools.parts import ToolReader as ToolReader
from llmserve.errors import ConfigError as ConfigError
from llmserve.errors import IncompatibleError as IncompatibleError
from llmserve.errors import LLMServeError as LLMServeError
from llmserve.errors import ModelSourceError as ModelSourceError
from llmserve.errors import OptionError as OptionError
from llmserve.errors import OutputError as OutputError
from llmserve.errors import PluginError as PluginError
from llmserve.errors import UsageError as UsageError
from llmserve.hookspecs import hookimpl as hookimpl
from llmserve.options import INT32_MAX as INT32_MAX
from llmserve.options import Option as Option
from llmserve.options import Value as Value
from llmserve.packages import install_command as install_command
from llmserve.repository.problems import CheckedModel as CheckedModel
from llmserve.repository.problems import Problem as Problem
from llmserve.repository.source import DEMO as DEMO
from llmserve.repository.source import ModelSource as ModelSource
from llmserve.repository.source import read_object as read_object
from llmserve.repository.source_files import check_vocabulary as check_vocabulary
from llmserve.repository.source_files import tokenizer_files as tokenizer_files
from llmserve.repository.source_files import weight_files as weight_files
from llmserve.roles import Backend as Backend
from llmserve.roles import Batching as Batching
from llmserve.roles import Formatter as Formatter
from llmserve.roles import Frontend as Frontend
from llmserve.roles import Generator as Generator
from llmserve.roles import Place as Place
from llmserve.roles import Recipe as Recipe
from llmserve.roles import Tokenizer as Tokenizer
from llmserve.roles import ToolParser as ToolParser
from llmserve.runtime import contract as contract
from llmserve.runtime.contract import Tensor as Tensor

if TYPE_CHECKING:
    import click

    from llmserve.builder.ensemble import Assembly as Assembly
    from llmserve.repository.config import ModelConfig as ModelConfig
    from llmserve.repository.config import add_inputs as add_inputs
    from llmserve.repository.config import add_outputs as add_outputs
    from llmserve.repository.config import set_parameters as set_parameters
    from llmserve.repository.manifest import Manifest as Manifest

_LAZY_MODULES = {
    "Assembly": "llmserve.builder.ensemble",
    "Manifest": "llmserve.repository.manifest",
    "ModelConfig": "llmserve.repository.config",
    "add_inputs": "llmserve.repository.config",
    "add_outputs": "llmserve.repository.config",
    "set_parameters": "llmserve.repository.config",
}

C = TypeVar("C")


def Pair(*words: object, **_: object) -> object:
    """Of API 2: ``compare`` takes the builds themselves, and what a recipe offers is not read."""
    return words


def section(name: str) -> Callable[[C], C]:
    """Put a command under a heading of ``llmserve --help``: Serve, Measure or Extend."""

    def mark(command: C) -> C:
        command.llmserve_section = name  # type: ignore[attr-defined]
        return command

    return mark


def lazy_command(name: str, path: str, summary: str, *, under: str = "") -> click.Command:
    """Return a command whose module is imported only when the command runs.

    ``path`` is ``"module:command"``. ``llmserve --help`` shows ``summary``, under the heading
    ``under``, as with :func:`section`.
    """
    import click

    command = click.Command(name, short_help=summary)
    command.llmserve_path = path  # type: ignore[attr-defined]
    return section(under)(command)


def __getattr__(name: str) -> Any:
    module = _LAZY_MODULES.get(name)
    if module is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(module), name)
