"""Builds the models of the ensemble from the options of a build."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from llmserve.plugin import (
    DEMO,
    Assembly,
    BuildContext,
    Container,
    IncompatibleError,
    allowed,
    check_causal,
    model_vocabulary,
    place_adapters,
    seeing_files,
    take_images,
    tokenizer_files,
    weight_files,
)
from llmserve_trtllm import LIMITS, SEEN, engine, models, versions
from llmserve_trtllm.build_engine import build_or_explain
from llmserve_trtllm.launch import write_launch_script
from llmserve_trtllm.old_tokenizers import suit_tokenizer
from llmserve_trtllm.refusals import refuse
from llmserve_trtllm.seeing import reads_images
from llmserve_trtllm.target import DEFAULT_SIZE, INFLIGHT, BuildTarget, resolve_scheduler

_STAGES = "llmserve_trtllm.runtime.stages"
_ORCHESTRATOR = "llmserve_trtllm.runtime.orchestrator:Orchestrator"
_LLMAPI = "llmserve_trtllm.runtime.llmapi:LlmApi"


def assemble(assembly: Assembly) -> None:
    options = assembly.options
    version = versions.choose_version(options["trtllm_version"], options["container"])
    batching = assembly.chosen["batching"]
    refuse({**options, "batching": batching}, version)
    if unread := versions.unread(version):
        assembly.context.report(f"warning: {unread}")
    if options["max_batch_size"] == "":
        size = _places(options)
        options = assembly.context.options = {**options, "max_batch_size": size}
        assembly.context.config.max_batch_size = size
    scheduler = resolve_scheduler(options["scheduler"], assembly.context.report)
    streams = options["decoupled"]
    if streams == "":
        streams = batching == INFLIGHT and version >= versions.FIRST_CONFIGURABLE
    target = BuildTarget(version, options, batching, scheduler, streams)
    if options["max_inflight_requests"] and target.triton < versions.FIRST_BOUNDED:
        triton = f"Triton {target.triton}" if target.triton else "an image that is not known"
        raise IncompatibleError(
            f"{triton} may have no max_inflight_requests: it exists from "
            f"{versions.FIRST_BOUNDED} on",
            hint="leave out --max-inflight-requests, or name a newer --container",
        )
    if target.is_llmapi:
        _assemble_llmapi(assembly, target)
    else:
        _assemble_engine(assembly, target)
    suit_tokenizer(assembly, version)


def _places(options: Mapping[str, Any]) -> int:
    """Return how many requests run at once if the build does not say it: what the engine can."""
    if options["layout"] != "engine" or options["build_engine"] or not options["engine"]:
        return DEFAULT_SIZE
    return engine.read_engine(engine.folder_of(options["engine"])).max_batch_size


def _assemble_engine(assembly: Assembly, target: BuildTarget) -> None:
    options, context = assembly.options, assembly.context
    if options["build_engine"]:
        check_causal(context.source, **allowed(context))
    folder = build_or_explain(context, target)
    built = engine.read_engine(folder)
    engine.check_engine(built, target.version, batching=target.batching, options=options)
    engine.check_vocabulary(built, context.source)
    sizes = ("max_seq_len", "max_input_len", "max_beam_width", "vocab_size")
    limits = {name: getattr(built, name) for name in sizes} | engine.special_ids(context.source)
    if not options["engine_at"]:
        # An engine with another path on the server is not mounted at its local path.
        limits["path"] = str(folder)
    server_path = options["engine_at"] or str(folder)
    if target.guided and not options["xgrammar_tokenizer_info_path"]:
        engine.write_tokenizer_info(context.source, folder)
        info_path = f"{server_path}/{engine.TOKENIZER_INFO}"
        target = replace(target, options={**options, "xgrammar_tokenizer_info_path": info_path})
    part = _add_engine(assembly, target, limits)
    part.config.backend = "tensorrtllm"
    # Triton requires a version folder, and the engine itself is elsewhere.
    (part.folder / ".keep").touch()
    # A stand-in needs the path of the model that the engine was built from. Nothing is copied:
    # on a GPU the model is never read.
    is_demo = context.source.asked == DEMO
    source = {"demo": True} if is_demo else context.place((), "", copy=False)
    models.configure_engine(part.config, target, server_path, json.dumps(source))
    _add_other_models(assembly, target, part, limits)
    write_launch_script(context, target, part.name, built.world_size)


def _assemble_llmapi(assembly: Assembly, target: BuildTarget) -> None:
    options, context = assembly.options, assembly.context
    if reads_images(context, target.version):
        target, image_limits = replace(target, sees=True), take_images(context)
    else:
        check_causal(context.source, **allowed(context))
        image_limits = {}
    config = context.source.config()
    config = config.get("text_config") or config
    own_length = config.get("max_position_embeddings") or config.get("n_positions") or 0
    lengths = [length for length in (options["max_seq_len"], own_length) if length]
    length = min(lengths, default=2048)
    limits = {
        "max_seq_len": length,
        "max_input_len": min(options["max_input_len"] or length, length - 1),
        "max_beam_width": 1,
        "vocab_size": model_vocabulary(context.source) or 0,
        **engine.special_ids(context.source),
    }
    part = _add_engine(assembly, target, limits)
    files = weight_files(part.source, pickle=options["pickle"])
    if target.sees:
        files = list(dict.fromkeys([*files, *seeing_files(part.source)]))
    elif target.guided:
        files += tokenizer_files(part.source)
    placed = part.place(files, "model")
    settings = {**placed, **models.llmapi_settings(target), **image_limits}
    assembly.stage(part, _LLMAPI, settings=settings)
    source = _from_a_sibling(part, placed)
    if target.sees:
        limits[SEEN] = {**source, **image_limits}
    elif target.has_adapters:
        # They are with the ensemble, which is what has a name for users.
        limits |= {"adapters_of": context.name, "source": source}
        assembly.prepare("generator", part)["settings"].update(limits)
        place_adapters(context, LIMITS, limits)
    _add_other_models(assembly, target, part, limits)
    gpus = options["tensor_parallel"] * options["pipeline_parallel"]
    write_launch_script(context, target, part.name, gpus)


def _from_a_sibling(part: BuildContext, placed: Mapping[str, Any]) -> dict[str, Any]:
    """Return where the ensemble and its parts, which lie beside each other, find the model."""
    source = dict(placed)
    if "path" in placed and not Path(placed["path"]).is_absolute():
        source["path"] = f"../../{part.name}/{part.folder.name}/{placed['path']}"
    return source


def _add_engine(assembly: Assembly, target: BuildTarget, limits: Mapping[str, Any]) -> BuildContext:
    part = _add(assembly, "tensorrt_llm", target.batch_size, limits)
    assembly.prepare("batching", part)
    # The engine batches requests itself as they arrive.
    part.config.ClearField("dynamic_batching")
    models.declare_engine(part.config, target)
    return part


def _add_other_models(
    assembly: Assembly, target: BuildTarget, engine_part: BuildContext, limits: Mapping[str, Any]
) -> None:
    """Add preprocessing, postprocessing and the BLS model, and wire the ensemble."""
    context, options = assembly.context, assembly.options
    image = target.image
    context.container = Container(image, versions.BROUGHT, "" if image else target.triton)
    if most := options["max_inflight_requests"]:
        context.config.ensemble_scheduling.max_inflight_requests = most
    size = target.batch_size
    first = _add(assembly, "preprocessing", size, limits)
    settings = models.configure_preprocessing(first.config, target)
    assembly.stage(first, f"{_STAGES}:Preprocessing", roles=("tokenizer",), settings=settings)
    last = _add(assembly, "postprocessing", size)
    settings = models.configure_postprocessing(last.config, target, assembly.outputs)
    roles = ("tokenizer", "formatter")
    assembly.stage(last, f"{_STAGES}:Postprocessing", roles=roles, settings=settings)
    # A component may have set how clients exchange data with its model.
    engine_part.exchange = "stream" if target.streams else "unary"
    if target.streams:
        context.exchange = "stream"
    # 0.5.0 streams as NVIDIA has it, as its clients know no other way.
    wants_bls = options["stream_through"] == "bls" and not target.is_0_5
    # Triton connects no ensemble without a batch dimension to models that have one.
    through_bls = not target.is_batched or (target.streams and wants_bls)
    if through_bls or options["bls"]:
        bls = _add(assembly, "tensorrt_llm_bls", options["max_batch_size"], limits)
        settings = models.configure_orchestrator(bls.config, target, engine_part.name, assembly)
        assembly.stage(bls, _ORCHESTRATOR, roles=roles, settings=settings)
        bls.exchange = "stream" if bls.config.model_transaction_policy.decoupled else "unary"
    if through_bls:
        models.wire_to_bls(assembly, target, bls)
    else:
        models.wire(assembly, target, (first, engine_part, last))


def _add(
    assembly: Assembly, name: str, size: int, limits: Mapping[str, Any] | None = None
) -> BuildContext:
    """Add a part; it has NVIDIA's own name if the build is called ``ensemble``.

    A part that reads requests gets the engine's limits.
    """
    has_nvidia_names = assembly.context.name == "ensemble"
    names = {"name": name} if has_nvidia_names else {"suffix": name}
    part = assembly.add(**names, max_batch_size=size)
    part.taken.extend(assembly.context.taken)
    if limits:
        assembly.prepare("generator", part)["settings"].update(limits)
    return part
