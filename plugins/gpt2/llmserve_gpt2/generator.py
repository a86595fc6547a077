"""The generator's part of the repository: the exported graph and Triton's configuration of it."""

from __future__ import annotations

import re
from typing import Any

from tritonclient.grpc import model_config_pb2 as pb

from llmserve.builder.causal import check_causal
from llmserve.builder.context import BuildContext
from llmserve.errors import OptionError
from llmserve.modelconfig import ModelConfig
from llmserve_gpt2.export import Exported, export, names
from llmserve_gpt2.export.quiet import quietly

SETTINGS = "graph.json"
"""Beside the session's files: what it must know of the generator."""

_LATER = 10.0
_CUDA = re.compile(r"cuda(:[0-9]{1,4})?")


def build_graph(context: BuildContext, form: str, *, slots: int) -> dict[str, Any]:
    """Export the model into a part and configure it; return what the session must know."""
    _place(context)
    check_causal(context.source, trust_remote_code=bool(context.options["trust_remote_code"]))
    exported = export(
        _load(context), form, context.folder, name=context.source.asked, report=context.report
    )
    declare(context.config, exported)
    _schedule(context, slots)
    if form == "torchscript":
        # The profiling executor compiles a graph anew for every length that it has not seen.
        context.config.parameters["DISABLE_OPTIMIZED_EXECUTION"].string_value = "true"
        context.config.parameters["INFERENCE_MODE"].string_value = "true"
    shape = exported.shape
    return {
        "model": context.name,
        "context": shape.context,
        "eos_ids": list(exported.eos_ids),
        "slots": slots,
        "longest": shape.context or 4096,
        # A slot is written and read twice with every step, where a batch of one's own would
        # read all weights.
        "gap": shape.weights // (3 * shape.slot),
    }


def _load(context: BuildContext) -> Any:
    import torch
    from transformers import AutoModelForCausalLM

    context.report("loading the model")
    with quietly():
        return AutoModelForCausalLM.from_pretrained(
            context.source.path,
            dtype=torch.float32,
            # Plain products, which ONNX Runtime fuses; other forms turn all keys with each token.
            attn_implementation="eager",
            use_safetensors=None if context.options["pickle"] else True,
            trust_remote_code=bool(context.options["trust_remote_code"]),
            local_files_only=True,
        ).eval()


def _place(context: BuildContext) -> None:
    device = str(context.options["device"])
    group = context.config.instance_group.add(count=1)
    if device == "cpu":
        group.kind = pb.ModelInstanceGroup.KIND_CPU
    elif _CUDA.fullmatch(device):
        group.kind = pb.ModelInstanceGroup.KIND_GPU
        group.gpus.append(int(device[5:] or 0))
    else:
        raise OptionError(f"device cannot be {device!r}", mend="choose cpu, cuda or cuda:N")


def declare(config: ModelConfig, exported: Exported) -> None:
    """Configure the graph's tensors, and the states that go from one request to the next."""
    shape = exported.shape
    for name in names.INPUTS:
        config.input.add(name=name, data_type=pb.TYPE_INT64, dims=[-1])
    config.output.add(name=names.LOGITS, data_type=pb.TYPE_FP32, dims=[shape.vocabulary])
    for at, (past, present) in enumerate(names.states(shape.layers)):
        state = config.sequence_batching.state.add(
            input_name=past,
            output_name=present,
            data_type=pb.TYPE_FP32,
            dims=[shape.heads, -1, shape.width(at)],
        )
        # Without it the first slot would hold whatever was in memory, and a NaN there would go
        # through any mask.
        state.initial_state.add(
            name=f"no_{past}",
            data_type=pb.TYPE_FP32,
            dims=[shape.heads, 1, shape.width(at)],
            zero_data=True,
        )


def _schedule(context: BuildContext, slots: int) -> None:
    """Oldest first, whatever the session has: direct would compute rows that nobody asked for."""
    sequence = context.config.sequence_batching
    # The session ends its sequences itself; this is for those that it had no occasion to end.
    idle = float(context.options["idle_seconds"]) + _LATER
    sequence.max_sequence_idle_microseconds = int(idle * 1_000_000)
    # One may start in the step in which another ends.
    sequence.oldest.max_candidate_sequences = 2 * slots
    size = context.config.max_batch_size
    sequence.oldest.preferred_batch_size.append(size)
    sequence.oldest.max_queue_delay_microseconds = int(context.options["gather_us"])
