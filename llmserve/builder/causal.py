"""Putting a causal language model into a repository, for plugins based on transformers."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict

from llmserve.builder.adapters import adapter_bytes
from llmserve.builder.gguf.kept import has_kept_weights
from llmserve.builder.source import ModelSource
from llmserve.builder.source_files import check_intact, check_links, weight_files
from llmserve.builder.weights.check import check_weights
from llmserve.contract.tasks import CLASSIFY, EMBED, GENERATE, RERANK
from llmserve.errors import ModelKindError, ModelSourceError, OptionError
from llmserve.plugins.options import Option, Value
from llmserve.plugins.quantised import Quantised, Treatment, by_transformers
from llmserve.plugins.size import BYTES, Cached, ModelSize, Needs, is_for_gpu, loaded_type

if TYPE_CHECKING:
    from llmserve.builder.context import BuildContext
    from llmserve.repository.config import ModelConfig

DTYPE_OPTION = Option(
    "dtype",
    "auto",
    "Type of the weights in memory. auto is resolved where the model is served: the checkpoint's "
    "type on a GPU; on a CPU float32, or bfloat16 for 16-bit weights if the processor supports it.",
    choices=("auto", "float32", "bfloat16", "float16"),
)
DEVICE_OPTION = Option(
    "device",
    "auto",
    "cpu, cuda (the first GPU), cuda:N, balanced (one copy across all GPUs), or auto: a GPU if "
    "there is one when the model is loaded.",
)
INSTANCES_OPTION = Option(
    "instances", 1, "Copies of the model, each with its own memory.", minimum=1
)
# More digits than any machine has GPUs for, and only ASCII ones: str.isdigit accepts others.
_CUDA = re.compile(r"cuda(:[0-9]{1,4})?")
PLACEMENT_OPTIONS = (DTYPE_OPTION, DEVICE_OPTION, INSTANCES_OPTION)
"""The options that determine where a generator based on transformers runs."""


def place_instances(config: ModelConfig, device: str, count: int) -> None:
    """Configure where Triton places the model, never implicitly with a copy per GPU.

    KIND_GPU without a list of GPUs means one copy on each of them, so there is always a list;
    KIND_MODEL leaves the choice to the runtime.
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
            f"device cannot be {device!r}", hint="choose auto, cpu, cuda, cuda:N or balanced"
        )


def place_causal_model(context: BuildContext) -> dict[str, Any]:
    """Check the model, place its weights and configure where it runs.

    Returns the settings that ``llmserve.runtime.causal.load`` reads. The generator must have
    ``PLACEMENT_OPTIONS``.
    """
    check_causal(context.source, **allowed(context))
    return place_model(context)


def place_model(context: BuildContext, *, beside: Sequence[Path] = ()) -> dict[str, Any]:
    """Place the weights of a model of any kind, and configure where it runs.

    ``beside`` are other files that its class of transformers looks for in the same folder.
    """
    options = context.options
    place_instances(context.config, str(options["device"]), int(options["instances"]))
    pickle = bool(options["pickle"])
    files = dict.fromkeys([*weight_files(context.source, pickle=pickle), *beside])
    return {
        **context.place(files, "model"),
        "device": options["device"],
        "dtype": options["dtype"],
        "pickle": pickle,
    }


_OF_TORCH = 410_000_000
"""What a process takes that has imported torch and transformers (measured)."""
_OF_BUILD = 350_000_000
"""What a build takes that copies the weights, and compares their names (measured)."""


def place_needs(
    size: ModelSize,
    options: Mapping[str, Value],
    *,
    tokens: int = 0,
    sequences: int = 1,
    copies: int = 0,
    drops: bool = False,
    process: int = _OF_TORCH,
    treatment: Callable[[Quantised], Treatment] = by_transformers,
) -> Needs:
    """Return what a model takes that ``place_model`` has placed, with a cache of ``tokens``.

    If it keeps states, there is one for each of the ``sequences``, and copies within so many bytes.
    Its weights are widened where the processor computes in float32. ``drops`` is whether a layer
    keeps no token that it looks back at no more. ``treatment`` says what becomes of
    quantised weights.
    """
    on_gpu = is_for_gpu(str(options["device"]))
    dtype = loaded_type(size, str(options["dtype"]), on_gpu=on_gpu)
    dropped = max(0, tokens - size.window) * size.windowed if drops else 0
    cached = Cached(size, tokens=tokens, sequences=sequences, copies=copies)
    cache = (tokens * size.cache - dropped) * BYTES[dtype] + cached.states
    is_copied = options["weights"] == "copy" or (
        options["weights"] == "auto" and not size.is_on_hub
    )
    is_widened = size.packed is not None and treatment(size.packed.quantised) == "widened"
    # What a GGUF file was converted to is linked.
    written = size.bytes if is_copied and not size.is_gguf else 0
    return Needs(
        build=_OF_BUILD,
        disk=written,
        process=process,
        weights=size.parameters * BYTES[dtype] if is_widened else size.bytes_with(BYTES[dtype]),
        cache=cache,
        # Each has its own weights, and their place beside those of others.
        adapters=adapter_bytes(size, options, 2 * BYTES[dtype]),
        instances=int(options["instances"]),
        on_gpu=on_gpu,
        on_all_gpus=options["device"] == "balanced",
        cached=str(cached),
        instead=({"dtype": "bfloat16"},) if dtype == "float32" else (),
    )


