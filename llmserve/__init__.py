"""Serve language models with NVIDIA Triton, through plugins.

    import llmserve

    llmserve.build("hf", "demo", output="model_repository")
    with llmserve.connect() as client:
        print(client.generate("demo", "Programming in C++ is like").text)

The names below are loaded when they are first used, so that importing llmserve
costs nothing and drags in neither torch nor transformers nor click.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from llmserve.builder.build import BuildResult, BuildSpec, build
    from llmserve.client import connect, connect_async
    from llmserve.errors import LLMServeError
    from llmserve.hookspecs import hookimpl

from llmserve.version import __version__

_HOMES = {
    "BuildResult": "llmserve.builder.build",
    "BuildSpec": "llmserve.builder.build",
    "LLMServeError": "llmserve.errors",
    "build": "llmserve.builder.build",
    "connect": "llmserve.client",
    "connect_async": "llmserve.client",
    "hookimpl": "llmserve.hookspecs",
}

__all__ = [
    "BuildResult",
    "BuildSpec",
    "LLMServeError",
    "__version__",
    "build",
    "connect",
    "connect_async",
    "hookimpl",
]


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'llmserve' has no attribute {name!r}")
    return getattr(import_module(home), name)


def __dir__() -> list[str]:
    return sorted(__all__)
