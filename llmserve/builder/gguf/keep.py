"""Converts what of a GGUF file is no matrix in blocks; the matrices stay where they are.

transformers' own reader gives the names. What it changes in a tensor is found by giving it the
numbers of the rows instead: it may bring them in another order, and nothing else.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

from llmserve.builder.gguf.header import GgufHeader, GgufTensor
from llmserve.builder.gguf.kept import KeptWeight, KeptWeights

KEPT = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K")
"""The types of blocks that stay as they are."""
NOT_WEIGHTS = ("rope_freqs.", "rope_factors_")
"""The beginnings of names of tensors that are no parameters in transformers."""
_WEIGHTS = "model.safetensors"
_HALF = {"F16": "float16", "F32": "float32"}


class Unknown(Exception):
    """The reader does something to the tensors that cannot be done to blocks; says what."""


def write_kept(header: GgufHeader, model: Any, target: Path) -> tuple[int, Counter[str]]:
    """Write the weights that are not kept, and the list of those that are.

    ``model`` is the one that they are for, without memory. Returns the bytes of the kept, and how
    many of the others have which type.
    """
    import torch
    from safetensors.torch import save_file

    reader = _FileReader(header, model)
    kept, others, widened = [], {}, Counter[str]()
    for tensor in header.tensors:
        if tensor.name.startswith(NOT_WEIGHTS) or (name := reader.parameter(tensor)) is None:
            continue
        order = reader.order(tensor, name)
        if order is not None:
            shape = (tensor.shape[0], tensor.shape[1])
            start = header.data + tensor.offset
            kept.append(KeptWeight(name, _kind(tensor).name, shape, start, order))
        else:
            dtype = getattr(torch, _HALF.get(_kind(tensor).name, "bfloat16"))
            others[name] = reader.widened(tensor, name).to(dtype)
            widened[_kind(tensor).name] += tensor.elements
    missing = reader.parameters - {weight.parameter for weight in kept} - others.keys()
    if missing:
        raise Unknown(f"{len(missing)} weights are put together from others")
    if 2 * widened.total() > sum(tensor.elements for tensor in header.tensors):
        raise Unknown("most of them are in other types")
    save_file(others, target / _WEIGHTS, {"format": "pt"})
    KeptWeights(header.path.absolute(), tuple(kept)).write(target)
    return sum(_bytes(tensor) for tensor in header.tensors), widened


class _FileReader:
    """What transformers does to the tensors of an architecture."""

    def __init__(self, header: GgufHeader, model: Any) -> None:
        from transformers import modeling_gguf_pytorch_utils as reading

        self._file = header.path, header.data
        kind = reading.TENSOR_PROCESSORS.get(header.architecture, reading.TensorProcessor)
        self._processor = kind(config=model.config.to_dict())
        self._names = reading.get_gguf_hf_weights_map(model, self._processor)
        self._model = model
        # What is tied is there once.
        self.parameters = {name for name, _ in model.named_parameters()}
        self._own = {id(parameter): name for name, parameter in model.named_parameters()}

    def parameter(self, tensor: GgufTensor) -> str | None:
        """Return the name of what a tensor is for; None if transformers has no place for it."""
        name = self._names.get(tensor.name)
        if name is None:
            return None
        try:
            found: str = self._own[id(self._model.get_parameter(name))]
        except AttributeError:
            raise Unknown(f"{tensor.name[:64]} becomes a part of {name}") from None
        return found

    def order(self, tensor: GgufTensor, name: str) -> tuple[int, ...] | None:
        """Return the order of the rows, empty if it is the file's; None if it is not kept."""
        import numpy as np
        import torch
        from transformers.pytorch_utils import Conv1D

        owner = self._model.get_submodule(name.rpartition(".")[0])
        if _kind(tensor).name not in KEPT or len(tensor.shape) != 2:
            return None
        if not isinstance(owner, (torch.nn.Linear, torch.nn.Embedding, Conv1D)):
            return None
        rows, width = tensor.shape
        own = tuple(self._model.get_parameter(name).shape)
        numbers = np.arange(rows, dtype=np.float64)
        try:
            found = self._processed(np.repeat(numbers[:, None], 2, axis=1), tensor)
        except ValueError:
            # It looks at more than the rows.
            return None
        if isinstance(owner, Conv1D):
            found, own = found.T, own[::-1]
        if own != (rows, width):
            raise Unknown(f"{tensor.name[:64]} is {rows} x {width} and {name} {own[0]} x {own[1]}")
        if found.shape != (rows, 2) or not np.array_equal(np.sort(found[:, 0]), numbers):
            return None
        order = tuple(int(row) for row in found[:, 0])
        return () if order == tuple(range(rows)) else order

    def widened(self, tensor: GgufTensor, name: str) -> Any:
        """Return a tensor as transformers makes it of the file's."""
        import numpy as np
        import torch
        from gguf import dequantize

        path, data = self._file
        shape = (*tensor.shape[:-1], _bytes(tensor) * tensor.shape[-1] // tensor.elements)
        stored = np.memmap(path, np.uint8, "r", data + tensor.offset, shape)
        values = self._processed(dequantize(stored, _kind(tensor)), tensor)
        own = tuple(self._model.get_parameter(name).shape)
        if values.shape != own:
            raise Unknown(f"{tensor.name[:64]} is {values.shape} and {name} {own}")
        return torch.from_numpy(np.array(values))

    def _processed(self, values: Any, tensor: GgufTensor) -> Any:
        found = self._processor.process(
            weights=values, name=tensor.name, tensor_key_mapping=self._names,
            parsed_parameters={"tensors": {}},
        )  # fmt: skip
        if found.name != tensor.name:
            raise Unknown(f"{tensor.name[:64]} becomes a part of another")
        return found.weights


def _kind(tensor: GgufTensor) -> Any:
    from gguf import GGMLQuantizationType

    return GGMLQuantizationType(tensor.kind)


def _bytes(tensor: GgufTensor) -> int:
    from gguf import GGML_QUANT_SIZES

    block, length = GGML_QUANT_SIZES[_kind(tensor)]
    return tensor.elements // block * int(length)
