"""Loading a causal language model with transformers, from where the build placed it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from llmserve.runtime.located import located


def load(settings: Mapping[str, Any], folder: Path) -> Any:
    """Return an ``AutoModelForCausalLM`` on its device, ready for inference."""
    import torch
    from transformers import AutoModelForCausalLM

    where, options = located(settings, folder)
    device = settings["device"]
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype: Any = settings["dtype"]
    if dtype == "auto":
        # Half precision is slow on most CPUs and never exact; a GPU takes what the model has.
        dtype = torch.float32 if device == "cpu" else "auto"
    else:
        dtype = getattr(torch, dtype)
    return AutoModelForCausalLM.from_pretrained(
        where,
        dtype=dtype,
        device_map="balanced" if device == "balanced" else {"": device},
        use_safetensors=None if settings.get("pickle") else True,
        **options,
    ).eval()


def context_length(model: Any) -> int | None:
    """Return how many tokens prompt and answer may have together, if the model has a limit."""
    length: int | None = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    return length


def eos_ids(model: Any) -> frozenset[int]:
    """Return the tokens that end an answer; chat models have several."""
    eos = model.generation_config.eos_token_id
    return frozenset(eos if isinstance(eos, list) else [] if eos is None else [eos])
