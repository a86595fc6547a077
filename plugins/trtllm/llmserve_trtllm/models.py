"""The configurations of the ensemble's models, each filled in field by field for one version."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from llmserve.plugin import (
    Assembly,
    BuildContext,
    ModelConfig,
    Tensor,
    add_inputs,
    add_outputs,
    contract,
    set_parameters,
)
from llmserve_trtllm.options import engine_parameters
from llmserve_trtllm.target import (
    MODEL_TYPES,
    STATIC,
    TENSORS,
    Row,
    Target,
    named,
)
from llmserve_trtllm.versions import pairs

STAND_IN = "llmserve.stand_in"
"""Where a stand-in finds the model that the engine was built from; TensorRT-LLM overlooks it."""


def declare_engine(config: ModelConfig, target: Target) -> None:
    # It places itself; KIND_CPU keeps Triton from making an instance for every GPU.
    copies = target.options["gpu_device_ids"].count(";") + 1
    outputs = target.rows("engine outputs", "scores")
    _declare(config, target.rows("engine inputs"), outputs, copies=copies)
    config.model_transaction_policy.decoupled = target.streams


def configure_engine(config: ModelConfig, target: Target, engine_dir: str, stand_in: str) -> None:
    if not target.is_first:
        _queue(config, target)
    chosen = {
        "gpt_model_path": engine_dir,
        "gpt_model_type": MODEL_TYPES[target.batching],
        "batch_scheduler_policy": target.scheduler,
        STAND_IN: stand_in,
    }
    set_parameters(config, chosen | engine_parameters(target.options, target.version))


def configure_preprocessing(config: ModelConfig, target: Target) -> dict[str, Any]:
    inside = {_in_preprocessing(row): row for row in target.taken}
    inputs = [replace(row, name=name) for name, row in inside.items()]
    _declare(config, inputs, _made(target), copies=target.options["preprocessing_instance_count"])
    _queue(config, target)
    return {
        **_request_settings(target),
        "names": {name: named("contract", row.name) for name, row in inside.items()},
    }


def configure_postprocessing(
    config: ModelConfig, target: Target, formatted: Iterable[Tensor]
) -> dict[str, Any]:
    inputs = target.rows("postprocessing inputs")
    others = [replace(row, name=row.name.upper()) for row in _beside_text(target, formatted)]
    outputs = [*target.rows("postprocessing outputs"), *others]
    _declare(config, inputs, outputs, copies=target.options["postprocessing_instance_count"])
    config.dynamic_batching.SetInParent()
    return {"engine_echoes": target.engine_echoes}


def configure_orchestrator(
    config: ModelConfig, target: Target, engine_model: str, assembly: Assembly
) -> dict[str, Any]:
    """Fill in ``tensorrt_llm_bls``, which asks the engine itself; return the stage's settings."""
    _declare(config, *_front(target, assembly), copies=target.options["bls_instance_count"])
    config.model_transaction_policy.decoupled = True
    return {
        **_request_settings(target),
        "names": {row.name: named("contract", row.name) for row in target.rows("client llmapi")},
        "engine_names": _led(target),
        "direct": [row.name for row in target.direct],
        "scores": [row.name for row in _scores(target, assembly.outputs)],
        "engine_model": engine_model,
        "engine_echoes": target.engine_echoes,
    }


def wire(
    assembly: Assembly, target: Target, parts: tuple[BuildContext, BuildContext, BuildContext]
) -> None:
    """Declare the ensemble's tensors and lead them through its three models, as NVIDIA does."""
    first, engine, last = parts
    beside = _beside_text(target, assembly.outputs)
    scores = _scores(target, beside)
    outputs = [*target.rows("client outputs"), *beside, *scores]
    _declare(assembly.context.config, [*target.taken, *target.direct], outputs, copies=0)
    inputs = {inside: _wire(name) for name, inside in _led(target).items()}
    inputs |= {row.name: row.name for row in target.direct}
    read = {row.name: _wire(row.name) for row in target.rows("postprocessing inputs")}
    used = {*inputs.values(), *read.values()}
    assembly.step(
        first,
        {_in_preprocessing(row): row.name for row in target.taken},
        {row.name: _wire(row.name) for row in _made(target) if _wire(row.name) in used},
    )
    answers = {row.name: row.name for row in scores} | {"output_ids": "_TOKENS_BATCH"}
    if not target.is_first:
        answers["sequence_length"] = "_SEQUENCE_LENGTH"
    assembly.step(engine, inputs, answers)
    written = {"OUTPUT": "text_output", **{row.name.upper(): row.name for row in beside}}
    assembly.step(last, read, written)


def wire_through(assembly: Assembly, target: Target, part: BuildContext) -> None:
    """Lead the ensemble to the orchestrator alone, which streams what a pipeline cannot.

    Triton refuses an ensemble whose last step gets tensors from a decoupled model and from
    another, so nothing could be remembered from one piece to the next.
    """
    inputs, outputs = _front(target, assembly)
    _declare(assembly.context.config, inputs, outputs, copies=0)
    assembly.step(
        part, {row.name: row.name for row in inputs}, {row.name: row.name for row in outputs}
    )


