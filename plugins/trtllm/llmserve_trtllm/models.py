"""The configurations of the ensemble's models, each filled in field by field for one version."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from tritonclient.grpc import model_config_pb2 as pb

from llmserve.plugin import Assembly, BuildContext, ModelConfig, Tensor
from llmserve.repository import config as modelconfig
from llmserve_trtllm.options import engine_parameters
from llmserve_trtllm.tables import Row
from llmserve_trtllm.target import (
    REQUEST,
    Target,
    contract_name,
    engine_batching,
    engine_name,
    preprocessing_name,
)

PREPROCESSING = "llmserve_trtllm.runtime.preprocessing:Preprocessing"
POSTPROCESSING = "llmserve_trtllm.runtime.postprocessing:Postprocessing"
ORCHESTRATOR = "llmserve_trtllm.runtime.orchestrator:Orchestrator"
LLMAPI = "llmserve_trtllm.runtime.llmapi:LlmApi"

STAND_IN = "llmserve.stand_in"
"""Where a stand-in finds the model that the engine was built from; TensorRT-LLM overlooks it."""
UNGUARDED = ("tokenizer_dir", "xgrammar_tokenizer_info_path", "guided_decoding_backend")
"""What the backend reads from 0.19 on without a default: left out, the model does not load
(inflight_batcher_llm/src/model_instance_state.cc:413-415 of v0.19.0). Empty means not used."""

_TO_ENGINE = {
    "INPUT_ID": "input_ids",
    "REQUEST_INPUT_LEN": "input_lengths",
    "REQUEST_OUTPUT_LEN": "request_output_len",
    "BAD_WORDS_IDS": "bad_words_list",
    "STOP_WORDS_IDS": "stop_words_list",
    "EMBEDDING_BIAS": "embedding_bias",
}
_WIRES = {"OUT_END_ID": "_PREPROCESSOR_END_ID", "OUT_PAD_ID": "_PREPROCESSOR_PAD_ID"}


def configure_engine(config: ModelConfig, target: Target, engine_dir: str, stand_in: str) -> None:
    """Fill in ``tensorrt_llm``: the engine itself."""
    _declare(config, target.engine_inputs, target.engine_outputs)
    config.model_transaction_policy.decoupled = target.streams
    if not target.is_first:
        _queue(config, target)
    # The backend places itself; KIND_CPU keeps Triton from making an instance for every GPU.
    gpus = str(target.options["gpu_device_ids"])
    _on_cpu(config, gpus.count(";") + 1)
    fixed = {"FORCE_CPU_ONLY_INPUT_TENSORS": "no", "gpt_model_path": engine_dir}
    if not target.is_first:
        fixed["executor_worker_path"] = (
            "/opt/tritonserver/backends/tensorrtllm/trtllmExecutorWorker"
        )
    if any(row.name == "guided_decoding_guide" for row in target.engine_inputs):
        fixed |= dict.fromkeys(UNGUARDED, "")
    modelconfig.set_parameters(
        config,
        {
            **fixed,
            **engine_batching(target.batching, target.scheduler, target.version),
            **engine_parameters(target.options, target.version),
            STAND_IN: stand_in,
        },
    )


def configure_llmapi(config: ModelConfig, target: Target) -> None:
    """Fill in ``tensorrt_llm`` without an engine: requests go on at once, the LLM API batches."""
    _declare(config, target.engine_inputs, target.engine_outputs)
    config.model_transaction_policy.decoupled = target.streams
    _on_cpu(config)


def configure_preprocessing(config: ModelConfig, target: Target) -> dict[str, Any]:
    """Fill in ``preprocessing`` and return the stage's settings."""
    inside = {preprocessing_name(row.name): row for row in target.taken}
    _declare(config, (replace(row, name=name) for name, row in inside.items()), _made(target))
    _queue(config, target)
    _on_cpu(config, int(target.options["preprocessing_instance_count"]))
    return {
        **_shared_settings(target),
        "names": {name: contract_name(row.name) for name, row in inside.items()},
        "kinds": {row.name: row.kind for row in _made(target)},
    }


