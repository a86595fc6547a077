"""The options of a build, most of them vLLM's own by vLLM's names."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from llmserve.plugin import DTYPE_OPTION, Option, OptionError, Value

_OWN = "leaves the choice to vLLM"
_CHOICES = ("auto", "true", "false")

ENGINE_OPTIONS = (
    Option("tensor_parallel_size", 1, "Number of GPUs that share each layer.", minimum=1),
    Option(
        "gpu_memory_utilization",
        0.0,
        f"Share of the device's memory for weights and cache; 0 {_OWN} on a GPU, and takes the "
        "cache of four contexts or more on a CPU.",
        minimum=0,
        maximum=1,
    ),
    Option("max_model_len", 0, "Most tokens of a prompt and its answer; 0 is all of the model's.",
           minimum=0),
    Option("max_num_seqs", 0, f"Most sequences in flight at once; others wait. 0 {_OWN}.",
           minimum=0),
    Option("quantization", "", "How the weights are quantised; empty reads it from the model."),
    Option("kv_cache_dtype", "auto", "Type of the cache; auto is the model's."),
    Option("enable_prefix_caching", "auto",
           f"Reuse the cache of prompts that begin alike; auto {_OWN}.", choices=_CHOICES),
    Option("enable_chunked_prefill", "auto",
           f"Compute long prompts in pieces, between steps of others; auto {_OWN}.",
           choices=_CHOICES),
    Option("speculative_config", "",
           "How tokens are guessed and checked, as vLLM's JSON object; empty guesses none."),
    Option("max_loras", 0,
           "Most adapters in a step; requests of others wait. 0 takes 8. Their memory is taken "
           "when a model with adapters is loaded.", minimum=0),
    Option("max_lora_rank", 0,
           "Highest rank of an adapter; 0 is that of those that the model has when it is loaded, "
           "and 16 at least.", minimum=0, maximum=512),
    Option("enforce_eager", False, "Compile nothing: starts faster, and computes slower."),
)  # fmt: skip
"""Options that vLLM's ``EngineArgs`` has by the same name."""
OPTIONS = (
    DTYPE_OPTION,
    Option(
        "device",
        "auto",
        "What the vLLM that serves it has to be for; auto takes any.",
        choices=("auto", "cpu", "cuda"),
    ),
    *ENGINE_OPTIONS,
    Option("engine_args", "", "Other arguments of vLLM's EngineArgs, as a JSON object."),
)

_TAKEN = {
    "model": "--model",
    "tokenizer": "--tokenizer",
    "revision": "--revision",
    "tokenizer_revision": "--revision",
    "trust_remote_code": "--set trust_remote_code=true",
    "dtype": "--dtype",
    **{option.name: f"--set {option.name}" for option in ENGINE_OPTIONS},
}
"""Arguments that are set by an option of the build, with the option."""
_OURS = {
    "enable_lora": "it is so for a model that has adapters when it is loaded",
    "max_cpu_loras": "adapter_mb says how much memory adapters take",
    "skip_tokenizer_init": "constrained answers need vLLM's tokenizer",
    "disable_log_stats": "the metrics are read from vLLM's statistics",
    "logprobs_mode": "log-probabilities are those of the model, before any option of a request",
    "structured_outputs_config": "constrained answers are checked with the library that vLLM is "
    "told to use",
}
"""Arguments that have one right value here, with the reason."""


def chosen_args(options: Mapping[str, Value]) -> dict[str, Any]:
    """Return the arguments of vLLM's engine that options of the build set."""
    args: dict[str, Any] = {}
    for option in ENGINE_OPTIONS:
        value = options[option.name]
        if value == option.default:
            continue
        if option.name == "speculative_config":
            args[option.name] = _object(option.name, str(value))
        else:
            args[option.name] = value == "true" if option.choices else value
    return args


def other_args(options: Mapping[str, Value]) -> dict[str, Any]:
    """Return those that are passed on unread."""
    others = _object("engine_args", str(options["engine_args"] or "{}"))
    for name in others:
        if name in _TAKEN:
            raise OptionError(f"engine_args cannot set {name}", hint=f"use {_TAKEN[name]}")
        if name in _OURS:
            raise OptionError(f"engine_args cannot set {name}: {_OURS[name]}")
    return others


def _object(name: str, text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError as error:
        raise OptionError(f"{name} is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise OptionError(f"{name} takes a JSON object", hint=f"--set {name}='{{\"seed\": 1}}'")
    return value
