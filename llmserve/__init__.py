"""Serve language models with NVIDIA Triton, through plugins.

    import llmserve

    llmserve.build("hf", "demo", output="model_repository")
    with llmserve.connect() as client:
        print(client.generate("demo", "Programming in C++ is like").text)

The names below are loaded on first use, so that importing llmserve is cheap and
loads neither torch nor transformers nor click.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from llmserve.builder.build import BuildResult as BuildResult
    from llmserve.builder.build import BuildSpec as BuildSpec
    from llmserve.builder.build import build as build
    from llmserve.client import connect as connect
    from llmserve.client import connect_async as connect_async
    from llmserve.errors import LLMServeError as LLMServeError
    from llmserve.hookspecs import hookimpl as hookimpl

from llmserve.version import __version__ as __version__

_MODULES = {
    "BuildResult": "llmserve.builder.build",
    "BuildSpec": "llmserve.builder.build",
    "LLMServeError": "llmserve.errors",
    "build": "llmserve.builder.build",
    "connect": "llmserve.client",
    "connect_async": "llmserve.client",
    "hookimpl": "llmserve.hookspecs",
}

__all__ = sorted([*_MODULES, "__version__"])


def __getattr__(name: str) -> Any:
    module = _MODULES.get(name)
    if module is None:
        raise AttributeError(f"module 'llmserve' has no attribute {name!r}")
    return getattr(import_module(module), name)


def __dir__() -> list[str]:
    return __all__