@dataclass(frozen=True)
class ModelKind:
    """A kind of model: how its architectures are called, and what of transformers loads it."""

    words: str
    suffixes: tuple[str, ...]
    loader: str
    mapping: str
    """The mapping in transformers with the types of models that the loader knows."""


CAUSAL = ModelKind(
    "a causal language model", ("ForCausalLM", "LMHeadModel"), "AutoModelForCausalLM",
    "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES",
)  # fmt: skip
ENCODER = ModelKind(
    "a model that makes embeddings", ("Model", "ForMaskedLM", "ForPreTraining", "ForCausalLM"),
    "AutoModel", "MODEL_MAPPING_NAMES",
)  # fmt: skip
CLASSIFIER = ModelKind(
    "a model that labels texts", ("ForSequenceClassification",),
    "AutoModelForSequenceClassification",
    "MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES",
)  # fmt: skip


SEEING = ModelKind(
    "a model that reads images and text", ("ForConditionalGeneration",),
    "AutoModelForImageTextToText", "MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES",
)  # fmt: skip

KINDS: Mapping[str, ModelKind] = {
    GENERATE: CAUSAL, EMBED: ENCODER, RERANK: CLASSIFIER, CLASSIFY: CLASSIFIER,
}  # fmt: skip
"""The kind of model that does a task."""


class Allowed(TypedDict):
    """What a build's options allow, and where it reports."""

    trust_remote_code: bool
    pickle: bool
    report: Callable[[str], None]


def allowed(context: BuildContext) -> Allowed:
    """Return the arguments of ``check_causal`` and ``check_kind`` for a build."""
    return {
        "trust_remote_code": bool(context.options["trust_remote_code"]),
        "pickle": bool(context.options["pickle"]),
        "report": context.report,
    }


def check_causal(
    source: ModelSource,
    *,
    trust_remote_code: bool,
    pickle: bool = False,
    report: Callable[[str], None] = lambda _: None,
) -> None:
    """Refuse damaged models, models of other kinds, and code that the user has not allowed."""
    check_kind(
        source,
        CAUSAL,
        trust_remote_code=trust_remote_code,
        pickle=pickle,
        report=report,
    )


def check_kind(
    source: ModelSource,
    kind: ModelKind,
    *,
    trust_remote_code: bool,
    pickle: bool = False,
    report: Callable[[str], None] = lambda _: None,
) -> None:
    """The same for any kind; a model that names its architectures is of the kind that they say.

    Its weights have to be those of the model that its configuration describes.
    """
    # Without this, a plugin that loads the model to convert it would report a library's error.
    files = weight_files(source, pickle=pickle)
    check_links(files, source.folder)
    check_intact(files)
    _check_names(source, kind, trust_remote_code=trust_remote_code)
    # Our own is in the package, and its tests load it. What stays in a GGUF file was compared when
    # that was read.
    if not source.is_demo and not has_kept_weights(source):
        check_weights(
            source.path,
            asked=source.asked,
            loader=kind.loader,
            trust_remote_code=trust_remote_code,
            pickle=pickle,
            report=report,
        )


def _check_names(source: ModelSource, kind: ModelKind, *, trust_remote_code: bool) -> None:
    config = source.config()
    names = config.get("architectures") or []
    has_code = kind.loader in (config.get("auto_map") or {})
    # AutoModel loads T5EncoderModel with its decoder, too.
    is_part = any(name.endswith("EncoderModel") for name in names) and not has_code
    if kind is ENCODER and (is_part or config.get("is_encoder_decoder")):
        raise ModelSourceError(
            f"{source.asked} has an encoder and a decoder ({', '.join(names) or 'unnamed'})",
            hint="embeddings are made with a model that has one of them",
        )
    if not has_code and any(name.endswith(kind.suffixes) for name in names):
        return
    # A model that labels texts has no head for tokens, of whatever type it is.
    labels = any(name.endswith(CLASSIFIER.suffixes) for name in names)
    if ((kind is CAUSAL and not labels) or not names) and _loads(config, kind):
        return
    if has_code and trust_remote_code:
        return
    if has_code:
        raise ModelSourceError(
            f"{source.asked} ships with its own Python code",
            hint="read it, then allow it with --set trust_remote_code=true",
        )
    found = ", ".join(names) or config.get("model_type") or "of an unknown architecture"
    raise ModelKindError(f"{source.asked} is not {kind.words}: it is {found}", names)


def _loads(config: Mapping[str, Any], kind: ModelKind) -> bool:
    """Whether transformers has a class of the kind for a model of this type."""
    # Importing transformers takes a second, so it is done only if the name is not sufficient.
    from transformers.models.auto import modeling_auto

    known = config.get("model_type")
    # It has a causal class for encoders too, which would continue texts with nonsense.
    masks = known in modeling_auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES
    is_encoder = kind is CAUSAL and masks and not config.get("is_decoder")
    return known in getattr(modeling_auto, kind.mapping) and not is_encoder
