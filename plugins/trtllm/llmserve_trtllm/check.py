"""What goes wrong in repositories made by hand from TensorRT-LLM's templates.

The templates are copied and their placeholders filled in with ``sed``, and half of what is asked
about the backend comes of it: a placeholder that is left, an engine of another version, a word
that no version knows or none does any more.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tritonclient.grpc import model_config_pb2 as pb

from llmserve.plugin import CheckedModel, ModelConfig, Problem
from llmserve_trtllm.models import UNGUARDED

BACKEND = "tensorrtllm"
_MEANINGS = {
    "gpt_model_path": "the folder of the engine",
    "gpt_model_type": "inflight_fused_batching, or V1 for static batches before 0.20",
    "tokenizer_dir": "the folder of the tokenizer",
}
_NEEDED = {BACKEND: ("gpt_model_path", "gpt_model_type"), "python": ("tokenizer_dir",)}
"""Parameters without which a model does not load; any other that is not filled in is unset."""
_WORDS = {
    "gpt_model_type": ("inflight_fused_batching", "inflight_batching", "V1", "v1"),
    "batch_scheduler_policy": ("guaranteed_no_evict", "max_utilization"),
}
_GONE = {
    "max_num_sequences": "0.8",
    "max_kv_cache_length": "0.7, which calls it max_attention_window_size",
    "tokenizer_type": "0.9",
    "enable_trt_overlap": "0.11",
}
_CAME = (("min_tokens", (1, 2)), ("guided_decoding_guide", (0, 19)), ("batch_index", (0, 11)))
"""Tensors by which a template's age is known, the newest first."""
_VERSION = re.compile(r"(\d+)\.(\d+)")


def check_model(model: CheckedModel) -> Iterator[Problem]:
    """Check a model of TensorRT-LLM's templates; any other model has none of these problems."""
    name, config, configs = model.name, model.config, model.configs
    if config.backend == BACKEND:
        yield from _check_words(name, config)
        yield from _check_engine(name, config)
        yield from _check_required(name, config)
    yield from _check_filled_in(name, config)
    if config.platform == "ensemble":
        steps = [(step, configs.get(step.model_name)) for step in config.ensemble_scheduling.step]
        if any(part is not None and part.backend == BACKEND for _, part in steps):
            yield from _check_types(name, config, steps)
            yield from _check_stream(name, config, steps)
    yield from _check_front(model)


def _check_filled_in(name: str, config: ModelConfig) -> Iterator[Problem]:
    for key in _NEEDED.get(config.backend, ()):
        if (value := _text(config, key)).startswith("${"):
            yield Problem(name, f"{key} is still {value}", f"set it to {_MEANINGS[key]}")


def _check_required(name: str, config: ModelConfig) -> Iterator[Problem]:
    """Find the parameters that the backend reads without a default."""
    for key in ("gpt_model_path", "gpt_model_type"):
        if key not in config.parameters:
            yield Problem(name, f"it has no parameter {key}", f"set it to {_MEANINGS[key]}")
    missing = [key for key in UNGUARDED if key not in config.parameters]
    if missing and any(tensor.name == "guided_decoding_guide" for tensor in config.input):
        yield Problem(
            name,
            f"it has no parameter {', '.join(missing)}, without which no TensorRT-LLM from 0.19 "
            "on loads it",
            "set each to an empty text, if you have no use for it",
        )


def _check_words(name: str, config: ModelConfig) -> Iterator[Problem]:
    for key, words in _WORDS.items():
        value = _text(config, key)
        if value and not value.startswith("${") and value not in words:
            yield Problem(
                name,
                f"no version of TensorRT-LLM knows {value!r} as {key}",
                f"write {' or '.join(words[:2])}",
                fatal=key == "gpt_model_type",
            )
    if _is_old(config):
        return
    newest = any(tensor.name == "num_input_tokens" for tensor in config.output)
    for key, version in _GONE.items():
        if newest and key == "enable_trt_overlap":
            continue
        if key in config.parameters and _text(config, key) not in ("", f"${{{key}}}"):
            yield Problem(
                name, f"{key} has not been read since {version}", "take it out", fatal=False
            )


