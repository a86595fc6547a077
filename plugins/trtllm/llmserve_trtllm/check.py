"""Checks for repositories made by hand from TensorRT-LLM's templates.

The templates are copied and their placeholders filled in with ``sed``, and half of all questions
about the backend result from that: an unfilled placeholder, an engine of another version, a value
that no version supports or that none supports any more.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from llmserve.plugin import CheckedModel, LLMServeError, ModelConfig, Problem
from llmserve_trtllm.engine import read_engine
from llmserve_trtllm.options import WRITTEN
from llmserve_trtllm.versions import Version

BACKEND = "tensorrtllm"
# The backend, a parameter without which its models do not load, and how to fix it. Any other
# parameter that is not filled in counts as unset.
_REQUIRED = (
    (BACKEND, "gpt_model_path", "set it to the folder of the engine"),
    (
        BACKEND,
        "gpt_model_type",
        "set it to inflight_fused_batching, or before 0.20 to V1 for static batches",
    ),
    ("python", "tokenizer_dir", "set it to the folder of the tokenizer"),
)
# The values that a parameter may have; the error suggests the first two.
_SUPPORTED = (
    ("gpt_model_type", "inflight_fused_batching", "inflight_batching", "V1", "v1"),
    ("batch_scheduler_policy", "guaranteed_no_evict", "max_utilization"),
)
# Parameters that are no longer read, and since which version.
_REMOVED = (
    ("max_num_sequences", "0.8"),
    ("max_kv_cache_length", "0.7, which calls it max_attention_window_size"),
    ("tokenizer_type", "0.9"),
    ("enable_trt_overlap", "0.11"),
)
# Tensors that show how old a template is, and the versions that introduced them, newest first.
_INTRODUCED = (
    ("num_input_tokens", "1.2"),
    ("guided_decoding_guide", "0.19"),
    ("batch_index", "0.11"),
)


def check_model(model: CheckedModel) -> Iterator[Problem]:
    """Check a model made from TensorRT-LLM's templates; other models yield no problems."""
    name, config, configs = model.name, model.config, model.configs
    for backend, key, hint in _REQUIRED:
        if backend != config.backend:
            continue
        if (value := _text(config, key)).startswith("${"):
            yield Problem(name, f"{key} is still {value}", hint)
        elif config.backend == BACKEND and key not in config.parameters:
            yield Problem(name, f"it has no parameter {key}", hint)
    if config.backend == BACKEND:
        yield from _check_parameters(name, config)
        yield from _check_engine(name, config)
    if config.platform == "ensemble":
        steps = [(step, configs.get(step.model_name)) for step in config.ensemble_scheduling.step]
        engines = [part for _, part in steps if part is not None and part.backend == BACKEND]
        if engines:
            yield from _check_stream(name, config, steps, engines[0])
    if "tensorrt_llm_model_name" in config.parameters:
        yield from _check_bls(name, config, configs)


def _check_parameters(name: str, config: ModelConfig) -> Iterator[Problem]:
    """Find missing parameters, unsupported values, and parameters that are no longer read."""
    tensors = _tensors(config)
    empty = [key for _, key, value in WRITTEN if not value]
    missing = [key for key in empty if key not in config.parameters]
    if missing and "guided_decoding_guide" in tensors:
        yield Problem(
            name,
            f"it has no parameter {', '.join(missing)}, without which TensorRT-LLM 0.19 and later "
            "do not load it",
            "set each of them to an empty string if you do not use it",
        )
    for key, *supported in _SUPPORTED:
        value = _text(config, key)
        if value and not value.startswith("${") and value not in supported:
            yield Problem(
                name,
                f"no version of TensorRT-LLM supports {value!r} as {key}",
                f"set it to {' or '.join(supported[:2])}",
                fatal=key == "gpt_model_type",
            )
    for key, version in _REMOVED:
        was_restored = key == "enable_trt_overlap" and "num_input_tokens" in tensors
        is_set = _text(config, key) not in ("", f"${{{key}}}")
        if is_set and not was_restored and not _is_old(config):
            yield Problem(
                name, f"{key} has not been read since {version}", "remove it", fatal=False
            )


