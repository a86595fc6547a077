"""From the options of a build to the models of the ensemble."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from llmserve.plugin import Assembly, BuildContext, Container, IncompatibleError
from llmserve.repository.source import DEMO
from llmserve.repository.source_files import weight_files
from llmserve_trtllm import launch, models
from llmserve_trtllm.build_engine import build_or_explain
from llmserve_trtllm.engine import (
    Engine,
    check_engine,
    check_vocabulary,
    ends_of,
    largest_id,
    read_engine,
    vocabulary_of,
)
from llmserve_trtllm.options import refuse_unused
from llmserve_trtllm.target import (
    INFLIGHT,
    Target,
    check_batching,
    llmapi_policy,
    scheduler_of,
)
from llmserve_trtllm.versions import (
    FIRST_CONFIGURABLE,
    check_engine_layout,
    check_llmapi_layout,
    choose_version,
    container_of,
)

ENSEMBLE = "ensemble"
_BROUGHT = (
    "accelerate", "huggingface-hub", "numpy", "safetensors", "sentencepiece", "tensorrt-llm",
    "tokenizers", "torch", "transformers",
)  # fmt: skip
"""What TensorRT-LLM itself is installed with: another version of it may break it."""


def assemble(assembly: Assembly) -> None:
    """Make the models of the layout that was asked for."""
    target = make_target(assembly)
    refuse_unused(assembly.options, target.version)
    if target.is_llmapi:
        check_llmapi_layout(target.version)
        assemble_llmapi(assembly, target)
    else:
        check_engine_layout(target.version)
        assemble_engine(assembly, target)


def make_target(assembly: Assembly) -> Target:
    """Decide for which version and in which way."""
    options = assembly.options
    version = choose_version(str(options["trtllm_version"]), str(options["container"]))
    batching = check_batching(assembly.chosen["batching"])
    scheduler = scheduler_of(str(options["scheduler"]), assembly.context.report)
    asked = options["decoupled"]
    streams = asked is True or (
        asked == "" and batching == INFLIGHT and version >= FIRST_CONFIGURABLE
    )
    target = Target(version, options, batching, scheduler, streams)
    if target.is_first and target.streams:
        raise IncompatibleError(
            f"what TensorRT-LLM {version} sends of a stream is not in the table",
            mend="leave out --set decoupled=true, or build for a later version",
        )
    return target


def assemble_engine(assembly: Assembly, target: Target) -> None:
    """Make the ensemble around an engine."""
    options, context = assembly.options, assembly.context
    folder = build_or_explain(context, target)
    engine = read_engine(folder)
    check_engine(engine, target.version, batching=target.batching, options=options)
    check_vocabulary(engine, vocabulary_of(context.source), largest_id(context.source))
    part = _add(assembly, "tensorrt_llm")
    part.config.backend = "tensorrtllm"
    # Triton wants a version folder, and the engine lies elsewhere.
    (part.folder / ".keep").touch()
    assembly.prepare("batching", part)
    part.config.ClearField("dynamic_batching")
    limits = _engine_limits(engine, context, folder)
    assembly.prepare("generator", part)["settings"].update(limits)
    at = str(options["engine_at"]) or str(folder)
    models.configure_engine(part.config, target, at, _stand_in_of(context))
    _finish(assembly, target, part, limits)
    launch.write_engine_script(context, part.name, engine.world_size, target)


def assemble_llmapi(assembly: Assembly, target: Target) -> None:
    """Make the ensemble around NVIDIA's LLM API."""
    options, context = assembly.options, assembly.context
    scheduler = llmapi_policy(target.batching, target.scheduler)
    part = _add(assembly, "tensorrt_llm")
    assembly.prepare("batching", part)
    part.config.ClearField("dynamic_batching")
    models.configure_llmapi(part.config, target)
    limits = _llmapi_limits(context, options)
    files = weight_files(part.source, pickle=bool(options["pickle"]))
    settings = {**part.place(files, "model"), **models.settings_of_llmapi(target, scheduler)}
    _stage(assembly, part, models.LLMAPI, ("generator",), settings, limits)
    _finish(assembly, target, part, limits)
    launch.write_llmapi_script(context, target)


