"""Putting a causal language model into a repository: what plugins over transformers share."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from llmserve.errors import ModelSourceError, OptionError
from llmserve.options import Option
from llmserve.repository.source import ModelSource
from llmserve.repository.source_files import check_intact, weight_files

if TYPE_CHECKING:
    from llmserve.builder.context import BuildContext
    from llmserve.repository.config import ModelConfig

DTYPE_OPTION = Option(
    "dtype",
    "auto",
    "Type of the weights in memory. auto is chosen where the model is served: the checkpoint's own "
    "on a GPU; on a CPU float32, or bfloat16 for 16-bit weights if the processor computes in it.",
    choices=("auto", "float32", "bfloat16", "float16"),
)
DEVICE_OPTION = Option(
    "device",
    "auto",
    "cpu, cuda (the first GPU), cuda:N, balanced (one copy over all GPUs), or auto: a GPU where "
    "there is one when the model is loaded.",
)
INSTANCES_OPTION = Option(
    "instances", 1, "Copies of the model, each with its own memory.", minimum=1
)
# No more digits than any machine has GPUs for, and none but these: str.isdigit knows others.
_CUDA = re.compile(r"cuda(:[0-9]{1,4})?")
PLACEMENT_OPTIONS = (DTYPE_OPTION, DEVICE_OPTION, INSTANCES_OPTION)
"""The options that say where a generator over transformers runs."""


def place_instances(config: ModelConfig, device: str, count: int) -> None:
    """Say where Triton puts the model; never a copy per GPU unasked.

    KIND_GPU without a list of GPUs means one copy on each of them, so the list is always
    there; KIND_MODEL leaves the choice to the runtime.
    """
    from tritonclient.grpc import model_config_pb2 as pb

    group = config.instance_group.add(count=count)
    if device == "cpu":
        group.kind = pb.ModelInstanceGroup.KIND_CPU
    elif device in ("auto", "balanced"):
        group.kind = pb.ModelInstanceGroup.KIND_MODEL
    elif _CUDA.fullmatch(device):
        group.kind = pb.ModelInstanceGroup.KIND_GPU
        group.gpus.append(int(device[5:] or 0))
    else:
        raise OptionError(
            f"device cannot be {device!r}", mend="choose auto, cpu, cuda, cuda:N or balanced"
        )


_CAUSAL = ("ForCausalLM", "LMHeadModel")


def place_causal_model(context: BuildContext) -> dict[str, Any]:
    """Check the model, place its weights and say where it runs.

    Returns the settings that ``llmserve.runtime.causal.load`` reads. The generator has to have
    the options of ``llmserve.builder.causal``.
    """
    options = context.options
    check_causal(context.source, trust_remote_code=bool(options["trust_remote_code"]))
    place_instances(context.config, str(options["device"]), int(options["instances"]))
    pickle = bool(options["pickle"])
    return {
        **context.place(weight_files(context.source, pickle=pickle), "model"),
        "device": options["device"],
        "dtype": options["dtype"],
        "pickle": pickle,
    }


def check_causal(source: ModelSource, *, trust_remote_code: bool) -> None:
    """Refuse what is no causal language model or damaged, and code nobody asked to run."""
    # Who loads a model to convert it would tell of the library that could not read it.
    check_intact(weight_files(source, pickle=False))
    config = source.config()
    names = config.get("architectures") or []
    own_code = "AutoModelForCausalLM" in (config.get("auto_map") or {})
    if not own_code and any(name.endswith(_CAUSAL) for name in names):
        return
    # Importing transformers takes a second, so only what the name does not settle gets here.
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    if config.get("model_type") in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        return
    if own_code and trust_remote_code:
        return
    if own_code:
        raise ModelSourceError(
            f"{source.asked} comes with Python code of its own",
            mend="read it, then allow it with --set trust_remote_code=true",
        )
    kind = ", ".join(names) or config.get("model_type") or "of an unknown architecture"
    raise ModelSourceError(f"{source.asked} is no causal language model: it is {kind}")
