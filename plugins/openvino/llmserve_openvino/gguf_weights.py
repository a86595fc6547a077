"""Loads a model whose weights are in a GGUF file: each is packed as it is, one after the other."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.pytorch_utils import Conv1D

from llmserve.graphs import PackedWeight, Scratch, is_readable, without_parameters
from llmserve.plugin import KeptWeight, KeptWeights
from llmserve_openvino.gguf_blocks import NoNumbers, packed_rows

# How many numbers are put into another order at a time.
_PIECE = 1 << 23
_SIZES = {
    "Q4_0": (32, 18), "Q4_1": (32, 20), "Q5_0": (32, 22), "Q5_1": (32, 24), "Q8_0": (32, 34),
    "Q4_K": (256, 144), "Q5_K": (256, 176), "Q6_K": (256, 210),
}  # fmt: skip
"""How many numbers a block has, and how many bytes."""


def load_kept(
    source: Path,
    kept: KeptWeights,
    scratch: Scratch,
    tell: Callable[[float], None] = lambda _: None,
) -> tuple[Any, dict[torch.nn.Module, PackedWeight]]:
    """Return a model, and the weights of its modules that the file has; all else is in it."""
    config = AutoConfig.from_pretrained(source, local_files_only=True)
    with without_parameters():
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    model.load_state_dict(
        {name: tensor.float() for name, tensor in load_file(source / "model.safetensors").items()},
        strict=False,
        assign=True,
    )
    model.tie_weights()
    modules: dict[int, list[torch.nn.Module]] = {}
    for module in model.modules():
        if isinstance(weight := getattr(module, "weight", None), torch.Tensor):
            modules.setdefault(id(weight), []).append(module)
    packed: dict[torch.nn.Module, PackedWeight] = {}
    whole, done = sum(prod(each.shape) for each in kept.weights), 0
    for each in kept.weights:
        tell(done / whole)
        done += prod(each.shape)
        users = modules[id(model.get_parameter(each.parameter))]
        weight = _read(kept.file, each, scratch)
        if not all(is_readable(module) for module in users):
            _widen(users, weight)
            continue
        for module in users:
            packed[module] = weight
        # A table has a byte for each number; tied to it, a product keeps its 4 bits.
        tables = [module for module in users if isinstance(module, torch.nn.Embedding)]
        if tables and weight.kind == "u4":
            table = _copied(weight, scratch)
            packed |= dict.fromkeys(tables, table)
    return model.requires_grad_(False), packed


def _read(file: Path, kept: KeptWeight, scratch: Scratch) -> PackedWeight:
    """Read a weight piece by piece, in the order of its parameter's rows."""
    (rows, width), (block, length) = kept.shape, _SIZES[kept.kind]
    blocks = np.memmap(file, np.uint8, "r", kept.offset, (rows, width // block, length))
    order = np.array(kept.order or range(rows))
    step = max(1, _PIECE // width)
    pieces = (
        packed_rows(kept.kind, blocks[order[start : start + step]])
        for start in range(0, rows, step)
    )
    try:
        return _joined(pieces, rows, scratch)
    except NoNumbers as error:
        raise SystemExit(f"the file is damaged: {kept.parameter} {error}") from None


def _copied(weight: PackedWeight, scratch: Scratch) -> PackedWeight:
    """Return a weight with a byte for each number."""
    rows, width = weight.shape
    step = max(1, _PIECE // width)
    parts = (weight.part(slice(start, start + step)) for start in range(0, rows, step))
    return _joined((part.in_bytes() for part in parts), rows, scratch)


def _joined(pieces: Iterable[PackedWeight], rows: int, scratch: Scratch) -> PackedWeight:
    """Return pieces of a weight as one, which is not in memory."""
    whole, done = None, 0
    for piece in pieces:
        arrays = _arrays(piece)
        if whole is None:
            shapes = {name: (rows, array.shape[1]) for name, array in arrays.items()}
            whole = {name: scratch.empty(shapes[name], arrays[name].dtype) for name in arrays}
        for name, array in arrays.items():
            whole[name][done : done + len(array)] = array
        done += len(piece.integers)
    return replace(piece, **(whole or {}))


def _arrays(weight: PackedWeight) -> dict[str, Any]:
    arrays = {"integers": weight.integers, "scales": weight.scales, "zeros": weight.zeros}
    return {name: array for name, array in arrays.items() if isinstance(array, np.ndarray)}


def _widen(modules: Iterable[Any], weight: PackedWeight) -> None:
    """Give modules that do more than their kind does a weight in float32."""
    values = torch.from_numpy(weight.dequantised())
    for module in modules:
        own = values.T if isinstance(module, Conv1D) else values
        module.weight = torch.nn.Parameter(own, requires_grad=False)
