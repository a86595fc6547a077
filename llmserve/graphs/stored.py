"""Weights that stay as a checkpoint stores them, mapped from its files.

A model is traced with placeholders that take no memory, and the trace refers to the stored
weights. Where the model itself is to compute, each weight is widened for the one product that
needs it. So neither takes more memory than the largest piece of a weight.

torch has no type for a weight in few bits: a trace refers to some memory of its shape instead, and
the weight is put there afterwards.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

import torch
import transformers
from openvino.frontend.pytorch import ModuleExtension
from openvino.frontend.pytorch.ts_decoder import TorchScriptPythonDecoder
from safetensors import safe_open
from torch.nn import functional
from transformers.pytorch_utils import Conv1D

from llmserve.graphs.experts import StoredExperts, is_experts, product_extension
from llmserve.graphs.library import openvino
from llmserve.graphs.packed_weight import (
    PackedWeight,
    ordered_inputs,
    product_weight,
    table_weight,
)
from llmserve.runtime.torch.freed_memory import returned

_LAYERS = (torch.nn.Linear, torch.nn.Embedding, Conv1D)
_TYPES = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}
# The bytes between two of what stands for packed weights: a line of a processor's cache.
_STAND_IN = 64
# How many values of a weight are widened at a time.
_PIECE = 1 << 22


class StoredLayer:
    """A module whose weight is large, and that OpenVINO knows: a product or a table of vectors.

    The weight of a packed one is what stands for it in a trace.
    """

    def __init__(
        self, module: Any, packed: PackedWeight | None = None, weight: torch.Tensor | None = None
    ) -> None:
        self.module = module
        self.packed = packed
        self.is_table = isinstance(module, torch.nn.Embedding)
        # A packed weight has its outputs first, whatever the module's own order.
        self._is_transposed = isinstance(module, Conv1D) and packed is None
        self.weight: torch.Tensor = module.weight if weight is None else weight
        self.bias: torch.Tensor | None = getattr(module, "bias", None)
        # A few families multiply what their table has by a number.
        self._scale: torch.Tensor | None = getattr(module, "embed_scale", None)

    @property
    def weights(self) -> list[torch.Tensor]:
        return [self.weight]

    def hide(self) -> None:
        """Put placeholders where the weights were; the stored ones stay reachable for a trace."""
        for name in ("weight", "bias"):
            stored = getattr(self, name)
            if stored is not None:
                self.module.register_parameter(f"stored_{name}", stored)
                # What reads a weight beside the module shows in the answer.
                placeholder = torch.full((), torch.nan).expand(stored.shape)
                setattr(self.module, name, torch.nn.Parameter(placeholder, requires_grad=False))

    def show(self) -> None:
        """Put the weights where they were, for a model that reads them without their module."""
        # Parameters of their own: a trace refuses one that a module has twice.
        whole = self.weight if self.packed is None else torch.cat([*self._pieces()])
        self.module.weight = torch.nn.Parameter(whole.detach(), requires_grad=False)
        if self.bias is not None:
            self.module.bias = torch.nn.Parameter(self.bias.detach(), requires_grad=False)

    def keep_rows(self, count: int) -> None:
        """Have no more rows than these: as many tokens are enough for a comparison."""
        self.weight = torch.nn.Parameter(self.weight[:count], requires_grad=False)
        if self.bias is not None:
            self.bias = torch.nn.Parameter(self.bias[:count], requires_grad=False)
        self.hide()

    def extension(self) -> ModuleExtension:
        """Return how OpenVINO is to read this module."""
        name = "embedding" if self.is_table else "conv1d" if self._is_transposed else "linear"
        return ModuleExtension(
            self.module,
            f"ov_ext::{name}",
            convert=self._traced,
            # The first operand of a table is the table.
            evaluate=lambda _, *args, **__: self.shape_only(args[1 if self.is_table else 0]),
        )

    def _traced(self, _: torch.nn.Module, target: Callable[..., Any], *args: Any, **__: Any) -> Any:
        if not self.is_table:
            return target(args[0], self.weight, self.bias)
        module: Any = self.module
        options = (module.padding_idx, module.scale_grad_by_freq, module.sparse)
        rows = target(self.weight, args[0], *options)
        return rows if self._scale is None else rows * self._scale

    def shape_only(self, values: torch.Tensor) -> torch.Tensor:
        """Return a tensor that has the shape of the answer, and nothing of it."""
        if self.is_table:
            return torch.full((*values.shape, self.weight.shape[1]), 0.5)
        width = self.weight.shape[1 if self._is_transposed else 0]
        return torch.full((*values.shape[:-1], width), 0.5)

    def compute(self, values: torch.Tensor) -> torch.Tensor:
        """Return what the module answers in float32."""
        if self.is_table:
            rows = self._rows(values)
            return rows if self._scale is None else rows * self._scale
        outputs = self.weight.shape[1 if self._is_transposed else 0]
        # It is there before the pieces: what is kept between them keeps their memory as well.
        product, done = torch.empty(*values.shape[:-1], outputs), 0
        for piece in self._pieces():
            product[..., done : (done := done + len(piece))] = values @ piece.T
        return product if self.bias is None else product.add_(self.bias.float())

    def _rows(self, ids: torch.Tensor) -> torch.Tensor:
        if self.packed is None:
            return functional.embedding(ids, self.weight).float()
        rows = torch.from_numpy(self.packed.dequantised(ids.flatten().numpy()))
        return rows.reshape(*ids.shape, -1)

    def _pieces(self) -> Iterator[torch.Tensor]:
        """Return the weight in float32, some of the outputs at a time."""
        weight = self.weight.T if self._is_transposed else self.weight
        step = max(1, _PIECE // weight.shape[1])
        for start in range(0, len(weight), step):
            rows = slice(start, min(start + step, len(weight)))
            if self.packed is None:
                yield weight[rows].float()
            else:
                yield torch.from_numpy(self.packed.dequantised(rows))


class StoredWeights:
    """All large weights of a model, each as it is stored."""

    def __init__(
        self,
        model: torch.nn.Module,
        packed: Mapping[torch.nn.Module, PackedWeight] | None = None,
        folder: Path | None = None,
    ) -> None:
        """Read a model; the weights of modules in ``packed``, which are readable, are these.

        ``folder`` is where weights go that have to be arranged anew.
        """
        packed = {} if packed is None else packed
        weights = {
            module: weight.in_bytes() if isinstance(module, torch.nn.Embedding) else weight
            for module, weight in packed.items()
        }
        self._packed, stand_ins = _stand_ins(weights)
        self.layers = {
            module: StoredLayer(module, weights.get(module), stand_ins.get(module))
            for module in model.modules()
            if is_readable(module)
        }
        self.experts = {m: StoredExperts(m, folder) for m in model.modules() if is_experts(m)}
        self._replaceable: dict[torch.nn.Module, StoredLayer | StoredExperts]
        self._replaceable = {**self.layers, **self.experts}
        for layer in self._replaceable.values():
            layer.hide()
        for module in model.modules():
            if module not in self._replaceable:
                _widen(module)

    def bytes_in_float32(self, part: torch.nn.Module) -> int:
        """Return what a part's weights would take in float32; a tied one counts once."""
        weights: dict[int, int] = {}
        for module in part.modules():
            layer = self._replaceable.get(module)
            own = module.parameters(recurse=False) if layer is None else layer.weights
            weights |= {weight.data_ptr(): weight.numel() for weight in own}
        return 4 * sum(weights.values())

    def put_packed(self, model: Any) -> None:
        """Put the packed weights into a traced model, where it has what stood for them.

        The model refers to them, and they have to be kept for as long.
        """
        for node in model.get_ordered_ops():
            if node.get_type_name() != "Constant" or node.get_byte_size() < _STAND_IN:
                continue
            weight = self._packed.get(node.data.ctypes.data)
            if weight is not None:
                _replace(node, weight.part(slice(node.get_output_shape(0)[0])))
        model.validate_nodes_and_infer_types()

    def traced(self, module: torch.nn.Module, example: Any, others: Sequence[Any] = ()) -> Any:
        """Return a pass of a module as OpenVINO reads it, with the weights where they are stored.

        ``others`` are extensions of OpenVINO's for its other parts. PyTorch does not trace it a
        second time to compare: whoever converts a model compares what it computes.
        """
        with self._extensions() as extensions:
            decoder = TorchScriptPythonDecoder(
                module,
                example_input=example,
                module_extensions={each.module: each for each in extensions},
                trace_kwargs={"check_trace": False},
            )
            return openvino.convert_model(decoder, extension=[product_extension(), *others])

    @contextmanager
    def _extensions(self) -> Iterator[list[ModuleExtension]]:
        """Let OpenVINO read the weights; what it leaves behind would be in the way of the next."""
        before = {module: set(vars(module)) for module in self._replaceable}
        try:
            yield [layer.extension() for layer in self._replaceable.values()]
        finally:
            for module, names in before.items():
                for name in set(vars(module)) - names:
                    delattr(module, name)

    @contextmanager
    def shapes_only(self, model: torch.nn.Module) -> Iterator[None]:
        """Let a model compute shapes, and read no weight but those that it reads itself.

        It may have a part of the layers.
        """
        called: set[torch.nn.Module] = set()

        def shape_only(layer: StoredLayer | StoredExperts, *values: torch.Tensor) -> torch.Tensor:
            called.add(layer.module)
            return layer.shape_only(*values)

        with self._replaced(shape_only):
            yield
        # A module that is not called may be there for its weight, such as a router's.
        for module in model.modules():
            if module in self.layers and module not in called:
                self.layers[module].show()

    @contextmanager
    def computing(self) -> Iterator[None]:
        """Let the model compute in float32, with a piece of a weight widened at a time.

        What is kept of a pass would lie between the pieces, whose memory went back to nobody.
        """
        with returned(), self._replaced(lambda layer, *values: layer.compute(*values)):
            yield

    @contextmanager
    def _replaced(self, compute: Callable[..., torch.Tensor]) -> Any:
        for module, layer in self._replaceable.items():
            module.forward = partial(compute, layer)
        try:
            yield
        finally:
            for module in self._replaceable:
                del module.forward


