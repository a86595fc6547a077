"""The layout ``llmapi``: no engine, the same tensors for clients."""

from __future__ import annotations

from typing import Any

from llmserve.builder.assembly import Assembly
from llmserve.builder.context import BuildContext
from llmserve.sources.files import weight_files
from llmserve_trtllm.batching import llmapi_policy
from llmserve_trtllm.limits import ends_of, vocabulary_of
from llmserve_trtllm.models.llmapi import RUNTIME, LlmApiTarget, configure_llmapi
from llmserve_trtllm.models.target import Target
from llmserve_trtllm.names import add
from llmserve_trtllm.pipeline import Models, finish, stage


def assemble_llmapi(assembly: Assembly, asked: Target) -> None:
    """Make the ensemble around NVIDIA's LLM API."""
    options, context = assembly.options, assembly.context
    target = LlmApiTarget(asked.version, options, asked.batching, asked.scheduler)
    part = add(assembly, "tensorrt_llm")
    assembly.prepare("batching", part)
    part.config.ClearField("dynamic_batching")
    configure_llmapi(part.config, target)
    generator = limits(context, options)
    stage(assembly, part, RUNTIME, ("generator",), _settings(part, target), generator)
    finish(assembly, target, Models(part, generator))


def limits(context: BuildContext, options: Any) -> dict[str, Any]:
    """Return what the models around the LLM API have to know of it."""
    ends, pad = ends_of(context.source)
    config = context.source.config()
    own = config.get("max_position_embeddings") or config.get("n_positions") or 0
    asked = int(options["max_seq_len"])
    length = min(asked, own) if asked and own else asked or own or 2048
    return {
        "max_seq_len": length,
        "max_input_len": min(int(options["max_input_len"]) or length, length - 1),
        "max_beam_width": 1,
        "vocab_size": vocabulary_of(context.source),
        "eos_ids": ends,
        "pad_id": pad,
    }


def _settings(part: BuildContext, target: LlmApiTarget) -> dict[str, Any]:
    options = target.options
    files = weight_files(part.source, pickle=bool(options["pickle"]))
    return {
        **part.place(files, "model"),
        "streams": target.streams,
        "static": target.batching == "static",
        "stand_in": bool(options["stand_in"]),
        "scheduler": llmapi_policy(target.batching, target.scheduler),
        "max_batch_size": int(options["max_batch_size"]),
        "dtype": options["dtype"],
        "tensor_parallel_size": options["tensor_parallel"],
        "pipeline_parallel_size": options["pipeline_parallel"],
        "free_gpu_memory_fraction": options["kv_cache_free_gpu_mem_fraction"],
        "max_tokens": options["max_tokens_in_paged_kv_cache"],
        "enable_block_reuse": options["enable_kv_cache_reuse"],
        "outputs": {row.name: [row.kind, list(row.dims)] for row in target.engine_outputs},
    }
