"""Builds an ensemble around a session model, and the graph that the session calls."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from tritonclient.grpc import model_config_pb2 as pb

from llmserve.plugin import (
    Assembly,
    BuildContext,
    ModelConfig,
    OptionError,
    Tensor,
    add_inputs,
    add_outputs,
    allowed,
    check_causal,
)
from llmserve_gpt2.export import names
from llmserve_gpt2.export.mapped import load
from llmserve_gpt2.export.run import Exported, export

_PROMPT_IDS = Tensor("prompt_ids", "TYPE_INT64", (-1,), optional=False, ragged=True)
_REQUEST = Tensor("params", "TYPE_STRING", optional=False)
_STEP = (_PROMPT_IDS, _REQUEST)
_ANSWER = (
    Tensor("piece", "TYPE_STRING", optional=False),
    Tensor("so_far", "TYPE_STRING", optional=False),
    Tensor("echo", "TYPE_STRING", optional=False),
    Tensor("reason", "TYPE_STRING", optional=False),
    Tensor("counts", "TYPE_INT32", (2,), optional=False),
)


def assemble(assembly: Assembly, form: str, backend: str) -> None:
    tutorial = assembly.options["layout"] == "tutorial"
    text = "INPUT_TOKENS" if tutorial else "text_input"
    kind: dict[str, Any] = {"platform" if backend == "pytorch_libtorch" else "backend": backend}
    generator = assembly.add("generator", **kind)
    first = assembly.add("preprocess")
    session = assembly.add("session")
    last = assembly.add("postprocess", max_batch_size=0 if tutorial else None)

    # The first stage refuses prompts that are far over the context before it encodes them.
    assembly.stage(
        first,
        "llmserve_gpt2.stages.preprocess:Preprocess",
        roles=("tokenizer", "generator"),
        settings={"text": text},
    )
    batching = assembly.prepare("batching", session)
    settings = build_graph(generator, form, slots=batching["settings"]["slots"])
    for part in (first, session):
        (part.folder / SETTINGS).write_text(json.dumps(settings, indent=2, sort_keys=True) + "\n")
    assembly.stage(
        session,
        batching["runtime"],
        roles=("tokenizer", "generator"),
        settings=batching["settings"],
    )
    runtime = "NextTokens" if tutorial else "Postprocess"
    assembly.stage(last, f"llmserve_gpt2.stages.postprocess:{runtime}", roles=("formatter",))

    inputs = [Tensor(text, "TYPE_STRING", optional=False)] if tutorial else assembly.inputs
    outputs = assembly.outputs
    add_inputs(first.config, inputs)
    add_outputs(first.config, _STEP)
    add_inputs(session.config, _STEP)
    add_outputs(session.config, _ANSWER)
    if tutorial:
        _declare_tutorial(assembly, last)
        outputs = (Tensor("NEXT_TOKENS", "TYPE_STRING", optional=False),)
    else:
        add_inputs(last.config, _ANSWER)
        add_outputs(last.config, outputs)
        assembly.context.exchange = "sequence"
    for part in (first, session, last):
        part.config.instance_group.add(count=1, kind=pb.ModelInstanceGroup.KIND_CPU)
    assembly.step(first, _same_names(inputs), _same_names(_STEP))
    assembly.step(session, _same_names(_STEP), _same_names(_ANSWER))
    assembly.step(last, _same_names(_ANSWER), _same_names(outputs))


def _declare_tutorial(assembly: Assembly, last: BuildContext) -> None:
    """Declare the tutorial's tensors; its client reads NEXT_TOKENS as a list without rows."""
    config = assembly.context.config
    config.max_batch_size = 0
    config.input.add(name="INPUT_TOKENS", data_type=pb.TYPE_STRING, dims=[-1, 1])
    config.output.add(name="NEXT_TOKENS", data_type=pb.TYPE_STRING, dims=[-1])
    for tensor in _ANSWER:
        kind = pb.DataType.Value(tensor.data_type)
        last.config.input.add(name=tensor.name, data_type=kind, dims=[-1, *tensor.dims])
    last.config.output.add(name="NEXT_TOKENS", data_type=pb.TYPE_STRING, dims=[-1])


def _same_names(tensors: object) -> dict[str, str]:
    return {tensor.name: tensor.name for tensor in tensors}  # type: ignore[attr-defined]


_CANDIDATES = 4
# After an answer, the client's next request arrives within this multiple of the queue delay.
_WAIT_FACTOR = 4


def prepare_direct(context: BuildContext) -> Mapping[str, Any]:
    sequence = _sequence(context)
    # A full batch runs at once, any other after its oldest request has waited for the queue delay.
    sequence.direct.minimum_slot_utilization = 1.0
    sequence.direct.max_queue_delay_microseconds = int(context.options["queue_delay_us"])
    return _settings(context, int(context.options["max_batch_size"]))


