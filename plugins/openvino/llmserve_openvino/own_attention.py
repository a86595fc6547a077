"""Attention that a model computes itself, product by product, as the operation OpenVINO knows.

What a model does to the scores of a layer is measured once: beside the scores, the same is done to
scores that are all 0, 1 and 1000. It is served if it is what attention over pages can do, which is
to multiply by a number, to look back so far, and to prefer what is near by a slope for each head
(ALiBi). In a trace the products then stand for one operation.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from llmserve.graphs import openvino as ov
from llmserve.plugin import UnservedError

_PLACE = ["llmserve", "attention"]
"""Where a model of OpenVINO has what its attention is to be told."""
_OPERATION = "PagedAttentionExtension"
_WINDOW_INPUT, _SLOPES_INPUT = 10, 11
_MASKED = -1e6
_TRIALS = (0, 1, 1000)
"""Scores that are all alike; the last is beyond every cap that matters."""
_PRODUCTS = {"matmul", "bmm", "__matmul__", "baddbmm"}
_OTHER = "does more to its attention scores than OpenVINO can (such as a bias of its own)"


class Layer(NamedTuple):
    """What a layer does to its scores."""

    scale: float
    window: int
    """How many tokens it looks back on, 0 for all."""
    slopes: tuple[float, ...] = ()
    """How much less each head likes a token for each one that lies between; none without ALiBi."""


class _Scores(NamedTuple):
    """Scores of a layer, and what becomes of others."""

    query: Tensor
    keys: Tensor
    trials: tuple[Tensor, ...]
    is_shares: bool = False
    """Whether they add up to 1, and are to be multiplied by the values."""


class OwnAttention(TorchFunctionMode):
    """Follows the keys and values of a cache through a pass, and attends in the model's place.

    ``layers`` says what each does; without it, that is measured. ``window`` is how far the model
    looks back: its own mask is seen only in a longer text.
    """

    def __init__(self, mask: Tensor, layers: Sequence[Layer] = (), *, window: int = 0) -> None:
        super().__init__()
        if window >= mask.shape[1]:
            raise UnservedError(f"looks back on {window} tokens in a way of its own")
        self.layers = list(layers)
        self._is_measuring = not layers
        self._mask = mask
        self._count = 0
        # With the tensors themselves: the number of one that is gone is given again.
        self._cached: dict[int, tuple[Tensor, Tensor]] = {}
        self._scores: dict[int, tuple[Tensor, _Scores]] = {}

    def follow(self, *cached: Tensor) -> None:
        """Know keys or values when they are used."""
        for tensor in cached:
            self._cached[id(tensor)] = tensor, tensor

    def __torch_function__(
        self, func: Callable[..., Any], types: Any,
        args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None,
    ) -> Any:  # fmt: skip
        del types
        kwargs, name = kwargs or {}, getattr(func, "__name__", "")
        # Not sizes, which are tensors as well in a trace.
        operands = [each for each in (*args, *kwargs.values()) if _is_floating(each)]
        scores = next((self._scores[id(o)][1] for o in operands if id(o) in self._scores), None)
        cached = [self._cached[id(o)][1] for o in operands if id(o) in self._cached]
        if scores is not None and scores.is_shares and cached and name in _PRODUCTS:
            return self._attend(scores, cached[-1], operands[0])
        if name == "scaled_dot_product_attention" and cached and self._is_measuring:
            self._measure_mask(*args, **kwargs)
        result = func(*args, **kwargs)
        if not isinstance(result, Tensor) or not result.is_floating_point():
            return result
        if scores is None and cached and name in _PRODUCTS:
            scores = self._begin(name, result, operands, cached[-1], kwargs)
            self._scores[id(result)] = result, scores
        elif scores is not None:
            self._scores[id(result)] = result, self._after(scores, func, args, kwargs)
        elif len(operands) == 1 and cached:
            self._cached[id(result)] = result, cached[0]
        return result

    def _begin(
        self, name: str, result: Tensor, operands: Sequence[Tensor], keys: Tensor,
        kwargs: Mapping[str, Any],
    ) -> _Scores:  # fmt: skip
        trials: tuple[Tensor, ...] = ()
        if self._is_measuring:
            bias, factor = torch.zeros_like(result), 1.0
            if name == "baddbmm":
                bias = bias + operands[0] * kwargs.get("beta", 1)
                factor = kwargs.get("alpha", 1)
            trials = tuple(bias + number * factor for number in _TRIALS)
        return _Scores(operands[-2], keys, trials)

    def _after(
        self, scores: _Scores, func: Callable[..., Any], args: Sequence[Any],
        kwargs: Mapping[str, Any],
    ) -> _Scores:  # fmt: skip
        if scores.is_shares:
            return scores
        if func.__name__ == "softmax":
            if self._is_measuring:
                self.layers.append(_measured(scores.trials, scores.keys))
            return scores._replace(is_shares=True)

        def apply(trial: Tensor) -> Tensor:
            found: Tensor = func(
                *(trial if id(each) in self._scores else each for each in args),
                **{k: trial if id(v) in self._scores else v for k, v in kwargs.items()},
            )
            return found

        return scores._replace(trials=tuple(map(apply, scores.trials)))

    def _measure_mask(
        self, query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, **_: Any
    ) -> None:
        """Refuse a mask of OpenVINO's own operation that it would leave out."""
        del query, value
        if attn_mask is not None and attn_mask.is_floating_point():
            mask = attn_mask.expand(attn_mask.shape[0], -1, -1, key.shape[-2])
            slopes = _pattern(mask[0])[1]
            if slopes:
                raise UnservedError("has ALiBi in a mask of its own")

    def _attend(self, scores: _Scores, values: Tensor, shares: Tensor) -> Tensor:
        layer = self.layers[self._count]
        self._count += 1
        keys, query = scores.keys, scores.query
        heads = query.reshape(keys.shape[0], -1, query.shape[-2], query.shape[-1])
        count = heads.shape[1] // keys.shape[1]
        mask = layer_mask(layer, self._mask, heads.shape[2])
        output = functional.scaled_dot_product_attention(
            heads, repeated(keys, count), repeated(values, count), mask, scale=layer.scale
        )
        if shares.ndim == 3:
            output = output.reshape(-1, output.shape[2], output.shape[3])
        return output


