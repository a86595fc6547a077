"""Reads from a configuration how the weights of a checkpoint are quantised."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from llmserve.builder.reading import read_object
from llmserve.plugins.quantised import Quantised

_LONGEST = 64
_CHECKPOINTS = ("*.safetensors", "pytorch_model*.bin")
MIXED = "mixed-precision"
"""The form of a checkpoint whose weights are not all stored in one way."""


def quantised_in(folder: Path) -> Quantised | None:
    """Return how the checkpoint in a folder is quantised; None if it is not, or none is there.

    What was converted from one has types of its own, whatever its configuration says.
    """
    if not any(any(folder.glob(pattern)) for pattern in _CHECKPOINTS):
        return None
    file = folder / "config.json"
    return quantised_by(read_object(file)) if file.is_file() else None


def quantised_by(config: Mapping[str, Any]) -> Quantised | None:
    """Return how the weights that a config.json describes are quantised; None if they are not."""
    text = config.get("text_config")
    parts = [config, text] if isinstance(text, Mapping) else [config]
    names = ("quantization_config", "compression_config")
    described = [found for part in parts for name in names if (found := part.get(name))]
    found = next((each for each in described if isinstance(each, Mapping)), None)
    if found is None:
        return None
    method = found.get("quant_method")
    if method is None:
        is_4bit, is_8bit = found.get("load_in_4bit"), found.get("load_in_8bit")
        method = "bitsandbytes" if is_4bit or is_8bit else "unnamed"
    if method == "compressed-tensors":
        return _compressed(found)
    form = found.get("checkpoint_format") or found.get("version") or ""
    return Quantised(
        method=str(method)[:_LONGEST],
        bits=_number(found.get("bits")),
        group=_number(found.get("group_size")),
        act_order=found.get("desc_act") is True,
        form=str(form).lower()[:_LONGEST],
        block=_block(found.get("weight_block_size")),
    )


def _compressed(found: Mapping[str, Any]) -> Quantised:
    """Return what the groups of modules say together that compressed-tensors describes."""
    groups = found.get("config_groups")
    groups = [*groups.values()] if isinstance(groups, Mapping) else []
    kinds = {_of_group(group, found.get("format")) for group in groups}
    sparse = found.get("sparsity_config")
    is_sparse = isinstance(sparse, Mapping) and sparse.get("format") not in (None, "dense")
    if is_sparse or found.get("transform_config"):
        return Quantised("compressed-tensors", form="sparse" if is_sparse else "transformed")
    return kinds.pop() if len(kinds) == 1 else Quantised("compressed-tensors", form=MIXED)


def _of_group(group: Any, form: object) -> Quantised:
    group = group if isinstance(group, Mapping) else {}
    weights = group.get("weights")
    weights = weights if isinstance(weights, Mapping) else {}
    return Quantised(
        "compressed-tensors",
        bits=_number(weights.get("num_bits")),
        group=_number(weights.get("group_size")),
        act_order=weights.get("actorder") in ("group", True),
        form=str(group.get("format") or form or "")[:_LONGEST],
        block=_block(weights.get("block_structure")),
    )


def _block(value: object) -> tuple[int, int]:
    sizes = [_number(size) for size in value] if isinstance(value, list) else []
    return (sizes[0], sizes[1]) if len(sizes) == 2 and all(sizes) else (0, 0)


def _number(value: object) -> int:
    return value if type(value) is int and value > 0 else 0
