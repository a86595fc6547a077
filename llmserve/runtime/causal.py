"""Loads a model, by default a causal one, with transformers from where the build has put it."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmserve.contract.images import IMAGE_LIMITS
from llmserve.hardware import computes_in
from llmserve.runtime.location import located
from llmserve.runtime.torch import freed_memory
from llmserve.runtime.torch.comparison import off_by, pages_of, random_texts, scores
from llmserve.runtime.torch.seeing_kinds import image_loader
from llmserve.runtime.torch.small import NEAR, small_model
from llmserve.runtime.torch.workarounds import mend

if TYPE_CHECKING:
    import torch

    from llmserve.runtime.lora_weights import ProductShapes

__all__ = [
    "NEAR", "adapter_shapes", "context_length", "eos_ids", "load", "off_by", "original_length",
    "pages_of", "random_texts", "scores", "small_model", "try_imports",
]  # fmt: skip

LOG = logging.getLogger(__name__)


def try_imports(settings: Mapping[str, Any], folder: Path, *, loader: str = "") -> None:
    """Import what loads the model, without its weights.

    transformers imports a model's module only when it is used. If a package that the module needs
    is broken, everything else seems to work until then.
    """
    import transformers

    location, options = located(settings, folder)
    config = _config(location, {**options, "local_files_only": True})
    loader = loader or _loader(settings, config)
    # Code that ships with the model has classes of its own.
    for name in (loader, *(config.get("architectures") or ())):
        if name in dir(transformers):
            getattr(transformers, name)


def adapter_shapes(settings: Mapping[str, Any], folder: Path) -> ProductShapes:
    """Return the shapes of the products to which adapters may add, without reading a weight."""
    from llmserve.runtime.torch.lora import lora_products

    return lora_products(*located(settings, folder)).shapes


def load(settings: Mapping[str, Any], folder: Path, *, loader: str = "") -> Any:
    """Return a model on its device, ready for inference: of one of transformers' loaders, or of the
    one for models of text, or for those that read images too."""
    import torch
    import transformers

    location, options = located(settings, folder)
    loader = loader or _loader(settings, _config(location, options))
    device = settings["device"]
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    with freed_memory.returned():
        model = getattr(transformers, loader).from_pretrained(
            location,
            dtype=_dtype(settings["dtype"], device, location, options),
            device_map="balanced" if device == "balanced" else {"": device},
            use_safetensors=None if settings.get("pickle") else True,
            **options,
        )
    mend(model)
    return model.eval()


def _config(location: str, options: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return what a model's configuration has; nothing if it cannot be read, which is checked
    elsewhere."""
    import transformers

    try:
        found, _ = transformers.PretrainedConfig.get_config_dict(location, **options)
    except (OSError, ValueError):
        return {}
    config: Mapping[str, Any] = found
    return config


def _loader(settings: Mapping[str, Any], config: Mapping[str, Any]) -> str:
    """Return the class of transformers that loads a model of a build's settings."""
    sees = IMAGE_LIMITS in settings
    return image_loader(config.get("model_type") or "") if sees else "AutoModelForCausalLM"


def _dtype(name: str, device: str, location: str, options: Mapping[str, Any]) -> torch.dtype | str:
    """Return the type of the weights, chosen for the machine that serves the model."""
    import torch
    from transformers import AutoConfig

    if name == "auto":
        if device != "cpu":
            return "auto"
        stored = AutoConfig.from_pretrained(location, **options).get_text_config().dtype
        # A checkpoint in float32 keeps its precision.
        half = stored in (torch.bfloat16, torch.float16)
        return torch.bfloat16 if half and computes_in("bfloat16") else torch.float32
    if device == "cpu" and name in ("bfloat16", "float16") and not computes_in(name):
        LOG.warning(
            "llmserve: note: %s was asked for, and this processor has no instructions for it: "
            "expect about a tenth of the speed of float32. Build with --dtype auto or "
            "--dtype float32.",
            name,
        )
    dtype: torch.dtype = getattr(torch, name)
    return dtype


def context_length(model: Any) -> int | None:
    """Return the model's limit of tokens for prompt and answer together, None if it has none."""
    length: int | None = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    return length


def original_length(config: Mapping[str, Any]) -> int | None:
    """Return the length up to which longrope rotates tokens one way; None without longrope.

    Beyond it, all tokens of a pass are rotated in another way, also those that are in a cache. The
    configuration is that of the text model, as in ``config.json`` or as transformers has it.
    """
    name = "original_max_position_embeddings"
    ropes = [config.get("rope_parameters"), config.get("rope_scaling")]
    # Some models have parameters for each type of layer.
    ropes += [part for rope in ropes if isinstance(rope, Mapping) for part in rope.values()]
    lengths = [
        rope.get(name) or config.get(name)
        for rope in ropes
        if isinstance(rope, Mapping)
        and (rope.get("rope_type") or rope.get("type")) in ("longrope", "su")
    ]
    return min((length for length in lengths if isinstance(length, int)), default=None)


def eos_ids(model: Any) -> frozenset[int]:
    """Return the ids of the tokens that end an answer; chat models have several."""
    eos = model.generation_config.eos_token_id
    return frozenset(eos if isinstance(eos, list) else [] if eos is None else [eos])
