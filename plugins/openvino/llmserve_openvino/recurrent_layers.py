"""Layers that keep a state for each sequence, as the operations that OpenVINO has for them.

transformers computes a convolution over the last tokens, a gated delta rule and a selective scan in
functions that models of all families have under the same names. In a trace each stands for one
operation over a flat row of tokens, which reads and writes the states of its sequences in a table.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any, cast

import torch
from openvino.frontend.pytorch import ConversionExtension
from torch import Tensor
from torch.nn import functional
from transformers.activations import ACT2FN

from llmserve.plugin import UnservedError
from llmserve_openvino.workarounds import internal_operation

STATE = "has layers that keep a state (linear attention, a convolution or a recurrence)"
_KINDS = ("layer_types", "layers_block_type")
_WITH_STATE = {"linear_attention", "conv", "mamba", "hybrid", "recurrent"}
RECURRENT = ("xlstm",)
"""Those whose layers have no kinds, and a recurrence that OpenVINO has no operation for."""
_SPACE = "llmserve_states"
_ROWS = "Tensor begins, Tensor rows, Tensor row_begins, Tensor past, Tensor interval"
_NORM = {"use_qk_l2norm": "true", "q_l2_norm_eps": "1e-6", "k_l2_norm_eps": "1e-6"}


def keeps_states(config: Any) -> bool:
    """Whether a model says of some of its layers that they keep a state."""
    kinds = {str(each) for name in _KINDS for each in getattr(config, name, None) or ()}
    return config.model_type in RECURRENT or bool(kinds & _WITH_STATE)


class Recurrence:
    """The recurrent layers of one pass.

    ``tables`` has the states of each, in the order in which they are computed, and ``rows`` says
    which are whose; there are none in a pass that finds the shapes.
    """

    def __init__(self, tables: Sequence[Tensor] = (), rows: Sequence[Tensor] = ()) -> None:
        self._tables = tables
        self._rows = rows or [torch.zeros(1, dtype=torch.int32)] * 5
        self.shapes: list[tuple[int, ...]] = []
        """Of the state of a sequence, for each table."""
        self._is_convolution_due = self._is_scanned = False

    def expect_convolution(self) -> None:
        """Know that what comes next is a convolution; refuse a model of which it is not."""
        self.check()
        self._is_convolution_due = True

    def check_scanned(self) -> None:
        """Refuse a model whose state came from something else."""
        if not self._is_scanned:
            raise UnservedError(STATE)
        self._is_scanned = False

    def check(self) -> None:
        """Refuse a model of which a state is used otherwise."""
        if self._is_convolution_due:
            raise UnservedError(STATE)

    @contextmanager
    def replacing(self, model: torch.nn.Module) -> Iterator[None]:
        """Have a model's functions compute here."""
        _define()
        own: dict[str, Callable[..., Any]] = {
            "causal_conv1d_fn": self._convolve,
            "torch_chunk_gated_delta_rule": self._delta_rule,
            "mamba2_chunk_scan": self._scan,
            "mamba_selective_scan": self._scan_by_channel,
            # No token is one to be left out.
            "apply_mask_to_padding_states": lambda hidden, *_: hidden,
        }
        modules = {sys.modules[type(each).__module__] for each in model.modules()}
        before = [(m, name, vars(m)[name]) for m in modules for name in own if name in vars(m)]
        for module, name, _ in before:
            setattr(module, name, own[name])
        try:
            yield
        finally:
            for module, name, function in before:
                setattr(module, name, function)
        self.check()

    def _table(self, *shape: int) -> Tensor:
        number = len(self.shapes)
        self.shapes.append(shape)
        return self._tables[number] if self._tables else torch.zeros(1, *shape)

    def _convolve(
        self, hidden_states: Tensor, weight: Tensor, bias: Tensor | None = None,
        activation: str | None = None, **_: Any,
    ) -> Tensor:  # fmt: skip
        self._is_convolution_due = False
        width, length = map(int, weight.shape)
        rows = hidden_states.transpose(1, 2)
        found: Tensor = torch.ops.llmserve_states.convolve(
            rows.reshape(-1, width),
            self._table(width, length),
            weight.float().reshape(width, 1, length),
            torch.zeros(width) if bias is None else bias.float(),
            *self._rows,
        )
        found = found.reshape(rows.shape).transpose(1, 2)
        return found if activation is None else cast(Tensor, ACT2FN[activation](found))

    def _delta_rule(
        self, query: Tensor, key: Tensor, value: Tensor, g: Tensor, beta: Tensor,
        use_qk_l2norm_in_kernel: bool = False, **_: Any,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        self._is_scanned = True
        keys, heads = map(int, key.shape[2:]), map(int, value.shape[2:])
        (key_heads, key_width), (value_heads, value_width) = keys, heads
        found = torch.ops.llmserve_states.delta_rule(
            query.reshape(-1, key_heads, key_width),
            key.reshape(-1, key_heads, key_width),
            value.reshape(-1, value_heads, value_width),
            self._table(value_heads, value_width, key_width),
            g.reshape(-1, value_heads),
            beta.reshape(-1, value_heads),
            *self._rows,
            use_qk_l2norm_in_kernel,
        )
        return found.reshape(value.shape), _in_table()

    def _scan(
        self, hidden_states: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor,
        D: Tensor | None = None, z: Tensor | None = None, dt_bias: Tensor | None = None,
        dt_softplus: bool = False, dt_limit: tuple[float, float] = (0.0, torch.inf),
        return_final_states: bool = False, **_: Any,
    ) -> Any:  # fmt: skip
        self._is_scanned = True
        heads, width = map(int, hidden_states.shape[2:])
        groups, size = map(int, B.shape[2:])
        dt = dt if dt_bias is None else dt + dt_bias
        dt = _softplus(dt) if dt_softplus else dt
        low, high = dt_limit
        dt = dt.clamp(min=low) if high == torch.inf else dt.clamp(low, high)
        found = torch.ops.llmserve_states.scan(
            A.reshape(heads),
            dt.reshape(-1, heads),
            B.reshape(-1, groups, size),
            hidden_states.reshape(-1, heads, width),
            C.reshape(-1, groups, size),
            self._table(heads, width, size),
            *self._rows,
        )
        found = found.reshape(hidden_states.shape)
        found = found if D is None else found + hidden_states * D[:, None]
        found = found if z is None else found * functional.silu(z)
        return (found, _in_table()) if return_final_states else found

    def _scan_by_channel(
        self, hidden_states: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor,
        D: Tensor | None = None, z: Tensor | None = None, delta_bias: Tensor | None = None,
        delta_softplus: bool = False, return_last_state: bool = False, **_: Any,
    ) -> Any:  # fmt: skip
        """Scan where each channel fades at its own rate in each place of its state: a head each."""
        self._is_scanned = True
        width, size = map(int, A.shape)
        dt = dt if delta_bias is None else dt + delta_bias[:, None]
        dt = _softplus(dt) if delta_softplus else dt
        heads = size * width

        def in_each_place(values: Tensor) -> Tensor:
            return values.transpose(1, 2).reshape(-1, 1, width).expand(-1, size, -1)

        found = torch.ops.llmserve_states.scan(
            A.transpose(0, 1).reshape(heads),
            in_each_place(dt).reshape(-1, heads),
            B.transpose(1, 2).reshape(-1, size, 1),
            in_each_place(hidden_states).reshape(-1, heads, 1),
            C.transpose(1, 2).reshape(-1, size, 1),
            self._table(heads, 1, 1),
            *self._rows,
        )
        found = found.reshape(-1, size, width).sum(dim=1)
        found = found.reshape(hidden_states.transpose(1, 2).shape).transpose(1, 2)
        found = found if D is None else found + hidden_states * D[:, None]
        found = found if z is None else found * functional.silu(z)
        return (found, _in_table()) if return_last_state else found


def _softplus(values: Tensor) -> Tensor:
    """Return ``log(1 + exp(values))``: OpenVINO's own has few digits of what is close to 0."""
    small = values.exp()
    return torch.where(values < -5, small * (1 - small / 2), functional.softplus(values))


def _in_table() -> Tensor:
    """Return what stands for a state that an operation has put into its table."""
    return torch.zeros(1)


@cache
def _define() -> Any:
    """Define the operations that a trace has in place of functions; they have shapes alone."""
    make: Any = torch.library.Library
    library = make(_SPACE, "DEF")
    like = {
        f"convolve(Tensor values, Tensor table, Tensor weight, Tensor bias, {_ROWS})": 0,
        f"delta_rule(Tensor query, Tensor key, Tensor value, Tensor table, Tensor gate, "
        f"Tensor beta, {_ROWS}, bool norm)": 2,
        f"scan(Tensor A, Tensor dt, Tensor B, Tensor values, Tensor C, Tensor table, {_ROWS})": 3,
    }
    for schema, place in like.items():
        name = library.define(f"{schema} -> Tensor")
        library.impl(name, _shaped_like(place), "CPU")
    return library


def _shaped_like(place: int) -> Callable[..., Tensor]:
    return lambda *values: torch.full_like(values[place], 0.5)


def state_extensions() -> list[ConversionExtension]:
    """Return how OpenVINO is to read the operations."""
    return [
        ConversionExtension(f"{_SPACE}::convolve", _convolution),
        ConversionExtension(f"{_SPACE}::delta_rule", _gated_delta_rule),
        ConversionExtension(f"{_SPACE}::scan", _selective_scan),
    ]


def _convolution(context: Any) -> list[Any]:
    inputs = [context.get_input(place) for place in range(9)]
    return internal_operation("PagedCausalConv1D", inputs, like=0)


def _gated_delta_rule(context: Any) -> list[Any]:
    inputs = [context.get_input(place) for place in range(11)]
    norm = _NORM if context.get_values_from_const_input(11) else {}
    return internal_operation("PagedGatedDeltaNet", inputs, like=2, **norm)


def _selective_scan(context: Any) -> list[Any]:
    inputs = [context.get_input(place) for place in range(11)]
    return internal_operation("PagedSelectiveSSM", inputs, like=3)
