"""The configurations of the ensemble's models, written field by field for one version."""

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
from llmserve_trtllm import tensors
from llmserve_trtllm.options import engine_parameters
from llmserve_trtllm.refusals import refused_requests
from llmserve_trtllm.target import MODEL_TYPES, MOST_COPIES, STATIC, BuildTarget
from llmserve_trtllm.tensors import Row

STAND_IN = "llmserve.stand_in"
"""Tells a stand-in which model the engine was built from; TensorRT-LLM ignores it."""


def declare_engine(config: ModelConfig, target: BuildTarget) -> None:
    # The engine places itself; KIND_CPU keeps Triton from creating an instance for every GPU.
    copies = target.options["gpu_device_ids"].count(";") + 1
    outputs = target.rows(tensors.ENGINE_OUTPUTS, tensors.SCORES)
    _declare(config, target.rows(tensors.ENGINE_INPUTS), outputs, copies=copies)
    config.model_transaction_policy.decoupled = target.streams


def configure_engine(
    config: ModelConfig, target: BuildTarget, engine_dir: str, stand_in: str
) -> None:
    if not target.is_0_5:
        _configure_queue(config, target)
    parameters = {
        "gpt_model_path": engine_dir,
        "gpt_model_type": MODEL_TYPES[target.batching],
        "batch_scheduler_policy": target.scheduler,
        STAND_IN: stand_in,
    }
    set_parameters(config, parameters | engine_parameters(target.options, target.version))


def configure_preprocessing(config: ModelConfig, target: BuildTarget) -> dict[str, Any]:
    rows = {_preprocessing_name(row): row for row in target.preprocessed}
    inputs = [replace(row, name=name) for name, row in rows.items()]
    copies = target.options["preprocessing_instance_count"]
    _declare(config, inputs, _preprocessing_outputs(target), copies=copies)
    _configure_queue(config, target)
    return {
        **_request_settings(target),
        "names": {
            name: tensors.CONTRACT_NAMES.get(row.name, row.name) for name, row in rows.items()
        },
    }


def configure_postprocessing(
    config: ModelConfig, target: BuildTarget, formatted: Iterable[Tensor]
) -> dict[str, Any]:
    inputs = target.rows(tensors.POSTPROCESSING_INPUTS)
    extra = [replace(row, name=row.name.upper()) for row in _extra_outputs(target, formatted)]
    outputs = [*target.rows(tensors.POSTPROCESSING_OUTPUTS), *extra]
    _declare(config, inputs, outputs, copies=target.options["postprocessing_instance_count"])
    config.dynamic_batching.SetInParent()
    return {"engine_echoes": target.engine_echoes}


def configure_orchestrator(
    config: ModelConfig, target: BuildTarget, engine_model: str, assembly: Assembly
) -> dict[str, Any]:
    """Configure ``tensorrt_llm_bls``, which calls the engine; return the stage's settings."""
    inputs, outputs = _client_tensors(target, assembly)
    # NVIDIA's docs/model_config.md: as many instances as the engine's batch has places.
    copies = target.options["bls_instance_count"] or min(target.batch_size, MOST_COPIES)
    if copies < target.batch_size:
        assembly.context.report(
            f"the engine runs {target.batch_size} requests at once, and {copies} of them through "
            "tensorrt_llm_bls: --bls-instance-count gives more processes"
        )
    _declare(config, inputs, outputs, copies=copies)
    config.model_transaction_policy.decoupled = target.streams or target.is_batched
    llmapi_rows = target.rows(tensors.CLIENT_LLMAPI)
    return {
        **_request_settings(target),
        "names": {row.name: tensors.CONTRACT_NAMES.get(row.name, row.name) for row in llmapi_rows},
        "engine_names": _engine_names(target),
        "direct": [row.name for row in target.direct],
        "scores": [row.name for row in _scores(target, assembly.outputs)],
        "engine_model": engine_model,
        "engine_echoes": target.engine_echoes,
    }


