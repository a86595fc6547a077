"""Scores that are the same, bit by bit, whatever else is in a pass: for which models, and a check.

A model computes row by row, but OpenVINO chooses how by the number of rows. So no pass has a single
row of a sequence, nor of a product (:mod:`llmserve_openvino.passes`). What it chooses otherwise
depends on the processor: a model is tried where it is served.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from llmserve.plugin import IncompatibleError
from llmserve.runtime import Chunk, Runner
from llmserve_openvino.passes import PAGE_SIZE
from llmserve_openvino.state_tables import has_states

PAGES = 3
"""How many pages a trial takes, from the first."""
_LENGTH = PAGE_SIZE + 4
_SCORED = 6
"""Of how many of the last tokens the scores are compared."""
_PIECES: Sequence[Sequence[int]] = ((30,), (13, 17), (29, 4), (30, 1, 5))
"""How the text may be divided; what is left comes token by token."""
_COMPANIES = (0, 1, 8, 31)
"""How many others there are in a pass."""
_HINT = "leave out exact_batches"


def check_config(config: Mapping[str, Any], options: Mapping[str, Any], name: str) -> None:
    """Refuse what no check would find in every case: before a long build."""
    reason, hint = "", _HINT
    if _has_experts(config):
        reason = "is a mixture of experts, each of which computes as many rows as are sent to it"
    elif options["kv_cache"] == "u8":
        reason = "would have its cache in 8 bits, where tokens share a scale"
        hint = f"leave out kv_cache, or {_HINT}"
    elif options["dynamic_quantization"] == 0 and options["dtype"] != "float32":
        reason = "would have dynamic_quantization=0, with which int8 and int4 differ in bfloat16"
        hint = f"leave out dynamic_quantization, choose dtype=float32, or {_HINT}"
    elif options["adapters"]:
        reason = "would have adapters, which are computed together with those of others"
    if reason:
        raise IncompatibleError(f"exact_batches cannot be had: {name} {reason}", hint=hint)


def _has_experts(config: Mapping[str, Any]) -> bool:
    return any(
        ("experts" in key and isinstance(value, int) and value > 1)
        or (isinstance(value, Mapping) and _has_experts(value))
        for key, value in config.items()
    )


def check_graph(model: Any) -> None:
    """Refuse a model whose passes cannot have rows more than there are tokens."""
    if has_states(model):
        raise IncompatibleError(
            "exact_batches cannot be had: the model keeps a state, which takes each token once",
            hint=_HINT,
        )


def check_runner(runner: Runner, vocabulary: int) -> None:
    """Compute a text in several ways, alone and beside others; refuse if any score differs."""
    rng = np.random.default_rng(0)
    text = rng.integers(vocabulary, size=_LENGTH).tolist()
    expected: Any = None
    for pieces, others in zip(_PIECES, _COMPANIES, strict=True):
        found = _scores(runner, text, pieces, others)
        if expected is None:
            expected = found
        elif not np.array_equal(found, expected):
            off = float(np.abs(found - expected).max())
            raise IncompatibleError(
                "exact_batches cannot be had: this processor computes the model's scores "
                f"differently in other company (by up to {off:.2g})",
                hint=_HINT,
            )


def _scores(runner: Runner, text: list[int], pieces: Sequence[int], others: int) -> Any:
    """Return the scores of the last tokens of a text; the others write to the third page."""
    other = Chunk(text[:1], 0, [PAGES - 1])
    rows: list[Any] = []
    for start, stop in _parts(pieces):
        own = Chunk(
            text[start:stop], start, [0, 1], max(0, min(stop - start, stop - _LENGTH + _SCORED))
        )
        chunks = sorted([own, *[other] * others], key=lambda each: not each.single)
        logits = runner.run(chunks)
        first = sum(each.rows for each in chunks[: chunks.index(own)])
        rows += [logits.row(first + row).copy() for row in range(own.rows)]
    return np.stack(rows)


def _parts(pieces: Sequence[int]) -> Iterator[tuple[int, int]]:
    start = 0
    for piece in [*pieces, *[1] * (_LENGTH - sum(pieces))]:
        yield start, start + piece
        start += piece
