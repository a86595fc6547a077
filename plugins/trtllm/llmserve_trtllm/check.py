"""What goes wrong in repositories made by hand from TensorRT-LLM's templates.

The templates are copied and their placeholders filled in with ``sed``, and half of what is asked
about the backend comes of it: a placeholder that is left, an engine of another version, a word
that no version knows or none does any more.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from llmserve.plugin import CheckedModel, LLMServeError, ModelConfig, Problem
from llmserve_trtllm.engine import read_engine
from llmserve_trtllm.options import WRITTEN
from llmserve_trtllm.versions import Version, columns

BACKEND = "tensorrtllm"
_TABLE = "check.txt"


def check_model(model: CheckedModel) -> Iterator[Problem]:
    """Check a model of TensorRT-LLM's templates; any other model has none of these problems."""
    name, config, configs = model.name, model.config, model.configs
    for backend, key, mend in columns(_TABLE, "needed"):
        if backend != config.backend:
            continue
        if (value := _text(config, key)).startswith("${"):
            yield Problem(name, f"{key} is still {value}", mend)
        elif config.backend == BACKEND and key not in config.parameters:
            yield Problem(name, f"it has no parameter {key}", mend)
    if config.backend == BACKEND:
        yield from _check_parameters(name, config)
        yield from _check_engine(name, config)
    if config.platform == "ensemble":
        steps = [(step, configs.get(step.model_name)) for step in config.ensemble_scheduling.step]
        engines = [part for _, part in steps if part is not None and part.backend == BACKEND]
        if engines:
            yield from _check_stream(name, config, steps, engines[0])
    if "tensorrt_llm_model_name" in config.parameters:
        yield from _check_front(name, config, configs)


def _check_parameters(name: str, config: ModelConfig) -> Iterator[Problem]:
    """Find what the backend reads without a default, what it does not know, and what it did."""
    tensors = _tensors(config)
    empty = [key for _, key, value in WRITTEN if not value]
    missing = [key for key in empty if key not in config.parameters]
    if missing and "guided_decoding_guide" in tensors:
        yield Problem(
            name,
            f"it has no parameter {', '.join(missing)}, without which no TensorRT-LLM from 0.19 "
            "on loads it",
            "set each to an empty text, if you have no use for it",
        )
    for key, *words in columns(_TABLE, "words"):
        value = _text(config, key)
        if value and not value.startswith("${") and value not in words:
            yield Problem(
                name,
                f"no version of TensorRT-LLM knows {value!r} as {key}",
                f"write {' or '.join(words[:2])}",
                fatal=key == "gpt_model_type",
            )
    for key, version in columns(_TABLE, "gone"):
        came_back = key == "enable_trt_overlap" and "num_input_tokens" in tensors
        is_set = _text(config, key) not in ("", f"${{{key}}}")
        if is_set and not came_back and not _is_old(config):
            yield Problem(
                name, f"{key} has not been read since {version}", "take it out", fatal=False
            )


def _check_engine(name: str, config: ModelConfig) -> Iterator[Problem]:
    """Hold the template against the engine, where that can be seen from here."""
    where = _text(config, "gpt_model_path")
    if not where or where.startswith("${"):
        return
    try:
        engine = read_engine(Path(where))
    except LLMServeError as error:
        # An engine that is not here may be where the server is.
        elsewhere = not Path(where).is_dir()
        mend = "put it there, or see that the server finds it under that path"
        yield Problem(name, error.problem, mend if elsewhere else str(error.mend), not elsewhere)
        return
    yield from _check_version(name, config, engine.version)
    if not engine.packed_input and _text(config, "gpt_model_type").startswith("inflight"):
        what = "in-flight batching needs an engine with packed input"
        yield Problem(name, what, "build the engine again with remove_input_padding")
    if config.max_batch_size > (most := engine.max_batch_size):
        what = f"max_batch_size {config.max_batch_size} is over the engine's {most}"
        yield Problem(name, what, f"lower it to {most}")


def _check_version(name: str, config: ModelConfig, engine: Version | None) -> Iterator[Problem]:
    tensors = _tensors(config)
    came = (version for tensor, version in columns(_TABLE, "came") if tensor in tensors)
    since = next(map(Version.parse, came), None)
    template = ""
    if _is_old(config):
        template = "a TensorRT-LLM before 0.7" if engine is not None else ""
    elif since is not None and (engine is None or engine < since):
        template = f"TensorRT-LLM {since} or later"
    if template:
        what = f"its template is of {template} and its engine of {engine or 'one before 0.8'}"
        mend = "take the templates of the engine's version, or build the engine again"
        yield Problem(name, what, mend)


def _check_stream(
    name: str, config: ModelConfig, steps: list[Any], engine: ModelConfig
) -> Iterator[Problem]:
    decoupled = engine.model_transaction_policy.decoupled
    asked_for = any(step.input_map.get("streaming") == "stream" for step, _ in steps)
    if asked_for and not decoupled and "stream" in _tensors(config):
        yield Problem(
            name,
            f"requests with stream are refused: {engine.name} is not decoupled",
            "set decoupled: true in its model_transaction_policy, if you want to stream",
            fatal=False,
        )
    made_by = {ours: step.model_name for step, _ in steps for ours in step.output_map.values()}
    for step, part in steps:
        sources = {made_by.get(tensor) for tensor in step.input_map.values()}
        if decoupled and engine.name in sources and len(sources) > 1 and part is not engine:
            yield Problem(
                name,
                f"{step.model_name} gets tensors from {engine.name}, which is decoupled, and from "
                "elsewhere, which Triton refuses",
                f"lead only {engine.name}'s to it, or make {engine.name} answer in one piece",
            )


def _check_front(name: str, config: ModelConfig, configs: Any) -> Iterator[Problem]:
    """A BLS model streams if and only if the engine's model does."""
    asked = _text(config, "tensorrt_llm_model_name")
    engine = configs.get("tensorrt_llm" if not asked or asked.startswith("${") else asked)
    if engine is None or engine.backend != BACKEND:
        return
    ours, theirs = (c.model_transaction_policy.decoupled for c in (config, engine))
    if ours != theirs:
        words = {True: "decoupled", False: "not decoupled"}
        what = f"it is {words[ours]} and {engine.name} is {words[theirs]}"
        yield Problem(name, what, "give decoupled_mode the same value in both")


def _is_old(config: ModelConfig) -> bool:
    from tritonclient.grpc.model_config_pb2 import TYPE_UINT32

    kinds = {tensor.name: tensor.data_type for tensor in config.input}
    return bool(kinds.get("request_output_len") == TYPE_UINT32)


def _tensors(config: ModelConfig) -> set[str]:
    return {tensor.name for tensor in (*config.input, *config.output)}


def _text(config: ModelConfig, key: str) -> str:
    # Asking a protobuf map for a missing key would add it.
    return config.parameters[key].string_value.strip() if key in config.parameters else ""
