"""The part of a checkpoint that reads images, kept beside the converted part for texts.

OpenVINO has the part for texts alone: what a tower computes can depend on how much of an image is
padding, which no trace has. So a tower stays as it is, and PyTorch computes it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import AutoConfig, AutoModelForImageTextToText

LOADER = "AutoModelForImageTextToText"
"""The class of transformers that loads a model with its tower."""
_TOKENS = ("pad_token_id", "bos_token_id", "eos_token_id")


def save_tower(source: Path, target: Path, *, pickle: bool) -> int:
    """Save a model without its layers for texts, and return how many numbers its weights have.

    Weights stay in the type that the checkpoint says.
    """
    config = AutoConfig.from_pretrained(source, local_files_only=True)
    if hasattr(config, "audio_config"):
        # Sounds are not read.
        config.audio_config = None
    _without_text(config.get_text_config())
    tower = AutoModelForImageTextToText.from_pretrained(
        source,
        config=config,
        dtype="auto",
        # The table has one token.
        ignore_mismatched_sizes=True,
        use_safetensors=None if pickle else True,
        local_files_only=True,
    )
    tower.save_pretrained(target)
    return sum(parameter.numel() for parameter in tower.parameters())


def _without_text(config: Any) -> None:
    count = config.num_hidden_layers
    if getattr(config, "per_layer_config", None):
        config.per_layer_config = None
    for name, value in [*vars(config).items()]:
        if isinstance(value, (list, tuple)) and len(value) == count:
            setattr(config, name, [])
    config.num_hidden_layers, config.vocab_size = 0, 1
    for name in _TOKENS:
        setattr(config, name, None)
