"""Tokens that stand for a part of an image: a pass reads rows of embeddings in their place.

A converted model has the table of tokens inside. The rows are put behind those that a pass reads of
the table, and each of its tokens chooses one of all. A model of text alone stays as it is.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any, Protocol

import numpy as np

from llmserve.graphs import openvino as ov
from llmserve.plugin import IncompatibleError
from llmserve.runtime import Chunk, Embedded

ROWS, CHOSEN = "llmserve_embedded_rows", "llmserve_chosen_rows"
"""The inputs with the rows, and with which one of all each token has."""
# What may be between the tokens and their table.
_BETWEEN = {"Convert", "Reshape", "Squeeze", "Unsqueeze"}


class Embeds(Protocol):
    """What makes the rows, such as :class:`llmserve.runtime.ImageTower`."""

    @property
    def form(self) -> str:
        """All that decides what they are and is not of the model's files."""

    def rows(self, part: Embedded) -> Any:
        """Return a row for each token that stands for a part, as a tensor of torch."""


def take_rows(model: Any) -> None:
    """Have a model whose tokens are in a flat row read embeddings in the place of some of them."""
    ops = ov.opset13
    found = {table.get_friendly_name(): table for table in _tables(model.input("input_ids"))}
    if len(found) != 1:
        raise IncompatibleError(
            f"the model reads its tokens from {len(found)} tables, and an image would have to be "
            "in all",
            hint="serve it with the plugin hf",
        )
    table = next(iter(found.values())).output(0)
    readers = table.get_target_inputs()
    width = table.get_partial_shape()[-1].get_length()
    rows = ops.parameter([-1, width], ov.Type.f32, name=ROWS)
    chosen = ops.parameter([-1], ov.Type.i64, name=CHOSEN)
    for parameter, name in ((rows, ROWS), (chosen, CHOSEN)):
        parameter.output(0).get_tensor().set_names({name})
    flat = ops.reshape(table, ops.constant(np.array([-1, width])), special_zero=False)
    given = ops.convert(rows, table.get_element_type().to_string())
    both = ops.gather(ops.concat([flat, given], 0), chosen, ops.constant(np.int64(0)))
    shaped = ops.reshape(both, ops.shape_of(table), special_zero=False).output(0)
    for reader in readers:
        reader.replace_source_output(shaped)
    model.add_parameters([rows, chosen])
    model.validate_nodes_and_infer_types()


def _tables(source: Any) -> Iterator[Any]:
    for reader in source.get_target_inputs():
        node = reader.get_node()
        kind = node.get_type_name()
        if kind == "Gather" and reader.get_index() == 1:
            yield node
        elif kind in _BETWEEN and reader.get_index() == 0:
            yield from _tables(node.output(0))


def row_inputs(
    embeds: Embeds, chunks: Sequence[Chunk], begins: Sequence[int], width: int
) -> dict[str, Any]:
    """Return the rows of a pass and which row each token has; a chunk's tokens are those from its
    ``begins`` up to the next one's."""
    count = begins[-1]
    chosen, rows = np.arange(count), [np.zeros((0, width), np.float32)]
    for chunk, (begin, end) in zip(chunks, pairwise(begins), strict=True):
        for part, of_part, of_chunk in chunk.replaced():
            found = embeds.rows(part)[of_part].float().numpy()
            # A single token may be given twice.
            tokens = of_chunk if end - begin == len(chunk.ids) else slice(None)
            chosen[begin:end][tokens] = np.arange(count, count + len(found))
            rows.append(found)
            count += len(found)
    return {ROWS: np.concatenate(rows), CHOSEN: chosen}
