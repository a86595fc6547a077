"""Where a model runs: on which device, in which type, in how many copies."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from llmserve.errors import OptionError
from llmserve.options import INT32_MAX, Option

if TYPE_CHECKING:
    from llmserve.modelconfig import ModelConfig

DTYPE_OPTION = Option(
    "dtype",
    "auto",
    "Type of the weights in memory; auto is the checkpoint's own on a GPU and float32 on a CPU.",
    choices=("auto", "float32", "bfloat16", "float16"),
)
DEVICE_OPTION = Option(
    "device",
    "auto",
    "cpu, cuda (the first GPU), cuda:N, balanced (one copy over all GPUs), or auto: a GPU where "
    "there is one when the model is loaded.",
)
INSTANCES_OPTION = Option(
    "instances",
    1,
    "Copies of the model, each with its own memory.",
    minimum=1,
    maximum=INT32_MAX,
)
# No more digits than any machine has GPUs for, and none but these: str.isdigit knows others.
_CUDA = re.compile(r"cuda(:[0-9]{1,4})?")
PLACEMENT_OPTIONS = (DTYPE_OPTION, DEVICE_OPTION, INSTANCES_OPTION)
"""What a generator over transformers can be told of its place."""


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