def _stand_ins(
    packed: Mapping[torch.nn.Module, PackedWeight],
) -> tuple[dict[int, PackedWeight], dict[torch.nn.Module, torch.Tensor]]:
    """Return weights by the address of what stands for them in a trace, and that for each module.

    All are in the same memory, which is never read and so takes none; they begin at different
    addresses.
    """
    distinct = {id(weight): weight for weight in packed.values()}
    places = {key: number * _STAND_IN // 2 for number, key in enumerate(distinct)}
    largest = max((prod(weight.shape) for weight in distinct.values()), default=0)
    memory = torch.empty(largest + len(distinct) * _STAND_IN // 2, dtype=torch.bfloat16)
    tensors = {
        key: memory[places[key] :][: prod(weight.shape)].view(weight.shape)
        for key, weight in distinct.items()
    }
    addresses = {tensors[key].data_ptr(): weight for key, weight in distinct.items()}
    parameters = {key: torch.nn.Parameter(t, requires_grad=False) for key, t in tensors.items()}
    return addresses, {module: parameters[id(weight)] for module, weight in packed.items()}


def _replace(constant: Any, weight: PackedWeight) -> None:
    """Have what uses a constant use a packed weight instead."""
    value = constant.output(0)
    uses = value.get_target_inputs()
    if len(uses) == 1 and next(iter(uses)).get_node().get_type_name() == "Convert":
        value = next(iter(uses)).get_node().output(0)
    for consumer in value.get_target_inputs():
        node = consumer.get_node()
        is_table = node.get_type_name() == "Gather"
        replacement = table_weight(weight) if is_table else product_weight(weight)
        consumer.replace_source_output(replacement)
        if weight.order is not None:
            node.input(0).replace_source_output(ordered_inputs(weight, node.input_value(0)))


def is_readable(module: torch.nn.Module) -> bool:
    """Return whether a module does just what its kind does."""
    for kind in _LAYERS:
        if isinstance(module, kind):
            is_scaled = kind is torch.nn.Embedding and hasattr(module, "embed_scale")
            return type(module).forward is kind.forward or is_scaled
    return False


def _widen(module: torch.nn.Module) -> None:
    for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False)):
        if tensor.is_floating_point():
            tensor.data = tensor.data.float()


