"""The models around the one that makes tokens, which are the same for both layouts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from llmserve.builder.assembly import Assembly
from llmserve.builder.context import BuildContext
from llmserve.errors import IncompatibleError
from llmserve_trtllm.container import container
from llmserve_trtllm.models import ensemble, orchestrator, postprocessing, preprocessing
from llmserve_trtllm.models.target import Target
from llmserve_trtllm.names import add


@dataclass(frozen=True)
class Models:
    """The model that makes tokens, and what the others have to know of it."""

    engine: BuildContext
    limits: Mapping[str, Any]


def finish(assembly: Assembly, target: Target, models: Models) -> None:
    """Add what reads and what writes, and wire all of it into the ensemble."""
    assembly.context.container = container(target.version)
    options, formatted = assembly.options, assembly.plan.formatter.outputs
    first, last = (add(assembly, name) for name in ("preprocessing", "postprocessing"))
    settings = preprocessing.configure_preprocessing(first.config, target)
    roles = ("tokenizer", "generator")
    stage(assembly, first, preprocessing.RUNTIME, roles, settings, models.limits)
    settings = postprocessing.configure_postprocessing(last.config, target, formatted)
    stage(assembly, last, postprocessing.RUNTIME, ("tokenizer", "formatter"), settings)
    # A component may have said how clients talk to the model that it is in.
    models.engine.exchange = "stream" if target.streams else "unary"
    if target.streams:
        assembly.context.exchange = "stream"
    if target.streams and options["stream_through"] == "bls":
        ensemble.through(assembly, add_orchestrator(assembly, target, models))
        return
    ensemble.wire(assembly, target, (first, models.engine, last), formatted)
    if options["bls"]:
        add_orchestrator(assembly, target, models)


def add_orchestrator(assembly: Assembly, target: Target, models: Models) -> BuildContext:
    """Add the model that asks the engine by itself."""
    if target.is_first:
        raise IncompatibleError(
            f"TensorRT-LLM {target.version} has no tensorrt_llm_bls",
            mend="leave out --set bls=true, or build for a later version",
        )
    part, plan = add(assembly, "tensorrt_llm_bls"), assembly.plan
    settings = orchestrator.configure_orchestrator(
        part.config, target, models.engine.name, plan.inputs, plan.formatter.outputs
    )
    roles = ("tokenizer", "generator", "formatter")
    stage(assembly, part, orchestrator.RUNTIME, roles, settings, models.limits)
    part.exchange = "stream"
    return part


def stage(
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
