"""Tokens that stand for a part of an image: a pass reads rows of embeddings in their place.

A converted model has the table of tokens inside. The rows are put behind those that a pass reads of
the table, and each of its tokens chooses one of all. A model of text alone stays as it is.

Some models are traced with more inputs (:mod:`llmserve_openvino.seen_inputs`), which each of their
passes is given. The tokens of an image may see each other (Gemma): attention over pages is told of
each token whether it stands for one.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any, Literal, NamedTuple, Protocol

import numpy as np

from llmserve.graphs import openvino as ov
from llmserve.plugin import IncompatibleError
from llmserve.runtime import Chunk, Embedded

ROWS, CHOSEN = "llmserve_embedded_rows", "llmserve_chosen_rows"
"""The inputs with the rows, and with which one of all each token has."""
SHIFTS, DEEPER = "llmserve_position_shifts", "llmserve_deeper_rows"
"""Those with how much further on each axis a token is than in a text, and with what the first
layers add to it, beside one another."""
AXES = 3
"""On how many axes the tokens of an image have a position."""
TYPES = "llmserve_token_types"
"""The input with which tokens see all that are beside one another and are of it too."""
_PLACE = ["llmserve", "rows"]
"""Where a model of OpenVINO has its :class:`RowTable`."""
_OPERATION, _WINDOW_INPUT, _TYPES_INPUT = "PagedAttentionExtension", 10, 25
_LEAST_AHEAD = (2026, 3)
"""Since which version of OpenVINO attention does what it is told of token types."""
# What may be between the tokens and their table, and the inputs with which it reads tokens.
_BETWEEN = {
    "Convert": (0,), "Reshape": (0,), "Squeeze": (0,), "Unsqueeze": (0,), "Select": (1, 2),
}  # fmt: skip
Ahead = Literal["all", "windows"]


class RowTable(NamedTuple):
    """The table in whose place a model reads rows that stand for an image."""

    module: str
    """Its name in the model, where layers may have tables of their own; else none."""
    is_scaled: bool
    """Whether what is read of it is multiplied by a number, and the rows are not."""
    ahead: Ahead | None
    """In which layers the tokens of an image see each other: in all, or those with a window."""


class Embeds(Protocol):
    """What makes the rows, such as :class:`llmserve.runtime.ImageTower`."""

    @property
    def form(self) -> str:
        """All that decides what they are and is not of the model's files."""

    def rows(self, part: Embedded) -> Any:
        """Return a row for each token that stands for a part, as a tensor of torch: its embedding,
        and after it what each of the first layers adds, if they add anything."""


def tell_rows(model: Any, table: RowTable | None) -> None:
    """Keep in a model of OpenVINO how it reads rows that stand for an image."""
    if table:
        model.set_rt_info(json.dumps(table), _PLACE)


def take_rows(model: Any) -> None:
    """Have a model whose tokens are in a flat row read embeddings in the place of some of them."""
    ops = ov.opset13
    # Models that were built before Gemma was read have no such facts, and need none.
    told = None
    if model.has_rt_info(_PLACE):
        told = RowTable(*json.loads(model.get_rt_info(_PLACE).astype(str)))
    found = {
        table.get_friendly_name(): table
        for table in _tables(model.input("input_ids"))
        if not (told and told.module) or f".{told.module}/" in table.get_friendly_name()
    }
    if len(found) != 1:
        raise IncompatibleError(
            f"the model reads its tokens from {len(found)} tables, and an image would have to be "
            "in all",
            hint="serve it with the plugin hf",
        )
    table = next(iter(found.values())).output(0)
    if told and told.is_scaled:
        # A tower makes its rows as large as those are then.
        table = _product(table)
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
    if told and told.ahead:
        model.add_parameters([_see_ahead(model, told.ahead)])
    model.validate_nodes_and_infer_types()


def _see_ahead(model: Any, ahead: Ahead) -> Any:
    """Return an input by which attention is told which tokens of an image see each other."""
    version = ov.get_version()
    if tuple(int(number) for number in version.split(".")[:2]) < _LEAST_AHEAD:
        raise IncompatibleError(
            "images are read with this model by OpenVINO 2026.3 or later, which has their tokens "
            f"see each other; this is {version.partition('-')[0]}",
            hint="install it, or build the model for text alone with --set max_images=0",
        )
    ops = ov.opset13
    types = ops.parameter([-1], ov.Type.i32, name=TYPES)
    types.output(0).get_tensor().set_names({TYPES})
    for operation in model.get_ops():
        if operation.get_type_name() != _OPERATION:
            continue
        window = operation.input_value(_WINDOW_INPUT).get_node()
        is_far = window.get_type_name() == "Constant" and not window.data.any()
        if ahead == "all" or not is_far:
            operation.input(_TYPES_INPUT).replace_source_output(types.output(0))
    return types