def wire(
    assembly: Assembly, target: BuildTarget, parts: tuple[BuildContext, BuildContext, BuildContext]
) -> None:
    """Declare the ensemble's tensors and connect its three models, as NVIDIA does."""
    preprocessing, engine, postprocessing = parts
    extra = _extra_outputs(target, assembly.outputs)
    scores = _scores(target, extra)
    outputs = [*target.rows(tensors.CLIENT_OUTPUTS), *extra, *scores]
    _declare(assembly.context.config, [*target.preprocessed, *target.direct], outputs, copies=0)
    engine_inputs = {inside: _wire(name) for name, inside in _engine_names(target).items()}
    engine_inputs |= {row.name: row.name for row in target.direct}
    last_inputs = {row.name: _wire(row.name) for row in target.rows(tensors.POSTPROCESSING_INPUTS)}
    used = {*engine_inputs.values(), *last_inputs.values()}
    wires = {row.name: _wire(row.name) for row in _preprocessing_outputs(target)}
    assembly.step(
        preprocessing,
        {_preprocessing_name(row): row.name for row in target.preprocessed},
        {name: wire for name, wire in wires.items() if wire in used},
    )
    engine_outputs = {row.name: row.name for row in scores} | {"output_ids": "_TOKENS_BATCH"}
    if not target.is_0_5:
        engine_outputs["sequence_length"] = "_SEQUENCE_LENGTH"
    assembly.step(engine, engine_inputs, engine_outputs)
    last_outputs = {"OUTPUT": "text_output", **{row.name.upper(): row.name for row in extra}}
    assembly.step(postprocessing, last_inputs, last_outputs)


def wire_to_bls(assembly: Assembly, target: BuildTarget, bls: BuildContext) -> None:
    """Connect the ensemble to ``tensorrt_llm_bls`` alone, which can stream what a pipeline cannot.

    Triton refuses an ensemble whose last step gets tensors from a decoupled model and from
    another, so a pipeline cannot keep any state between the pieces of a stream.
    """
    inputs, outputs = _client_tensors(target, assembly)
    _declare(assembly.context.config, inputs, outputs, copies=0)
    assembly.step(
        bls, {row.name: row.name for row in inputs}, {row.name: row.name for row in outputs}
    )


def llmapi_settings(target: BuildTarget) -> Mapping[str, Any]:
    options = target.options
    kv_cache = {
        "free_gpu_memory_fraction": options["kv_cache_free_gpu_mem_fraction"],
        "max_tokens": options["max_tokens_in_paged_kv_cache"] or "",
        # See seeing.py.
        "enable_block_reuse": False if target.sees else options["enable_kv_cache_reuse"],
    }
    copied = (
        "stand_in", "dtype", "tensor_parallel", "pipeline_parallel",
        "guided_decoding_backend", "adapter_mb", "max_loras", "max_lora_rank",
    )  # fmt: skip
    return {
        **{name: options[name] for name in copied},
        "max_batch_size": target.batch_size,
        "streams": target.streams,
        "sampler_type": target.sampler_type,
        "model_type": MODEL_TYPES[target.batching],
        "scheduler": "STATIC_BATCH" if target.batching == STATIC else target.scheduler.upper(),
        "kv_cache": {name: value for name, value in kv_cache.items() if value != ""},
        "outputs": [
            {"name": row.name, "dims": row.dims} for row in target.rows(tensors.ENGINE_OUTPUTS)
        ],
    }


def _client_tensors(target: BuildTarget, assembly: Assembly) -> tuple[list[Tensor], list[Tensor]]:
    """Return the inputs and outputs of ``tensorrt_llm_bls``: the template's and llmserve's."""
    formatted = assembly.outputs
    inputs: dict[str, Tensor] = {row.name: row for row in (*target.preprocessed, *target.direct)}
    # The inputs of a custom formatter or tokenizer.
    unknown = {contract.ADAPTER, *(() if target.guided else contract.FORMS)}
    others = [tensor for tensor in assembly.inputs if tensor not in unknown]
    inputs |= {tensor.name: tensor for tensor in others if tensor.name not in inputs}
    extra = [tensor for tensor in formatted if tensor.name != "text_output"]
    outputs = [*target.rows(tensors.CLIENT_OUTPUTS), *extra, *_scores(target, formatted)]
    return list(inputs.values()), outputs