def llmapi_settings(target: Target) -> Mapping[str, Any]:
    options = target.options
    kv_cache = {
        "free_gpu_memory_fraction": options["kv_cache_free_gpu_mem_fraction"],
        "max_tokens": options["max_tokens_in_paged_kv_cache"] or "",
        "enable_block_reuse": options["enable_kv_cache_reuse"],
    }
    same = (
        "stand_in", "max_batch_size", "dtype", "tensor_parallel", "pipeline_parallel",
        "guided_decoding_backend",
    )  # fmt: skip
    return {
        **{name: options[name] for name in same},
        "streams": target.streams,
        "model_type": MODEL_TYPES[target.batching],
        "scheduler": "STATIC_BATCH" if target.batching == STATIC else target.scheduler.upper(),
        "kv_cache": {name: value for name, value in kv_cache.items() if value != ""},
        "outputs": [{"name": row.name, "dims": row.dims} for row in target.rows("engine outputs")],
    }


def _front(target: Target, assembly: Assembly) -> tuple[list[Tensor], list[Tensor]]:
    """Return what clients of the orchestrator send and get: the template's, and llmserve's."""
    formatted = assembly.outputs
    inputs: dict[str, Tensor] = {row.name: row for row in (*target.taken, *target.direct)}
    # Of a custom formatter or tokenizer.
    others = [tensor for tensor in assembly.inputs if target.guided or tensor not in contract.FORMS]
    inputs |= {tensor.name: tensor for tensor in others if tensor.name not in inputs}
    beside = [tensor for tensor in formatted if tensor.name != "text_output"]
    outputs = [*target.rows("client outputs"), *beside, *_scores(target, formatted)]
    return list(inputs.values()), outputs


def _sampling(target: Target) -> list[Row]:
    """What preprocessing hands on; an engine that cannot would pass over a guide in silence."""
    rows = target.rows("client sampling")
    return [row for row in rows if target.guided or not row.name.startswith("guided_")]


def _made(target: Target) -> list[Row]:
    """What preprocessing makes: prompts, what is asked for, and what postprocessing has to know."""
    asked = [replace(row, name=f"OUT_{row.name.upper()}") for row in _sampling(target)]
    beside = target.rows("preprocessing beside")
    return [*target.rows("preprocessing outputs"), *asked, *beside]


def _led(target: Target) -> dict[str, str]:
    """Return the engine's names of what preprocessing makes for it."""
    led = pairs(TENSORS, "preprocessing to engine")
    return {
        row.name: led[row.name] for row in _made(target) if led.get(row.name) in target.engine_names
    }


def _in_preprocessing(row: Row) -> str:
    return named("preprocessing", row.name.upper())


def _beside_text(target: Target, formatted: Iterable[Tensor]) -> list[Tensor]:
    """What the formatter says beside the text; of a piece of a stream it is not known."""
    return [t for t in formatted if t.name != "text_output" and not target.streams]


def _scores(target: Target, formatted: Iterable[Tensor]) -> list[Row]:
    """What the engine says and the formatter does not."""
    ours = {tensor.name for tensor in formatted}
    return [row for row in target.rows("scores") if row.name not in ours]


def _wire(name: str) -> str:
    """Return what the ensemble calls a tensor between two models."""
    return named("wires", f"_{name}")


def _request_settings(target: Target) -> dict[str, Any]:
    """What a ``RequestWriter`` has to know, and its users."""
    return {
        "sampling": [row.name for row in _sampling(target)],
        "makes": {row.name: row.data_type for row in _made(target)},
        # The id that no engine ever makes: what end_id is where nothing ends an answer.
        "no_end": 2**32 - 1 if target.is_first else -1,
        "streams": target.streams,
    }


def _declare(
    config: ModelConfig, inputs: Sequence[Tensor], outputs: Sequence[Tensor], *, copies: Any = 1
) -> None:
    add_inputs(config, inputs)
    add_outputs(config, outputs)
    for field, tensor in zip(config.input, inputs, strict=True):
        if isinstance(tensor, Row) and tensor.scalar:
            # A reshape to nothing at all: the batch dimension is all that the backend sees.
            field.reshape.SetInParent()
    if copies:
        config.instance_group.add(count=copies, kind="KIND_CPU")


def _queue(config: ModelConfig, target: Target) -> None:
    batching, options = config.dynamic_batching, target.options
    batching.SetInParent()
    if target.is_first:
        return
    batching.preferred_batch_size.append(config.max_batch_size)
    batching.max_queue_delay_microseconds = options["max_queue_delay_microseconds"]
    batching.default_queue_policy.SetInParent()
    batching.default_queue_policy.max_queue_size = options["max_queue_size"]
