"""LoRA adapters of random weights for tiny models, in PEFT's layout, and models with one merged."""

from __future__ import annotations

import copy
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers.pytorch_utils import Conv1D


def save_adapter(
    folder: Path, model: Any, *, targets: Sequence[str], seed: int = 0, rank: int = 4, **config: Any
) -> Path:
    """Write an adapter for the products of a model whose names end with one of the targets."""
    draw = torch.Generator().manual_seed(seed)
    weights = {}
    for name, module in model.named_modules():
        if name.split(".")[-1] in targets and isinstance(module, nn.Linear | Conv1D):
            outputs, inputs = _in_order(module).shape
            prefix = f"base_model.model.{name}"
            weights[f"{prefix}.lora_A.weight"] = torch.randn(rank, inputs, generator=draw)
            weights[f"{prefix}.lora_B.weight"] = torch.randn(outputs, rank, generator=draw) / 8
    folder.mkdir(parents=True, exist_ok=True)
    save_file(weights, folder / "adapter_model.safetensors")
    settings = {
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "r": rank, "lora_alpha": 2 * rank,
        "bias": "none", "target_modules": [*targets], "base_model_name_or_path": "tiny", **config,
    }  # fmt: skip
    (folder / "adapter_config.json").write_text(json.dumps(settings), encoding="utf-8")
    return folder


def merged(model: Any, folder: Path) -> Any:
    """Return a copy of a model whose weights have those of an adapter added."""
    config = json.loads((folder / "adapter_config.json").read_text(encoding="utf-8"))
    rank = config["r"]
    scale = config["lora_alpha"] / (rank**0.5 if config.get("use_rslora") else rank)
    result = copy.deepcopy(model)
    weights = load_file(folder / "adapter_model.safetensors")
    with torch.no_grad():
        for key in (key for key in weights if ".lora_A." in key):
            first, second = weights[key], weights[key.replace("lora_A", "lora_B")]
            path = key.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
            _in_order(result.get_submodule(path)).add_(scale * second @ first)
    return result


def _in_order(module: Any) -> torch.Tensor:
    """Return a product's weight as ``[outputs, inputs]``."""
    weight: torch.Tensor = module.weight
    return weight if isinstance(module, nn.Linear) else weight.T
