"""The model ``tensorrt_llm_bls``: one model for clients that asks the engine by itself."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from llmserve import modelconfig
from llmserve.modelconfig import ModelConfig
from llmserve.runtime.contract import Tensor
from llmserve_trtllm.models.common import on_cpu, shared_settings
from llmserve_trtllm.models.target import Target
from llmserve_trtllm.tables.client import engine_name

RUNTIME = "llmserve_trtllm.runtime.bls:Orchestrator"


def configure_orchestrator(
    config: ModelConfig,
    target: Target,
    engine_model: str,
    inputs: Iterable[Tensor],
    formatted: Iterable[Tensor],
) -> dict[str, Any]:
    """Fill in the configuration and return the stage's settings."""
    modelconfig.add_inputs(config, inputs)
    modelconfig.add_outputs(config, formatted)
    config.model_transaction_policy.decoupled = True
    on_cpu(config, int(target.options["bls_instance_count"]))
    kinds = {row.name: row.kind for row in (*target.engine_outputs, *target.engine_inputs)}
    return {
        **shared_settings(target),
        "inside": {row.name: engine_name(row.name) for row in target.wishes},
        "engine_model": engine_model,
        "engine_kinds": kinds,
        "engine_echoes": target.engine_echoes,
        "threads": max(64, config.max_batch_size),
    }
