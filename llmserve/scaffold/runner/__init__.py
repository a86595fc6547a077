"""The plugin ``scaffold``: a runner for the engine, and its recipe."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from llmserve.plugin import BuildContext, Generator, Recipe, contract, hookimpl


@hookimpl
def llmserve_register_generators() -> Sequence[Generator]:
    """Register the generator; its class is imported in Triton, not here."""
    return [
        Generator(
            name="scaffold",
            summary="A recurrent model in numpy, under llmserve's engine",
            runtime="llmserve.scaffold.runner.generator:ScaffoldGenerator",
            # With "batch" it also runs with the batchings dynamic and static.
            modes=frozenset({"step", "batch"}),
            prepare=_prepare,
            # The engine chooses every token, and does all of this itself.
            inputs=contract.ENGINE_OPTIONS,
            outputs=contract.ENGINE_OUTPUTS,
            constrains=True,
            requires=("numpy",),
        )
    ]


@hookimpl
def llmserve_register_recipes() -> Sequence[Recipe]:
    return [
        Recipe(
            name="scaffold",
            summary="Recurrent models in numpy run by scaffold",
            generator="scaffold",
            batching="continuous",
        )
    ]


def _prepare(context: BuildContext) -> Mapping[str, Any]:
    """Say what the runner needs; a real one also places weights: ``context.place``."""
    config = context.source.config()
    return {
        "vocab_size": config["vocab_size"],
        "eos_ids": [config["eos_token_id"]],
        "context_length": 512,
    }
