"""Loads a model whose checkpoint is quantised: each weight is kept as it is, or widened."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from safetensors import safe_open
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.pytorch_utils import Conv1D

from llmserve.graphs import PackedWeight, Scratch, is_readable, without_parameters
from llmserve.plugin import Quantised, loaded_files
from llmserve_openvino.quantised_forms import Unreadable, is_quantised, read_weight

_WHOLE = "model.safetensors"


class Loaded(NamedTuple):
    """A model, the weights of its modules that are packed, and how many others were widened."""

    model: Any
    packed: Mapping[torch.nn.Module, PackedWeight]
    widened: int


def plain_config(source: Path, *, trusted: bool) -> Any:
    """Return a model's configuration, as if its weights were not quantised."""
    config = AutoConfig.from_pretrained(source, trust_remote_code=trusted, local_files_only=True)
    for part in (config, config.get_text_config()):
        for name in ("quantization_config", "compression_config"):
            if hasattr(part, name):
                delattr(part, name)
    return config


def load_quantised(
    source: Path, found: Quantised, scratch: Scratch, *, trusted: bool = False
) -> Loaded:
    """Load a model; a checkpoint that does not fit together ends the program with a line."""
    config = plain_config(source, trusted=trusted)
    with without_parameters():
        model = AutoModelForCausalLM.from_config(
            config, dtype=torch.float32, trust_remote_code=trusted
        ).eval()
    packed: dict[torch.nn.Module, PackedWeight] = {}
    others: dict[str, torch.Tensor] = {}
    widened = 0
    with ExitStack() as stack:
        files = [
            stack.enter_context(safe_open(path, "pt"))
            for path in loaded_files(source, _WHOLE, "*.safetensors")
        ]
        for name, tensors in _by_module(files):
            module = _module(model, name)
            if module is None or not is_quantised(tensors):
                others |= {f"{name}.{end}" if name else end: tensors[end] for end in tensors}
                continue
            weight = _read(found, tensors, module, name)
            if isinstance(weight, PackedWeight) and is_readable(module):
                packed[module] = _kept(weight, scratch)
            else:
                module.weight = _parameter(_wide(weight, module, scratch))
                widened += 1
            bias = tensors.get("bias")
            if bias is not None and (len(bias.shape) != 1 or len(bias) != weight.shape[0]):
                raise SystemExit(
                    f"the checkpoint does not fit together: {name} has a bias of "
                    f"{' x '.join(map(str, bias.shape))} for {weight.shape[0]} outputs"
                )
            if bias is not None and bool(bias.any()):
                # Some packers write one for each product, of zeros where the model has none.
                module.bias = _parameter(bias.float())
            elif bias is not None and module.bias is not None:
                module.bias = _parameter(torch.zeros(bias.shape))
    _load_others(model, others, packed)
    return Loaded(model.requires_grad_(False), packed, widened)


def _by_module(files: list[Any]) -> Iterator[tuple[str, dict[str, torch.Tensor]]]:
    """Yield the tensors of each module, which are read when they are used."""
    places: dict[str, dict[str, Any]] = {}
    for file in files:
        for name in file.keys():  # noqa: SIM118
            module, _, end = name.rpartition(".")
            places.setdefault(module, {})[end] = (file, name)
    for module, ends in places.items():
        yield module, {end: file.get_tensor(name) for end, (file, name) in ends.items()}


def _module(model: Any, name: str) -> Any:
    try:
        found = model.get_submodule(name)
    except AttributeError:
        return None
    return found if isinstance(getattr(found, "weight", None), torch.Tensor) else None


def _read(
    found: Quantised, tensors: Mapping[str, torch.Tensor], module: Any, name: str
) -> PackedWeight | torch.Tensor:
    rows, width = (*module.weight.shape, 0, 0)[:2]
    if isinstance(module, Conv1D):
        rows, width = width, rows
    try:
        if isinstance(module, torch.nn.Embedding) or module.weight.ndim != 2:
            raise Unreadable("is quantised, and no product")
        return read_weight(found, tensors, (rows, width))
    except Unreadable as error:
        raise SystemExit(f"the checkpoint does not fit together: {name} {error}") from None


def _kept(weight: PackedWeight, scratch: Scratch) -> PackedWeight:
    """Return a weight that is in a file."""
    zeros = weight.zeros
    return replace(
        weight,
        integers=scratch.kept(weight.integers),
        scales=scratch.kept(weight.scales),
        zeros=scratch.kept(zeros) if isinstance(zeros, np.ndarray) else zeros,
    )


def _wide(weight: PackedWeight | torch.Tensor, module: Any, scratch: Scratch) -> torch.Tensor:
    """Return a weight in 16 bits that is in a file, in its module's order."""
    if isinstance(weight, PackedWeight):
        weight = torch.from_numpy(weight.dequantised()).bfloat16()
    if isinstance(module, Conv1D):
        weight = weight.T.contiguous()
    return torch.from_numpy(scratch.kept(weight.view(torch.int16).numpy())).view(torch.bfloat16)


def _load_others(
    model: Any, others: dict[str, torch.Tensor], packed: Mapping[torch.nn.Module, PackedWeight]
) -> None:
    """Load what is not quantised: tables and products as they are stored, all else in float32."""
    kept = {f"{name}.weight" for name, module in model.named_modules() if is_readable(module)}
    state = {
        name: tensor if name in kept or not tensor.is_floating_point() else tensor.float()
        for name, tensor in others.items()
    }
    try:
        model.load_state_dict(state, strict=False, assign=True)
    except RuntimeError as error:
        reason = str(error).strip().splitlines()[-1].strip()
        raise SystemExit(f"the checkpoint does not fit together: {reason}") from None
    model.tie_weights()
    known = {f"{name}.weight" for name, module in model.named_modules() if module in packed}
    missing = [
        name for name, tensor in model.named_parameters() if tensor.is_meta and name not in known
    ]
    if missing:
        raise SystemExit(
            f"the checkpoint has no {missing[0]} under this name"
            + (f", and {len(missing) - 1} more are missing" if missing[1:] else "")
        )


def _parameter(tensor: torch.Tensor) -> torch.nn.Parameter:
    return torch.nn.Parameter(tensor, requires_grad=False)
