"""How models read images: what a trace of some is given beside tokens and their positions.

The tokens of an image may have several positions, and the first layers may add rows of their own to
them. Both are inputs that are added, so a text alone is given a single zero that stands for all.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from llmserve.runtime import deep_layers, seeing_kind
from llmserve_openvino.embedded_rows import AXES, DEEPER, SHIFTS, Ahead, RowTable


class SeenInput(NamedTuple):
    name: str
    example: Tensor
    shape: Sequence[int]
    """Of the input of any pass."""


def seen_inputs(config: Any) -> list[SeenInput]:
    """Return what a model of a configuration is given; examples are of two texts of two tokens."""
    kind = seeing_kind(config.model_type)
    if kind is None or not kind.is_grid:
        return []
    found = [SeenInput(SHIFTS, torch.ones(AXES, 2, 2, dtype=torch.long), [AXES, -1, -1])]
    if layers := deep_layers(config):
        width = layers * config.get_text_config().hidden_size
        found.append(SeenInput(DEEPER, torch.ones(2, 2, width), [-1, -1, width]))
    return found


def row_table(model: Any) -> RowTable | None:
    """Return how a model reads rows in the place of tokens, if it reads images."""
    kind = seeing_kind(model.config.model_type)
    # One that transformers has among the models of text is converted as such.
    if kind is None or kind.is_causal:
        return None
    table = model.get_input_embeddings()
    name = next(name for name, each in model.named_modules() if each is table)
    return RowTable(
        module=name if kind.is_layered else "",
        is_scaled=type(table).forward is not torch.nn.Embedding.forward,
        ahead=sees_ahead(model.config),
    )


def sees_ahead(config: Any) -> Ahead | None:
    """Return in which layers the tokens of an image see each other, if in any."""
    kind = seeing_kind(config.model_type)
    if kind is not None and kind.is_whole:
        return "all"
    own = getattr(config.get_text_config(), "use_bidirectional_attention", None)
    return "windows" if kind is not None and own == "vision" else None


def shifted(positions: Tensor, given: Mapping[str, Tensor]) -> Tensor:
    """Return positions for each axis, if a model has several."""
    return positions[None] + given[SHIFTS] if SHIFTS in given else positions


@contextmanager
def deepened(model: Any, given: Mapping[str, Tensor]) -> Iterator[None]:
    """Let the first layers add the rows that they are given, if there are any.

    The model's own code names the tokens that get some, and a trace would have those of its
    example.
    """
    hooks = []
    if DEEPER in given:
        width = model.config.get_text_config().hidden_size
        # A comparison of parts has some of the layers, perhaps fewer than get rows.
        numbers = range(deep_layers(model.config))
        for at, layer in zip(numbers, model.get_decoder().layers, strict=False):
            rows = given[DEEPER][..., at * width : (at + 1) * width]
            hooks.append(layer.register_forward_hook(lambda _, __, out, rows=rows: out + rows))
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
