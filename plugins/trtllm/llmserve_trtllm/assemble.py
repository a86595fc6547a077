"""From the options of a build to the models of the ensemble."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from llmserve.plugin import (
    DEMO,
    Assembly,
    BuildContext,
    Container,
    tokenizer_files,
    weight_files,
)
from llmserve.repository.source_files import model_vocabulary
from llmserve_trtllm import engine, models, target, versions
from llmserve_trtllm.build_engine import build_or_explain
from llmserve_trtllm.launch import write_launch_script
from llmserve_trtllm.options import refuse
from llmserve_trtllm.target import Target

_STAGES = "llmserve_trtllm.runtime.stages"
_ORCHESTRATOR = "llmserve_trtllm.runtime.orchestrator:Orchestrator"
_LLMAPI = "llmserve_trtllm.runtime.llmapi:LlmApi"


def assemble(assembly: Assembly) -> None:
    options = assembly.options
    version = versions.choose_version(options["trtllm_version"], options["container"])
    batching = assembly.chosen["batching"]
    refuse({**options, "batching": batching}, version)
    scheduler = target.scheduler_of(options["scheduler"], assembly.context.report)
    streams = options["decoupled"]
    if streams == "":
        streams = batching == target.INFLIGHT and version >= versions.FIRST_CONFIGURABLE
    goal = Target(version, options, batching, scheduler, streams)
    if goal.is_llmapi:
        _assemble_llmapi(assembly, goal)
    else:
        _assemble_engine(assembly, goal)


def _assemble_engine(assembly: Assembly, goal: Target) -> None:
    options, context = assembly.options, assembly.context
    folder = build_or_explain(context, goal)
    found = engine.read_engine(folder)
    engine.check_engine(found, goal.version, batching=goal.batching, options=options)
    engine.check_vocabulary(found, context.source)
    sizes = ("max_seq_len", "max_input_len", "max_beam_width", "vocab_size")
    limits = {name: getattr(found, name) for name in sizes} | engine.ends_of(context.source)
    if not options["engine_at"]:
        # An engine that the server sees elsewhere is not mounted where it lies here.
        limits["path"] = str(folder)
    at = options["engine_at"] or str(folder)
    if goal.guided and not options["xgrammar_tokenizer_info_path"]:
        engine.write_tokenizer_info(context.source, folder)
        told = {"xgrammar_tokenizer_info_path": f"{at}/{engine.TOKENIZER_INFO}"}
        goal = replace(goal, options={**options, **told})
    part = _engine_part(assembly, goal, limits)
    part.config.backend = "tensorrtllm"
    # Triton wants a version folder, and the engine lies elsewhere.
    (part.folder / ".keep").touch()
    # A stand-in is told where the model lies that the engine was built from. Nothing is copied:
    # with a GPU nobody reads it.
    is_demo = context.source.asked == DEMO
    source = {"demo": True} if is_demo else context.place((), "", copy=False)
    models.configure_engine(part.config, goal, at, json.dumps(source))
    _finish(assembly, goal, part, limits)
    write_launch_script(context, goal, part.name, found.world_size)


def _assemble_llmapi(assembly: Assembly, goal: Target) -> None:
    options, context = assembly.options, assembly.context
    config = context.source.config()
    own = config.get("max_position_embeddings") or config.get("n_positions") or 0
    asked = options["max_seq_len"]
    length = min(asked, own) if asked and own else asked or own or 2048
    limits = {
        "max_seq_len": length,
        "max_input_len": min(options["max_input_len"] or length, length - 1),
        "max_beam_width": 1,
        "vocab_size": model_vocabulary(context.source) or 0,
        **engine.ends_of(context.source),
    }
    part = _engine_part(assembly, goal, limits)
    files = weight_files(part.source, pickle=options["pickle"])
    if goal.guided:
        files += tokenizer_files(part.source)
    settings = {**part.place(files, "model"), **models.llmapi_settings(goal)}
    assembly.stage(part, _LLMAPI, settings=settings)
    _finish(assembly, goal, part, limits)
    gpus = options["tensor_parallel"] * options["pipeline_parallel"]
    write_launch_script(context, goal, part.name, gpus)


def _engine_part(assembly: Assembly, goal: Target, limits: Mapping[str, Any]) -> BuildContext:
    part = _add(assembly, "tensorrt_llm", limits)
    assembly.prepare("batching", part)
    # The engine makes batches by itself, of requests as they come.
    part.config.ClearField("dynamic_batching")
    models.declare_engine(part.config, goal)
    return part


def _finish(
    assembly: Assembly, goal: Target, part: BuildContext, limits: Mapping[str, Any]
) -> None:
    """Add what reads and what writes, and wire all of it into the ensemble."""
    context, options = assembly.context, assembly.options
    brought = versions.sections("containers.txt")["brought"]
    context.container = Container(versions.container_of(goal.version), brought)
    first = _add(assembly, "preprocessing", limits)
    settings = models.configure_preprocessing(first.config, goal)
    assembly.stage(first, f"{_STAGES}:Preprocessing", roles=("tokenizer",), settings=settings)
    last = _add(assembly, "postprocessing")
    settings = models.configure_postprocessing(last.config, goal, assembly.outputs)
    roles = ("tokenizer", "formatter")
    assembly.stage(last, f"{_STAGES}:Postprocessing", roles=roles, settings=settings)
    # A component may have said how clients talk to the model that it is in.
    part.exchange = "stream" if goal.streams else "unary"
    if goal.streams:
        context.exchange = "stream"
    is_through = goal.streams and options["stream_through"] == "bls"
    if is_through or options["bls"]:
        asks = _add(assembly, "tensorrt_llm_bls", limits)
        settings = models.configure_orchestrator(asks.config, goal, part.name, assembly)
        assembly.stage(asks, _ORCHESTRATOR, roles=roles, settings=settings)
        asks.exchange = "stream"
    if is_through:
        models.wire_through(assembly, goal, asks)
    else:
        models.wire(assembly, goal, (first, part, last))


def _add(assembly: Assembly, name: str, limits: Mapping[str, Any] | None = None) -> BuildContext:
    """Add a part: under NVIDIA's own name beside an ``ensemble``, else after the build's name.

    One that reads requests is told the engine's limits.
    """
    is_nvidias = assembly.context.name == "ensemble"
    part = assembly.add(name=name) if is_nvidias else assembly.add(name)
    if limits:
        assembly.prepare("generator", part)["settings"].update(limits)
    return part
