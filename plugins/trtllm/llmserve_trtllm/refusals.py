"""What is said and would have no effect: it is refused, never passed over."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from llmserve.errors import IncompatibleError
from llmserve.options import Option
from llmserve_trtllm.choices import OPTIONS
from llmserve_trtllm.parameters import PARAMETERS
from llmserve_trtllm.versions import Version

_SINCE = {
    "max_queue_delay_microseconds": "0.12",
    "max_queue_size": "0.12",
    "encoder_input_features_data_type": "0.19",
    "logits_datatype": "0.17",
    "prompt_embedding_table_data_type": "1.2",
}
"""Fields of a template that are no parameters, and since when it leaves them open."""
_LLMAPI = {
    "kv_cache_free_gpu_mem_fraction",
    "max_tokens_in_paged_kv_cache",
    "enable_kv_cache_reuse",
}
"""The engine's parameters that the LLM API is told too."""
_ENGINE_ONLY = {
    "engine", "engine_at", "build_engine", "quantization", "examples", "multi_gpu",
    "logits_datatype", "encoder_input_features_data_type", "prompt_embedding_table_data_type",
}  # fmt: skip
_BUILDING = {
    "quantization", "tensor_parallel", "pipeline_parallel", "max_input_len", "max_seq_len",
    "dtype", "examples",
}  # fmt: skip


def refuse_unused(options: Mapping[str, Any], version: Version) -> None:
    """Refuse an option that was given and that the version or the layout has no use for."""
    llmapi = options["layout"] == "llmapi"
    unused = dict(_unused_by_llmapi() if llmapi else _unused_by_engine(options, version))
    for option in OPTIONS:
        if option.name in unused and options[option.name] != option.default:
            raise IncompatibleError(unused[option.name], mend=f"leave out {_flag(option)}")


def _unused_by_llmapi() -> Iterator[tuple[str, str]]:
    parameters = {parameter.option.name for parameter in PARAMETERS} - _LLMAPI
    for name in (*_ENGINE_ONLY, *parameters):
        yield name, f"the layout llmapi serves a model as it is and has no {name}"


def _unused_by_engine(options: Mapping[str, Any], version: Version) -> Iterator[tuple[str, str]]:
    yield "stand_in", "stand_in is for the layout llmapi: an engine has its stand-in by itself"
    for name, since in _SINCE.items():
        if version < Version.parse(since):
            yield name, f"TensorRT-LLM {version} has no {name}: it is there from {since} on"
    if not options["build_engine"]:
        for name in _BUILDING:
            yield name, f"{name} says how an engine is built, and this one is there already"


def _flag(option: Option) -> str:
    return f"--{option.name.replace('_', '-')}"
