"""From the options of a build to the models of the ensemble."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from llmserve.builder.assembly import Assembly
from llmserve.builder.context import BuildContext
from llmserve.errors import IncompatibleError
from llmserve_trtllm import launching
from llmserve_trtllm.batching import check_batching, scheduler_of
from llmserve_trtllm.building import build_or_explain
from llmserve_trtllm.engine import Engine, read_engine
from llmserve_trtllm.fitting import check_engine, check_vocabulary
from llmserve_trtllm.limits import ends_of, largest_id, vocabulary_of
from llmserve_trtllm.llmapi import assemble_llmapi
from llmserve_trtllm.models.engine import configure_engine
from llmserve_trtllm.models.target import Target
from llmserve_trtllm.names import add
from llmserve_trtllm.pipeline import Models, finish
from llmserve_trtllm.refusals import refuse_unused
from llmserve_trtllm.standin import stand_in_of
from llmserve_trtllm.versions import check_engine_layout, check_llmapi_layout, choose_version


def assemble(assembly: Assembly) -> None:
    """Make the models of the layout that was asked for."""
    target = make_target(assembly)
    refuse_unused(assembly.options, target.version)
    if assembly.options["layout"] == "llmapi":
        check_llmapi_layout(target.version)
        assemble_llmapi(assembly, target)
    else:
        check_engine_layout(target.version)
        assemble_engine(assembly, target)


def make_target(assembly: Assembly) -> Target:
    """Decide for which version and in which way."""
    options = assembly.options
    version = choose_version(str(options["trtllm_version"]), str(options["container"]))
    target = Target(
        version=version,
        options=options,
        batching=check_batching(assembly.plan.batching.name),
        scheduler=scheduler_of(str(options["scheduler"]), assembly.context.report),
    )
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
    part = add(assembly, "tensorrt_llm")
    part.config.backend = "tensorrtllm"
    # Triton wants a version folder, and the engine lies elsewhere.
    (part.folder / ".keep").touch()
    assembly.prepare("batching", part)
    part.config.ClearField("dynamic_batching")
    known = limits(engine, context, folder)
    assembly.prepare("generator", part)["settings"].update(known)
    at = str(options["engine_at"]) or str(folder)
    configure_engine(part.config, target, at, stand_in_of(context))
    finish(assembly, target, Models(part, known))
    launching.write_scripts(context, part.name, engine.world_size, target)


def limits(engine: Engine, context: BuildContext, folder: Path) -> dict[str, Any]:
    """Return what the models around the engine have to know of it."""
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