def _sampling(target: BuildTarget) -> list[Row]:
    """Return the parameters to pass on; an engine without guided decoding would ignore a guide."""
    rows = target.rows(tensors.CLIENT_SAMPLING)
    return [row for row in rows if target.guided or not row.name.startswith("guided_")]


def _preprocessing_outputs(target: BuildTarget) -> list[Row]:
    sampling = [replace(row, name=f"OUT_{row.name.upper()}") for row in _sampling(target)]
    extra = target.rows(tensors.PREPROCESSING_EXTRA_OUTPUTS)
    return [*target.rows(tensors.PREPROCESSING_OUTPUTS), *sampling, *extra]


def _engine_names(target: BuildTarget) -> dict[str, str]:
    """Return the engine's input names by the names of preprocessing's outputs."""
    names = tensors.ENGINE_NAMES
    outputs = [row.name for row in _preprocessing_outputs(target)]
    return {name: names[name] for name in outputs if names.get(name) in target.engine_names}


def _preprocessing_name(row: Row) -> str:
    name = row.name.upper()
    return tensors.PREPROCESSING_NAMES.get(name, name)


def _extra_outputs(target: BuildTarget, formatted: Iterable[Tensor]) -> list[Tensor]:
    """Return the formatter's outputs besides the text; they are unknown for a piece of a stream."""
    return [t for t in formatted if t.name != "text_output" and not target.streams]


def _scores(target: BuildTarget, formatted: Iterable[Tensor]) -> list[Row]:
    """Return the engine's scores that the formatter does not output itself."""
    ours = {tensor.name for tensor in formatted}
    return [row for row in target.rows(tensors.SCORES) if row.name not in ours]


def _wire(name: str) -> str:
    """Return the ensemble's name for a tensor between two models."""
    return tensors.WIRE_NAMES.get(f"_{name}", f"_{name}")


def _request_settings(target: BuildTarget) -> dict[str, Any]:
    """Return the settings that every stage with a ``RequestWriter`` needs."""
    return {
        "sampling": [row.name for row in _sampling(target)],
        "makes": {row.name: row.data_type for row in _preprocessing_outputs(target)},
        # The end_id of an answer that no id ends: no engine ever generates this one.
        "no_end": 2**32 - 1 if target.is_0_5 else -1,
        "refused": refused_requests(
            {**target.options, "decoupled": target.streams}, target.version
        ),
        "streams": target.streams,
    }


def _declare(
    config: ModelConfig, inputs: Sequence[Tensor], outputs: Sequence[Tensor], *, copies: Any = 1
) -> None:
    # A model that reads images has taken its input for them.
    taken = {field.name for field in config.input}
    inputs = [tensor for tensor in inputs if tensor.name not in taken]
    add_inputs(config, inputs)
    add_outputs(config, outputs)
    for field, tensor in zip(config.input[len(taken) :], inputs, strict=True):
        if isinstance(tensor, Row) and tensor.scalar:
            # A reshape to no dimensions: the backend sees only the batch dimension.
            field.reshape.SetInParent()
    if copies:
        config.instance_group.add(count=copies, kind="KIND_CPU")


def _configure_queue(config: ModelConfig, target: BuildTarget) -> None:
    batching, options = config.dynamic_batching, target.options
    batching.SetInParent()
    if target.is_0_5:
        return
    batching.preferred_batch_size.append(config.max_batch_size)
    batching.max_queue_delay_microseconds = options["max_queue_delay_microseconds"]
    batching.default_queue_policy.SetInParent()
    batching.default_queue_policy.max_queue_size = options["max_queue_size"]