def _is_floating(value: object) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()


def layer_mask(layer: Layer, mask: Tensor, count: Any) -> Tensor:
    """Return what is added to the scores of the last tokens, for texts of which a mask tells."""
    columns = torch.arange(mask.shape[1])
    back = columns[-count:, None] - columns[None]
    allowed = back >= 0
    if layer.window:
        allowed = allowed & (back < layer.window)
    allowed = allowed[None, None] & (mask[:, None, None] > 0)
    bias = torch.zeros(1, 1, 1, 1)
    if layer.slopes:
        bias = -torch.tensor(layer.slopes)[None, :, None, None] * back[None, None]
    return torch.where(allowed, bias, torch.finfo(torch.float32).min)


def repeated(tensor: Tensor, count: int) -> Tensor:
    """Return keys or values with each head as often as queries share it."""
    if count == 1:
        return tensor
    batch, heads, length, width = tensor.shape
    spread = tensor[:, :, None].expand(batch, heads, count, length, width)
    return spread.reshape(batch, heads * count, length, width)


def _measured(trials: Sequence[Tensor], keys: Tensor) -> Layer:
    """Return what has been done to scores; refuse what attention over pages cannot do."""
    length = keys.shape[2]
    zero, one, many = (each.reshape(keys.shape[0], -1, *each.shape[-2:])[0] for each in trials)
    if zero.shape[-2:] != (length, length):
        raise UnservedError(_OTHER)
    window, slopes = _pattern(zero)
    # Where nothing is added, no digit is lost.
    scores = one[:, -1] - zero[:, -1]
    place = torch.where(zero[:, -1] > _MASKED, zero[:, -1].abs(), torch.inf).argmin(dim=-1)
    rows = torch.arange(len(place))
    scales, largest = scores[rows, place], (many - zero)[:, -1][rows, place]
    scale = float(scales[0])
    is_linear = torch.allclose(largest, _TRIALS[-1] * scales, rtol=1e-3)
    if not torch.allclose(scales, scales[:1]) or not is_linear:
        raise UnservedError("caps its attention scores")
    return Layer(scale, window, slopes)


def _pattern(bias: Tensor) -> tuple[int, tuple[float, ...]]:
    """Return the window and the slopes that a bias of ``[heads, length, length]`` stands for."""
    length = bias.shape[-1]
    allowed, back = bias > _MASKED, torch.arange(length)[:, None] - torch.arange(length)[None]
    count = int(allowed[0, -1].sum())
    window = count if count < length else 0
    expected = (back >= 0) & (back < count)
    last = bias[:, -1]
    far = max(1, count - 1)
    slopes = (last[:, -1] - last[:, -1 - far]) / far if count > 1 else torch.zeros(len(bias))
    own = torch.diagonal(bias, dim1=-2, dim2=-1)[..., None]
    off = (bias - own + slopes[:, None, None] * back)[expected.expand(bias.shape)].abs().max()
    is_off = off > 1e-4 * (1 + bias[allowed].abs().max())
    if is_off or not torch.equal(allowed, expected.expand(bias.shape)):
        raise UnservedError(_OTHER)
    return window, tuple(slopes.tolist()) if slopes.abs().max() > 1e-6 else ()


def tell(model: Any, layers: Sequence[Layer]) -> None:
    """Keep in a model of OpenVINO what its attention over pages is to be told."""
    if any(layer.window or layer.slopes for layer in layers):
        model.set_rt_info(json.dumps([(each.window, each.slopes) for each in layers]), _PLACE)


def apply_told(model: Any) -> None:
    """Tell attention over pages what is kept in its model."""
    if not model.has_rt_info(_PLACE):
        return
    told = json.loads(model.get_rt_info(_PLACE).astype(str))
    operations = [each for each in model.get_ordered_ops() if each.get_type_name() == _OPERATION]
    for operation, (window, slopes) in zip(operations, told, strict=True):
        constant = ov.opset13.constant
        for place, value in (
            (_WINDOW_INPUT, np.int32(window)), (_SLOPES_INPUT, np.array(slopes, np.float32)),
        ):  # fmt: skip
            operation.input(place).replace_source_output(constant(value).output(0))
    model.validate_nodes_and_infer_types()