def _finish(
    assembly: Assembly, target: Target, engine: BuildContext, limits: Mapping[str, Any]
) -> None:
    """Add what reads and what writes, and wire all of it into the ensemble."""
    assembly.context.container = Container(container_of(target.version), _BROUGHT)
    options, formatted = assembly.options, assembly.outputs
    first, last = (_add(assembly, name) for name in ("preprocessing", "postprocessing"))
    settings = models.configure_preprocessing(first.config, target)
    _stage(assembly, first, models.PREPROCESSING, ("tokenizer", "generator"), settings, limits)
    settings = models.configure_postprocessing(last.config, target, formatted)
    _stage(assembly, last, models.POSTPROCESSING, ("tokenizer", "formatter"), settings)
    # A component may have said how clients talk to the model that it is in.
    engine.exchange = "stream" if target.streams else "unary"
    if target.streams:
        assembly.context.exchange = "stream"
    if target.streams and options["stream_through"] == "bls":
        models.wire_through(assembly, target, _add_orchestrator(assembly, target, engine, limits))
        return
    models.wire(assembly, target, (first, engine, last))
    if options["bls"]:
        _add_orchestrator(assembly, target, engine, limits)


def _add_orchestrator(
    assembly: Assembly, target: Target, engine: BuildContext, limits: Mapping[str, Any]
) -> BuildContext:
    """Add the model that asks the engine by itself."""
    if target.is_first:
        raise IncompatibleError(
            f"TensorRT-LLM {target.version} has no tensorrt_llm_bls",
            mend="leave out --set bls=true, or build for a later version",
        )
    part = _add(assembly, "tensorrt_llm_bls")
    settings = models.configure_orchestrator(part.config, target, engine.name, assembly)
    roles = ("tokenizer", "generator", "formatter")
    _stage(assembly, part, models.ORCHESTRATOR, roles, settings, limits)
    part.exchange = "stream"
    return part


def _add(assembly: Assembly, name: str) -> BuildContext:
    """Add a part: under NVIDIA's own name beside an ``ensemble``, else after the build's name."""
    if assembly.context.name == ENSEMBLE:
        return assembly.add(name=name)
    return assembly.add(name)


def _stage(
    assembly: Assembly,
    part: BuildContext,
    runtime: str,
    roles: tuple[str, ...],
    settings: Mapping[str, Any],
    limits: Mapping[str, Any] | None = None,
) -> None:
    """Make a part a Python model; what it knows of the engine are its limits."""
    if "generator" in roles:
        assembly.prepare("generator", part)["settings"].update(limits or {})
    assembly.stage(part, runtime, roles=roles, settings=settings)


def _engine_limits(engine: Engine, context: BuildContext, folder: Path) -> dict[str, Any]:
    ends, pad = ends_of(context.source)
    # An engine that the server sees elsewhere is not mounted where it lies here.
    place = {} if context.options["engine_at"] else {"path": str(folder)}
    return {
        **place,
        "max_seq_len": engine.max_seq_len,
        "max_input_len": engine.max_input_len,
        "max_beam_width": engine.max_beam_width,
        "vocab_size": engine.vocab_size,
        "eos_ids": ends,
        "pad_id": pad,
    }


def _llmapi_limits(context: BuildContext, options: Mapping[str, Any]) -> dict[str, Any]:
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


def _stand_in_of(context: BuildContext) -> str:
    """Return where the model lies that the engine was built from, for a stand-in; as JSON.

    Nothing is copied: with a GPU nobody reads it.
    """
    source = context.source
    if source.asked == DEMO:
        return json.dumps({"demo": True})
    if source.repo_id and source.revision:
        return json.dumps({"id": source.repo_id, "revision": source.revision})
    return json.dumps({"path": str(source.path)})