def configure_postprocessing(
    config: ModelConfig, target: Target, formatted: Iterable[Tensor]
) -> dict[str, Any]:
    """Fill in ``postprocessing`` and return the stage's settings."""
    inputs = [*target.rows("postprocessing inputs"), *([] if target.streams else [REQUEST])]
    others = [replace(row, name=row.name.upper()) for row in _extra(target, formatted)]
    _declare(config, inputs, [*target.rows("postprocessing outputs"), *others])
    config.dynamic_batching.SetInParent()
    _on_cpu(config, int(target.options["postprocessing_instance_count"]))
    return {"engine_echoes": target.engine_echoes}


def configure_orchestrator(
    config: ModelConfig, target: Target, engine_model: str, assembly: Assembly
) -> dict[str, Any]:
    """Fill in ``tensorrt_llm_bls``, which asks the engine itself; return the stage's settings."""
    inputs, outputs = _front(target, assembly)
    _declare(config, inputs, outputs)
    config.model_transaction_policy.decoupled = True
    _on_cpu(config, int(target.options["bls_instance_count"]))
    kinds = {row.name: row.kind for row in (*target.engine_outputs, *target.engine_inputs)}
    return {
        **_shared_settings(target),
        "names": {row.name: contract_name(row.name) for row in target.rows("client llmapi")},
        "inside": {row.name: engine_name(row.name) for row in target.rows("client sampling")},
        "direct": [row.name for row in target.direct],
        "scores": [row.name for row in _scores(target, assembly.outputs)],
        "engine_model": engine_model,
        "engine_kinds": kinds,
        "engine_echoes": target.engine_echoes,
    }


def wire(
    assembly: Assembly, target: Target, parts: tuple[BuildContext, BuildContext, BuildContext]
) -> None:
    """Declare the ensemble's tensors and lead them through its three models, as NVIDIA does."""
    first, engine, last = parts
    formatted = assembly.outputs
    has = {row.name for row in target.engine_inputs}
    others, scores = _extra(target, formatted), _scores(target, _told(target, formatted))
    _declare(
        assembly.context.config,
        [*target.taken, *target.direct],
        [*target.rows("client outputs"), *others, *scores],
    )
    made = [row.name for row in _made(target)]
    assembly.step(
        first,
        {preprocessing_name(row.name): row.name for row in target.taken},
        # 0.5.0 has no use for words.
        {n: _wire_name(n) for n in made if n not in _TO_ENGINE or _TO_ENGINE[n] in has},
    )
    inputs = {_TO_ENGINE[n]: _wire_name(n) for n in made if _TO_ENGINE.get(n) in has}
    inputs |= {
        engine_name(row.name): _wire_name(f"OUT_{row.name.upper()}")
        for row in (*target.rows("client sampling"), *_passed_on(target))
    }
    inputs |= {engine_name(row.name): row.name for row in target.direct}
    outputs = {"output_ids": "_TOKENS_BATCH"}
    if not target.is_first:
        outputs["sequence_length"] = "_SEQUENCE_LENGTH"
    assembly.step(engine, inputs, {**outputs, **{row.name: row.name for row in scores}})
    ours = {} if target.streams else {REQUEST.name: _wire_name(REQUEST.name)}
    assembly.step(
        last,
        {**{row.name: f"_{row.name}" for row in target.rows("postprocessing inputs")}, **ours},
        {"OUTPUT": "text_output", **{row.name.upper(): row.name for row in others}},
    )


def wire_through(assembly: Assembly, target: Target, part: BuildContext) -> None:
    """Lead the ensemble to the orchestrator alone, which streams what a pipeline cannot.

    Triton refuses an ensemble whose last step gets tensors from a decoupled model and from
    another, so nothing could be remembered from one piece to the next.
    """
    inputs, outputs = _front(target, assembly)
    _declare(assembly.context.config, inputs, outputs)
    assembly.step(
        part, {row.name: row.name for row in inputs}, {row.name: row.name for row in outputs}
    )


def _front(target: Target, assembly: Assembly) -> tuple[list[Row], list[Row]]:
    """Return what clients of the orchestrator send and get: the template's, and llmserve's."""
    formatted = assembly.outputs
    inputs = {row.name: row for row in (*target.taken, *target.direct)}
    # Of a custom formatter or tokenizer.
    inputs |= {t.name: _row(t) for t in assembly.inputs if t.name not in inputs}
    others = [_row(tensor) for tensor in formatted if tensor.name != "text_output"]
    outputs = [*target.rows("client outputs"), *others, *_scores(target, formatted)]
    return list(inputs.values()), outputs


