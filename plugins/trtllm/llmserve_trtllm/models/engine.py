"""The model ``tensorrt_llm``: the engine itself."""

from __future__ import annotations

from llmserve import modelconfig
from llmserve.modelconfig import ModelConfig
from llmserve_trtllm.batching import engine_batching
from llmserve_trtllm.models.common import on_cpu, put_rows, queue
from llmserve_trtllm.models.target import Target
from llmserve_trtllm.parameters import engine_parameters

STAND_IN = "llmserve.stand_in"
"""Where the stand-in of the embedded server finds the weights; TensorRT-LLM overlooks it."""


def configure_engine(config: ModelConfig, target: Target, engine_dir: str, stand_in: str) -> None:
    """Fill in the configuration of the engine's model."""
    put_rows(config, target.engine_inputs, target.engine_outputs)
    config.model_transaction_policy.decoupled = target.streams
    if not target.is_first:
        queue(config, target)
    # The backend places itself; KIND_CPU keeps Triton from making an instance for every GPU.
    on_cpu(config)
    fixed = {"FORCE_CPU_ONLY_INPUT_TENSORS": "no", "gpt_model_path": engine_dir}
    if not target.is_first:
        fixed["executor_worker_path"] = (
            "/opt/tritonserver/backends/tensorrtllm/trtllmExecutorWorker"
        )
    modelconfig.set_parameters(
        config,
        {
            **fixed,
            **engine_batching(target.batching, target.scheduler, target.version),
            **engine_parameters(target.options, target.version),
            STAND_IN: stand_in,
        },
    )