def load(
    source: Path,
    *,
    loader: str = "AutoModelForCausalLM",
    attention: str | None = None,
    pickle: bool = False,
    trust_remote_code: bool = False,
) -> Any:
    """Return a model with its parameters as they are stored, and all else in float32.

    ``loader`` is the class of transformers that loads it, and ``attention`` how it attends.
    """
    makes = getattr(transformers, loader)
    dtype = _stored_type(source)
    model = makes.from_pretrained(
        source,
        dtype=dtype,
        attn_implementation=attention,
        use_safetensors=None if pickle else True,
        trust_remote_code=trust_remote_code,
        local_files_only=True,
    ).eval()
    if dtype is not torch.float32:
        _compute_buffers_again(model, source, makes, trust_remote_code=trust_remote_code)
    return model.requires_grad_(False)


def _stored_type(source: Path) -> torch.dtype:
    """Return the type that all weights are stored in, float32 if there is more than one."""
    types = set()
    for path in source.glob("*.safetensors"):
        with safe_open(path, "pt") as file:
            types |= {file.get_slice(name).get_dtype() for name in file.keys()}  # noqa: SIM118
    types &= _TYPES.keys()
    return _TYPES[types.pop()] if len(types) == 1 else torch.float32


def _compute_buffers_again(
    model: Any, source: Path, makes: Any, *, trust_remote_code: bool
) -> None:
    """Replace what the model has computed from its configuration, which was rounded with it."""
    rounded = {
        name
        for name, buffer in model.named_buffers()
        if buffer.is_floating_point() and buffer.dtype is not torch.float32
    }
    stored = set(model.state_dict())
    if not rounded - stored:
        return
    config = transformers.AutoConfig.from_pretrained(
        source, trust_remote_code=trust_remote_code, local_files_only=True
    )
    with without_parameters():
        exact = makes.from_config(config, dtype=torch.float32, trust_remote_code=trust_remote_code)
    for name, buffer in exact.named_buffers():
        if name in rounded - stored:
            model.get_buffer(name).data = buffer


@contextmanager
def without_parameters() -> Iterator[None]:
    """Have new modules without memory for their parameters; their buffers are computed."""
    register = torch.nn.Module.register_parameter

    def register_empty(module: Any, name: str, parameter: torch.nn.Parameter | None) -> None:
        register(module, name, parameter)
        if parameter is not None:
            empty = torch.empty_like(parameter, device="meta")
            module._parameters[name] = torch.nn.Parameter(empty, requires_grad=False)

    torch.nn.Module.register_parameter = register_empty  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        torch.nn.Module.register_parameter = register  # type: ignore[method-assign]