def _passed_on(target: Target) -> list[Row]:
    """What preprocessing hands on to a decoupled engine, which alone can act on it."""
    has = {row.name for row in target.engine_inputs}
    names = ("stream", "exclude_input_in_output") if target.streams else ()
    rows = target.rows("client llmserve")
    return [row for row in rows if row.name in names and engine_name(row.name) in has]


def _made(target: Target) -> list[Row]:
    """What preprocessing makes."""
    asked = [
        replace(row, name=f"OUT_{row.name.upper()}", optional=False)
        for row in (*target.rows("client sampling"), *_passed_on(target))
    ]
    ours = [] if target.streams else [REQUEST]
    return [*target.rows("preprocessing outputs"), *asked, *ours]


def _told(target: Target, formatted: Iterable[Tensor]) -> Iterable[Tensor]:
    """What is known of an answer behind the engine: of a piece of a stream not whose it is."""
    return () if target.streams else formatted


def _extra(target: Target, formatted: Iterable[Tensor]) -> list[Row]:
    """What the formatter says beside the text, under the client's names."""
    return [_row(tensor) for tensor in _told(target, formatted) if tensor.name != "text_output"]


def _scores(target: Target, formatted: Iterable[Tensor]) -> list[Row]:
    """What the engine says and the formatter does not."""
    ours = {tensor.name for tensor in formatted}
    return [row for row in target.rows("scores") if row.name not in ours]


def _row(tensor: Tensor) -> Row:
    kind = tensor.data_type.removeprefix("TYPE_")
    return Row(tensor.name, kind, tuple(tensor.dims), tensor.optional, ragged=tensor.ragged)


def _wire_name(name: str) -> str:
    return _WIRES.get(name, f"_{name}")


def _shared_settings(target: Target) -> dict[str, Any]:
    return {
        "sampling": {row.name: row.kind for row in target.rows("client sampling")},
        "no_end": target.no_end,
        "streams": target.streams,
    }


def _declare(config: ModelConfig, inputs: Iterable[Row], outputs: Iterable[Row]) -> None:
    for row in inputs:
        field = _field(config.input, row)
        field.optional, field.allow_ragged_batch = row.optional, row.ragged
    for row in outputs:
        _field(config.output, row)


def _field(fields: Any, row: Row) -> Any:
    kind = pb.DataType.Value(f"TYPE_{row.kind}")
    field = fields.add(name=row.name, data_type=kind, dims=row.dims)
    if row.reshape:
        # A reshape to nothing at all: the batch dimension is all that the backend sees.
        field.reshape.SetInParent()
    return field


def _on_cpu(config: ModelConfig, count: int = 1) -> None:
    config.instance_group.add(count=count, kind=pb.ModelInstanceGroup.KIND_CPU)


def _queue(config: ModelConfig, target: Target) -> None:
    """Say how requests wait, as the version's template does."""
    batching, options = config.dynamic_batching, target.options
    batching.SetInParent()
    if target.is_first:
        return
    batching.preferred_batch_size.append(config.max_batch_size)
    batching.max_queue_delay_microseconds = int(options["max_queue_delay_microseconds"])
    batching.default_queue_policy.SetInParent()
    batching.default_queue_policy.max_queue_size = int(options["max_queue_size"])


def settings_of_llmapi(target: Target, scheduler: str) -> Mapping[str, Any]:
    """Return what the class around the LLM API is made with."""
    options = target.options
    return {
        "streams": target.streams,
        "stand_in": bool(options["stand_in"]),
        "batching": target.batching,
        "scheduler": scheduler,
        "max_batch_size": int(options["max_batch_size"]),
        "dtype": options["dtype"],
        "tensor_parallel_size": options["tensor_parallel"],
        "pipeline_parallel_size": options["pipeline_parallel"],
        "kv_cache": {
            name: value
            for name, key in (
                ("free_gpu_memory_fraction", "kv_cache_free_gpu_mem_fraction"),
                ("max_tokens", "max_tokens_in_paged_kv_cache"),
                ("enable_block_reuse", "enable_kv_cache_reuse"),
            )
            if (value := options[key]) not in ("", 0) or value is False
        },
        "outputs": {row.name: [row.kind, list(row.dims)] for row in target.engine_outputs},
    }
