"""Builds and requests that a version does not support, or whose options it would ignore."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from llmserve.plugin import ADAPTER_OPTIONS, IMAGE_OPTIONS, IncompatibleError, Value
from llmserve_trtllm.options import OPTIONS
from llmserve_trtllm.target import ALIAS, INFLIGHT, NO_EVICT, STATIC
from llmserve_trtllm.versions import (
    FIRST_ADAPTERS,
    FIRST_CONFIGURABLE,
    FIRST_IMAGES,
    FIRST_LLMAPI,
    Version,
    since,
)

_EXECUTES_STATIC = since("0.5", "0.20")
"""From 0.20 on the executor is known to refuse static batches."""
_RUNS_ENGINES = since("0.5", "1.3")
_LOOKAHEAD = ("lookahead_window_size", "lookahead_ngram_size", "lookahead_verification_set_size")

Refusals = Iterator[tuple[str, str]]
"""Problems, each with how to fix it."""


def refuse(options: Mapping[str, Value], version: Version) -> None:
    """Refuse options without effect, and options that the version or layout does not support.

    ``options`` also contains the ``batching``.
    """
    for option in OPTIONS:
        is_set = options[option.name] != option.default
        if is_set and (reason := option.unused(options, version)):
            raise IncompatibleError(reason, hint=f"leave out --{option.name.replace('_', '-')}")
    for problem, hint in _refusals(options, version):
        raise IncompatibleError(problem, hint=hint)


def _refusals(options: Mapping[str, Value], version: Version) -> Refusals:
    if options["batching"] not in (INFLIGHT, STATIC):
        problem = f"TensorRT-LLM does not support batching {options['batching']!r}"
        yield problem, f"choose one of {INFLIGHT}, {STATIC}"
    if version < FIRST_CONFIGURABLE:
        yield from _of_the_tutorials_version(options, version)
    yield from _of_adapters(options, version)
    yield from _of_images(options, version)
    if options["layout"] == "llmapi":
        yield from _of_the_llm_api(options, version)
    else:
        yield from _of_an_engine(options, version)
    if options["xgrammar_tokenizer_info_path"] and not options["guided_decoding_backend"]:
        problem = "xgrammar_tokenizer_info_path has no effect without guided_decoding_backend"
        yield problem, "give both, or neither"
    if options["decoding_mode"] == "lookahead" and any(options[name] == "" for name in _LOOKAHEAD):
        yield f"decoding_mode lookahead needs {', '.join(_LOOKAHEAD)}", "give all three sizes"


def _of_the_tutorials_version(options: Mapping[str, Value], version: Version) -> Refusals:
    streams, name = options["decoupled"] is True, f"TensorRT-LLM {version}"
    if streams and options["batching"] == STATIC:
        hint = "leave out --set decoupled=true, or build with --batching inflight"
        yield f"static batches of {name} do not stream", hint
    if streams and options["scheduler"] == "max_utilization":
        hint = "leave out --set decoupled=true or scheduler"
        yield f"{name} streams only with {NO_EVICT}", hint
    if options["bls"]:
        hint = "leave out --set bls=true, or build for a later version"
        yield f"{name} has no tensorrt_llm_bls", hint
    if options["multi_gpu"] == "orchestrator":
        yield f"{name} has no orchestrator mode", "leave out --set multi_gpu=orchestrator"
    quantization = options["quantization"]
    if options["build_engine"] and quantization not in ("", "int8", "int4"):
        problem = f"building for {version} does not support {quantization}"
        yield problem, "choose int8 or int4, or build for a later version"


def _of_adapters(options: Mapping[str, Value], version: Version) -> Refusals:
    chosen = [each.name for each in ADAPTER_OPTIONS if options[each.name] != each.default]
    if not chosen:
        return
    if options["layout"] != "llmapi":
        problem = f"an engine takes no adapters by name: {chosen[0]} has no effect"
        yield problem, f"build with --set layout=llmapi, for {FIRST_ADAPTERS} or later"
    elif version < FIRST_ADAPTERS:
        problem = f"the LLM API of TensorRT-LLM {version} cannot load an adapter again"
        yield problem, f"leave out {chosen[0]}, or build for {FIRST_ADAPTERS} or later"


def _of_images(options: Mapping[str, Value], version: Version) -> Refusals:
    chosen = [each.name for each in IMAGE_OPTIONS if options[each.name] != each.default]
    # With max_images 0 a model is for text alone, as one without images is anyway.
    if not chosen or not options["max_images"]:
        return
    hint = f"build with --set layout=llmapi, for {FIRST_IMAGES} or later, or leave out {chosen[0]}"
    if options["layout"] != "llmapi":
        yield f"an engine reads no images here: {chosen[0]} has no effect", hint
    elif version < FIRST_IMAGES:
        yield f"TensorRT-LLM {version} reads no images here: {chosen[0]} has no effect", hint


def _of_the_llm_api(options: Mapping[str, Value], version: Version) -> Refusals:
    if version < FIRST_LLMAPI:
        yield (
            f"TensorRT-LLM {version} serves only engines: the LLM API without one needs "
            f"{FIRST_LLMAPI} or later",
            "build with --set layout=engine, or for a later version",
        )
    scheduler = options["scheduler"]
    if options["batching"] == STATIC and scheduler not in (NO_EVICT, ALIAS):
        problem = f"static batches do not support scheduler {scheduler}"
        yield problem, "leave it out, or build with --batching inflight"


def _of_an_engine(options: Mapping[str, Value], version: Version) -> Refusals:
    if version not in _RUNS_ENGINES:
        problem = f"TensorRT-LLM {version} has no engine backend: it was removed after 1.2"
        yield problem, "build with --set layout=llmapi, or for a version up to 1.2"
    if options["max_batch_size"] == 0:
        yield "an engine's tensors have a batch dimension", "give --max-batch-size 1 or more"
    if options["batching"] == STATIC and version not in _EXECUTES_STATIC:
        llmapi = "with --set layout=llmapi for static batches, or "
        yield (
            f"the executor of TensorRT-LLM {version} does not run static batches (V1)",
            f"build with --batching inflight, or {llmapi if version >= FIRST_LLMAPI else ''}"
            "for a version before 0.20",
        )


def refused_requests(options: Mapping[str, Value], version: Version) -> dict[str, str]:
    """Return the request options that a build refuses, with the reason; options as above.

    The engine would ignore such an option, or not run at all.
    """
    if version >= FIRST_CONFIGURABLE:
        return {}
    # cpp/tensorrt_llm/layers/baseSamplingLayer.cu of v0.5.0; NVIDIA/TensorRT-LLM#274
    name = f"TensorRT-LLM {version}"
    refused = {
        "presence_penalty": f"{name} runs no request with both presence_penalty and "
        "repetition_penalty, which is always sent: leave out presence_penalty",
        "bad_words": f"{name} has no bad_words: leave them out",
    }
    if options["decoupled"]:
        refused["stop_words"] = (
            f"{name} has no stop_words in a stream: leave them out, or build with "
            "--set decoupled=false"
        )
    return refused