def prepare_oldest(context: BuildContext) -> Mapping[str, Any]:
    size = int(context.options["max_batch_size"])
    candidates = max(int(context.options["candidates"]) or _CANDIDATES * size, size)
    sequence = _sequence(context)
    sequence.oldest.max_candidate_sequences = candidates
    sequence.oldest.preferred_batch_size.append(size)
    sequence.oldest.max_queue_delay_microseconds = int(context.options["queue_delay_us"])
    return _settings(context, candidates)


def _sequence(context: BuildContext) -> Any:
    sequence = context.config.sequence_batching
    idle = float(context.options["idle_seconds"])
    sequence.max_sequence_idle_microseconds = int(idle * 1_000_000)
    # With direct slots Triton pads slots that have no request, and marks them with this input.
    control = sequence.control_input.add(name="READY").control.add()
    control.kind = pb.ModelSequenceBatching.Control.CONTROL_SEQUENCE_READY
    control.int32_false_true.extend([0, 1])
    return sequence


def _settings(context: BuildContext, slots: int) -> Mapping[str, Any]:
    return {
        "slots": slots,
        "idle_seconds": float(context.options["idle_seconds"]),
        "most_tokens": int(context.options["most_tokens"]),
        "wait_seconds": _WAIT_FACTOR * int(context.options["queue_delay_us"]) / 1e6,
        "resent": context.options["layout"] == "tutorial",
    }


SETTINGS = "graph.json"
"""The file with the generator's settings, next to the models that read prompts and run steps."""

_EXTRA_IDLE_SECONDS = 10.0
_CUDA = re.compile(r"cuda(:[0-9]{1,4})?")


def build_graph(context: BuildContext, form: str, *, slots: int) -> dict[str, Any]:
    """Export the model into a part and configure it; return the settings for the session."""
    _place_on_device(context)
    check_causal(context.source, **allowed(context))
    context.report("loading the model")
    loading = load(
        context.source.path,
        context.folder,
        pickle=bool(context.options["pickle"]),
        trust_remote_code=bool(context.options["trust_remote_code"]),
    )
    with loading as model:
        exported = export(
            model, form, context.folder, name=context.source.asked, report=context.report
        )
    declare(context.config, exported)
    _schedule(context, slots)
    if form == "torchscript":
        # The profiling executor recompiles a graph for every new length.
        context.config.parameters["DISABLE_OPTIMIZED_EXECUTION"].string_value = "true"
        context.config.parameters["INFERENCE_MODE"].string_value = "true"
    shape = exported.shape
    return {
        "model": context.name,
        "context": shape.context,
        "eos_ids": list(exported.eos_ids),
        "slots": slots,
        "longest": shape.context or 4096,
        # Each step writes a slot and reads it twice; a separate batch would read all weights.
        "gap": shape.weights // (3 * shape.slot),
    }


def _place_on_device(context: BuildContext) -> None:
    device = str(context.options["device"])
    group = context.config.instance_group.add(count=1)
    if device == "cpu":
        group.kind = pb.ModelInstanceGroup.KIND_CPU
    elif _CUDA.fullmatch(device):
        group.kind = pb.ModelInstanceGroup.KIND_GPU
        group.gpus.append(int(device[5:] or 0))
    else:
        raise OptionError(f"device cannot be {device!r}", hint="choose cpu, cuda or cuda:N")


def declare(config: ModelConfig, exported: Exported) -> None:
    """Configure the graph's tensors, and the states that are kept between requests."""
    shape = exported.shape
    for name in names.INPUTS:
        config.input.add(name=name, data_type=pb.TYPE_INT64, dims=[-1])
    config.output.add(name=names.LOGITS, data_type=pb.TYPE_FP32, dims=[shape.vocabulary])
    for index, (past, present) in enumerate(names.states(shape.layers)):
        state = config.sequence_batching.state.add(
            input_name=past,
            output_name=present,
            data_type=pb.TYPE_FP32,
            dims=[shape.heads, -1, shape.width(index)],
        )
        # Without it the first slot would contain uninitialized memory, and a NaN there would pass
        # through any mask.
        state.initial_state.add(
            name=f"no_{past}",
            data_type=pb.TYPE_FP32,
            dims=[shape.heads, 1, shape.width(index)],
            zero_data=True,
        )


def _schedule(context: BuildContext, slots: int) -> None:
    """Batch oldest first, whatever the session does: direct slots would compute unused rows."""
    sequence = context.config.sequence_batching
    # The session ends its sequences itself; the timeout is for those that it could not end.
    idle = float(context.options["idle_seconds"]) + _EXTRA_IDLE_SECONDS
    sequence.max_sequence_idle_microseconds = int(idle * 1_000_000)
    # A sequence may start in the step in which another ends.
    sequence.oldest.max_candidate_sequences = 2 * slots
    size = context.config.max_batch_size
    sequence.oldest.preferred_batch_size.append(size)
    sequence.oldest.max_queue_delay_microseconds = int(context.options["gather_us"])