def _product(table: Any) -> Any:
    """Return what is read of a table, multiplied by a number."""
    while len(readers := table.get_target_inputs()) == 1:
        node = next(iter(readers)).get_node()
        if node.get_type_name() == "Multiply":
            return node.output(0)
        if node.get_type_name() != "Convert":
            break
        table = node.output(0)
    raise IncompatibleError(
        "the model does not multiply what it reads of its table by a number, as it was told",
        hint="build it again",
    )


def _tables(source: Any) -> Iterator[Any]:
    for reader in source.get_target_inputs():
        node = reader.get_node()
        kind = node.get_type_name()
        if kind == "Gather" and reader.get_index() == 1:
            yield node
        elif reader.get_index() in _BETWEEN.get(kind, ()):
            yield from _tables(node.output(0))


def input_widths(model: Any) -> dict[str, int]:
    """Return the inputs here that a compiled model has, and how long their last axes are; 1 where
    that depends on the pass."""
    ports = {port.any_name: port for port in model.inputs}
    names = (SHIFTS, DEEPER, ROWS, TYPES)
    axes = {name: ports[name].partial_shape[-1] for name in names if name in ports}
    return {name: axis.get_length() if axis.is_static else 1 for name, axis in axes.items()}


def row_inputs(
    embeds: Embeds | None, chunks: Sequence[Chunk], begins: Sequence[int], widths: Mapping[str, int]
) -> dict[str, Any]:
    """Return what a pass is given of those inputs here that it has, with ``widths``.

    A chunk's tokens are those from its ``begins`` up to the next one's: a single one may be given
    twice.
    """
    found: dict[str, Any] = {}
    if SHIFTS in widths:
        found[SHIFTS] = _shifts(chunks, begins)
    if TYPES in widths:
        found[TYPES] = _types(chunks, begins)
    rows = [*_rows(embeds, chunks, begins)] if embeds else []
    if DEEPER in widths:
        found[DEEPER] = np.zeros((begins[-1] if rows else 1, 1, widths[DEEPER]), np.float32)
    if ROWS in widths:
        count, width = begins[-1], widths[ROWS]
        chosen, embeddings = np.arange(count), [np.zeros((0, width), np.float32)]
        for tokens, each in rows:
            chosen[tokens] = np.arange(count, count + len(each))
            count += len(each)
            embeddings.append(each[:, :width])
            if DEEPER in widths:
                found[DEEPER][tokens, 0] = each[:, width:]
        found |= {ROWS: np.concatenate(embeddings), CHOSEN: chosen}
    return found


def _rows(
    embeds: Embeds, chunks: Sequence[Chunk], begins: Sequence[int]
) -> Iterator[tuple[slice, Any]]:
    """Yield which tokens of a pass stand for something, and the rows that they have."""
    for chunk, (begin, end) in zip(chunks, pairwise(begins), strict=True):
        for part, of_part, of_chunk in chunk.replaced():
            rows = embeds.rows(part)[of_part].float().numpy()
            is_twice = end - begin > len(chunk.ids)
            first, stop = (0, end - begin) if is_twice else (of_chunk.start, of_chunk.stop)
            yield slice(begin + first, begin + stop), rows


def _shifts(chunks: Sequence[Chunk], begins: Sequence[int]) -> Any:
    if not any(chunk.fewer or chunk.embedded for chunk in chunks):
        return np.zeros((AXES, 1, 1), np.int64)
    shifts = np.zeros((AXES, begins[-1], 1), np.int64)
    for chunk, (begin, end) in zip(chunks, pairwise(begins), strict=True):
        positions = chunk.positions()
        shift: Any = -chunk.fewer
        if positions is not None:
            shift = positions - np.arange(chunk.start, chunk.stop)
        shifts[:, begin:end, 0] = shift
    return shifts


def _types(chunks: Sequence[Chunk], begins: Sequence[int]) -> Any:
    """Return 1 for each token of a pass that sees those that follow it in its image; nothing if
    none does, for which attention does what it does without."""
    # A token that comes alone is the last of its image. It may be given twice, and the first of
    # them is not to see the second.
    seeing = [(c, begin) for c, begin in zip(chunks, begins, strict=False) if not c.single]
    if not any(chunk.wholes() for chunk, _ in seeing):
        return np.zeros(0, np.int32)
    types = np.zeros(begins[-1], np.int32)
    for chunk, begin in seeing:
        for part, _, of_chunk in chunk.replaced():
            if part.is_whole:
                types[begin + of_chunk.start : begin + of_chunk.stop] = 1
    return types