def _check_engine(name: str, config: ModelConfig) -> Iterator[Problem]:
    """Hold the template against the engine, where that can be seen from here."""
    where = _text(config, "gpt_model_path")
    if not where or where.startswith("${"):
        return
    if not Path(where).is_dir():
        yield Problem(
            name,
            f"there is no engine at {where}",
            "put it there, or see that the server finds it under that path",
            fatal=False,
        )
        return
    try:
        engine = json.loads((Path(where) / "config.json").read_text(encoding="utf-8"))
        build = engine.get("build_config") or engine["builder_config"]
        plugins = build.get("plugin_config") or engine.get("plugin_config") or {}
        packed, most = plugins.get("remove_input_padding", True), int(build["max_batch_size"])
    except (OSError, ValueError, KeyError, AttributeError, TypeError):
        yield Problem(name, f"{where} is no engine", "name the folder that trtllm-build wrote")
        return
    yield from _check_version(name, config, str(engine.get("version") or ""))
    if not packed and _text(config, "gpt_model_type").startswith("inflight"):
        yield Problem(
            name,
            "in-flight batching needs an engine with packed input",
            "build the engine again with remove_input_padding",
        )
    if config.max_batch_size > most:
        yield Problem(
            name,
            f"max_batch_size {config.max_batch_size} is over the engine's {most}",
            f"lower it to {most}",
        )


def _check_version(name: str, config: ModelConfig, written: str) -> Iterator[Problem]:
    found = _VERSION.match(written)
    engine = (int(found[1]), int(found[2])) if found else None
    if _is_old(config):
        if engine is not None:
            yield Problem(
                name,
                f"its template is of a TensorRT-LLM before 0.7 and its engine of {written}",
                "take the templates of the engine's version",
            )
        return
    names = {tensor.name for tensor in (*config.input, *config.output)}
    age = next((since for tensor, since in _CAME if tensor in names), None)
    if age is not None and (engine is None or engine < age):
        yield Problem(
            name,
            f"its template is of TensorRT-LLM {age[0]}.{age[1]} or later and its engine of "
            f"{written or 'a version before 0.8'}",
            "take the templates of the engine's version, or build the engine again",
        )


def _check_types(name: str, config: ModelConfig, steps: list[Any]) -> Iterator[Problem]:
    """An ensemble's inputs have the types of those they are led to."""
    types = {tensor.name: tensor.data_type for tensor in config.input}
    for step, part in steps:
        theirs = {tensor.name: tensor.data_type for tensor in part.input} if part else {}
        for inside, ours in step.input_map.items():
            if ours in types and inside in theirs and types[ours] != theirs[inside]:
                yield Problem(
                    name,
                    f"its input {ours} is {_kind(types[ours])} and {step.model_name}'s {inside} "
                    f"{_kind(theirs[inside])}",
                    "give both the same; TensorRT-LLM made UINT32 to INT32 in 0.7",
                )


def _check_stream(name: str, config: ModelConfig, steps: list[Any]) -> Iterator[Problem]:
    engine = next(part for _, part in steps if part is not None and part.backend == BACKEND)
    decoupled = engine.model_transaction_policy.decoupled
    if any(tensor.name == "stream" for tensor in config.input) and not decoupled:
        led = any(step.input_map.get("streaming") == "stream" for step, _ in steps)
        if led:
            yield Problem(
                name,
                f"requests with stream are refused: {engine.name} is not decoupled",
                "set decoupled: true in its model_transaction_policy, if you want to stream",
                fatal=False,
            )
    made_by = {ours: step.model_name for step, _ in steps for ours in step.output_map.values()}
    sources = {
        step.model_name: {made_by.get(t) for t in step.input_map.values()} for step, _ in steps
    }
    for step, part in steps:
        mixed = engine.name in sources[step.model_name] and len(sources[step.model_name]) > 1
        if decoupled and mixed and part is not engine:
            yield Problem(
                name,
                f"{step.model_name} gets tensors from {engine.name}, which is decoupled, and from "
                "elsewhere, which Triton refuses",
                f"lead only {engine.name}'s to it, or make {engine.name} answer in one piece",
            )


def _check_front(model: CheckedModel) -> Iterator[Problem]:
    """A BLS model streams if and only if the engine's model does."""
    name, config, configs = model.name, model.config, model.configs
    if "tensorrt_llm_model_name" not in config.parameters:
        return
    asked = _text(config, "tensorrt_llm_model_name")
    engine = configs.get("tensorrt_llm" if not asked or asked.startswith("${") else asked)
    if engine is None or engine.backend != BACKEND:
        return
    ours, theirs = (c.model_transaction_policy.decoupled for c in (config, engine))
    if ours != theirs:
        words = {True: "decoupled", False: "not decoupled"}
        yield Problem(
            name,
            f"it is {words[ours]} and {engine.name} is {words[theirs]}",
            "give decoupled_mode the same value in both",
        )


def _is_old(config: ModelConfig) -> bool:
    """Whether lengths are unsigned, as before 0.7."""
    return any(
        tensor.name == "request_output_len" and tensor.data_type == pb.DataType.TYPE_UINT32
        for tensor in config.input
    )


def _text(config: ModelConfig, key: str) -> str:
    # Asking a protobuf map for a missing key would add it.
    return config.parameters[key].string_value.strip() if key in config.parameters else ""


def _kind(data_type: int) -> str:
    return str(pb.DataType.Name(data_type)).removeprefix("TYPE_")