def _check_engine(name: str, config: ModelConfig) -> Iterator[Problem]:
    """Compare the template with the engine, if the engine is accessible here."""
    path = _text(config, "gpt_model_path")
    if not path or path.startswith("${"):
        return
    try:
        engine = read_engine(Path(path))
    except LLMServeError as error:
        # An engine that is missing here may exist on the server's machine.
        is_missing = not Path(path).is_dir()
        hint = "put it there, or make sure that the server finds it at that path"
        yield Problem(name, error.problem, hint if is_missing else str(error.hint), not is_missing)
        return
    yield from _check_version(name, config, engine.version)
    if not engine.packed_input and _text(config, "gpt_model_type").startswith("inflight"):
        what = "in-flight batching needs an engine with packed input"
        yield Problem(name, what, "rebuild the engine with remove_input_padding")
    if config.max_batch_size > (limit := engine.max_batch_size):
        what = f"max_batch_size {config.max_batch_size} exceeds the engine's {limit}"
        yield Problem(name, what, f"lower it to {limit}")


def _check_version(name: str, config: ModelConfig, engine: Version | None) -> Iterator[Problem]:
    tensors = _tensors(config)
    versions = (version for tensor, version in _INTRODUCED if tensor in tensors)
    since = next(map(Version.parse, versions), None)
    template = ""
    if _is_old(config):
        template = "TensorRT-LLM before 0.7" if engine is not None else ""
    elif since is not None and (engine is None or engine < since):
        template = f"TensorRT-LLM {since} or later"
    if template:
        built_for = engine or "a version before 0.8"
        what = f"its template is for {template} and its engine for {built_for}"
        hint = "use the templates of the engine's version, or rebuild the engine"
        yield Problem(name, what, hint)


def _check_stream(
    name: str, config: ModelConfig, steps: list[Any], engine: ModelConfig
) -> Iterator[Problem]:
    decoupled = engine.model_transaction_policy.decoupled
    passes_stream = any(step.input_map.get("streaming") == "stream" for step, _ in steps)
    if passes_stream and not decoupled and "stream" in _tensors(config):
        yield Problem(
            name,
            f"requests with stream are refused: {engine.name} is not decoupled",
            "set decoupled: true in its model_transaction_policy if you want to stream",
            fatal=False,
        )
    producers = {wire: step.model_name for step, _ in steps for wire in step.output_map.values()}
    for step, part in steps:
        sources = {producers.get(wire) for wire in step.input_map.values()}
        if decoupled and engine.name in sources and len(sources) > 1 and part is not engine:
            yield Problem(
                name,
                f"{step.model_name} gets tensors from {engine.name}, which is decoupled, and from "
                "other sources, which Triton refuses",
                f"pass it only tensors of {engine.name}, or make {engine.name} not decoupled",
            )


def _check_bls(name: str, config: ModelConfig, configs: Any) -> Iterator[Problem]:
    """Check that a BLS model is decoupled if and only if the engine's model is."""
    engine_name = _text(config, "tensorrt_llm_model_name")
    if not engine_name or engine_name.startswith("${"):
        engine_name = "tensorrt_llm"
    engine = configs.get(engine_name)
    if engine is None or engine.backend != BACKEND:
        return
    ours, theirs = (c.model_transaction_policy.decoupled for c in (config, engine))
    if ours != theirs:
        states = {True: "decoupled", False: "not decoupled"}
        what = f"it is {states[ours]} and {engine.name} is {states[theirs]}"
        yield Problem(name, what, "set decoupled_mode to the same value in both")


def _is_old(config: ModelConfig) -> bool:
    from tritonclient.grpc.model_config_pb2 import TYPE_UINT32

    types = {tensor.name: tensor.data_type for tensor in config.input}
    return bool(types.get("request_output_len") == TYPE_UINT32)


def _tensors(config: ModelConfig) -> set[str]:
    return {tensor.name for tensor in (*config.input, *config.output)}


def _text(config: ModelConfig, key: str) -> str:
    # Reading a missing key from a protobuf map would add it.
    return config.parameters[key].string_value.strip() if key in config.parameters else ""
