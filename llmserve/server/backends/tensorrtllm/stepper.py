"""What makes the tokens: a plugin's engine if one is installed, else a plain loop."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

from llmserve.errors import LLMServeError
from llmserve.registry import Registry
from llmserve.runtime.causal import context_length, load
from llmserve.runtime.protocols import Stepper
from llmserve.server.backends.tensorrtllm.plain import PlainStepper
from llmserve.server.backends.tensorrtllm.settings import Settings
from llmserve.server.backends.tensorrtllm.tokens import IdTokenizer

PREFERRED = "stepwise"
"""The generator that is looked for by its name; plugins are not imported by theirs."""


def make_stepper(settings: Settings) -> tuple[Stepper, int | None, str]:
    """Return what makes the steps, the model's context and what to call it in the log."""
    given = {
        **_located(settings.source),
        "device": "auto",
        "dtype": "auto",
        "max_sequences": settings.max_batch_size,
        "cache_tokens": settings.cache_tokens,
        "prefill_chunk": 256,
    }
    try:
        component = Registry.load().generator(PREFERRED)
    except LLMServeError:
        model = load(given, Path())
        length = context_length(model)
        return PlainStepper(model, settings.max_batch_size), length, "one sequence after another"
    module, _, name = component.runtime.partition(":")
    defaults = {option.name: option.default for option in component.options}
    generator = getattr(import_module(module), name)({**defaults, **given}, Path())
    return generator.stepper(IdTokenizer()), generator.context_length, f"the generator {PREFERRED}"


def _located(source: Mapping[str, Any]) -> dict[str, Any]:
    if not source.get("demo"):
        return dict(source)
    from llmserve.demo import demo_model_path

    return {"path": str(demo_model_path())}
