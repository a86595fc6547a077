"""Options that every model has, whatever it is made of, and where it runs."""

from __future__ import annotations

from tritonclient.grpc import model_config_pb2 as pb

from llmserve.errors import OptionError
from llmserve.modelconfig import ModelConfig
from llmserve.options import Option

SOURCE_OPTIONS = (
    Option("revision", "", "Branch, tag or commit of a model on the hub."),
    Option(
        "weights",
        "auto",
        "copy puts the model's files into the repository, reference leaves them where they are; "
        "auto copies local folders and leaves the hub's in its cache.",
        choices=("auto", "copy", "reference"),
    ),
    Option("trust_remote_code", False, "Run Python code that comes with the model."),
    Option("pickle", False, "Load pickled weights, which can run code."),
)

REQUEST_OPTIONS = (
    Option("max_tokens", 64, "Longest answer of a request that does not say.", minimum=1),
    Option("stream", False, "Send pieces to a request that does not say."),
    Option("chat", False, "Treat text_input as a user's message in the model's chat template."),
    Option("echo", False, "Begin the answer with the prompt, as the seeds of Triton's demos do."),
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


def place_instances(config: ModelConfig, device: str, count: int) -> None:
    """Say where Triton puts the model; never a copy per GPU unasked.

    KIND_GPU without a list of GPUs means one copy on each of them, so the list is always
    there; KIND_MODEL leaves the choice to the runtime.
    """
    group = config.instance_group.add(count=count)
    if device == "cpu":
        group.kind = pb.ModelInstanceGroup.KIND_CPU
    elif device in ("auto", "balanced"):
        group.kind = pb.ModelInstanceGroup.KIND_MODEL
    elif device == "cuda" or (device.startswith("cuda:") and device[5:].isdigit()):
        group.kind = pb.ModelInstanceGroup.KIND_GPU
        group.gpus.append(int(device[5:] or 0))
    else:
        raise OptionError(
            f"device cannot be {device!r}", mend="choose auto, cpu, cuda, cuda:N or balanced"
        )
