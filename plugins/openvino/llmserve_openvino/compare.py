"""Compares a converted model with the original.

OpenVINO silently leaves out what it does not understand, such as an unusual mask. A large model is
compared in parts of a few layers each, so that OpenVINO's copies of the weights take the memory of
a part.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from llmserve.runtime import Chunk
from llmserve_openvino.runner import PAGE_SIZE, OpenVinoRunner
from llmserve_openvino.stored import StoredWeights

# How far below the likeliest token the compared ones are at most.
_RANGE = 12
# What the weights of one comparison may take in float32, of which OpenVINO makes two copies.
_PART = 300 << 20
# As many tokens as are enough for a part.
_TOKENS = 4096
_SCORED = 0.25
"""The share of a comparison after which only the model's own answers are left."""
LENGTHS = (96, 44, 13)
"""Of the texts that are compared."""


def parts(model: Any, stored: StoredWeights, limit: int = _PART) -> Iterator[float]:
    """Make the model one of a few of its layers and tokens after the other; none if it is small.

    With each comes the share of layers up to it. A model whose layers cannot be told stays whole.
    """
    layers = None if stored.bytes_in_float32(model) <= limit else _layers_of(model)
    if layers is None:
        return
    ends = [layer for layer in stored.layers.values() if layer.module in _ends_of(model)]
    whole = [(layer, layer.weight, layer.bias) for layer in ends]
    for layer in ends:
        layer.keep_rows(_TOKENS)
    try:
        for first, last in _ranges([stored.bytes_in_float32(layer) for layer in layers], limit):
            with _only(model, layers, first, last):
                yield last / len(layers)
    finally:
        for layer, layer.weight, layer.bias in whole:
            layer.hide()


def _layers_of(model: Any) -> torch.nn.ModuleList | None:
    count = getattr(model.config.get_text_config(), "num_hidden_layers", None)
    lists = (module for module in model.modules() if isinstance(module, torch.nn.ModuleList))
    found = [each for each in lists if len(each) == count]
    return found[0] if len(found) == 1 else None


def _ends_of(model: Any) -> set[torch.nn.Module]:
    return {model.get_input_embeddings(), model.get_output_embeddings()} - {None}


def _ranges(sizes: list[int], limit: int) -> Iterator[tuple[int, int]]:
    """Return ranges of layers, each as long as may be."""
    first = 0
    for index in range(1, len(sizes) + 1):
        if index == len(sizes) or sum(sizes[first : index + 1]) > limit:
            yield first, index
            first = index


@contextmanager
def _only(model: Any, layers: torch.nn.ModuleList, first: int, last: int) -> Iterator[None]:
    """Let a model have these layers alone, which are counted from 0 then, as the cache is."""
    config = model.config.get_text_config()
    facts = vars(config)
    kept = {name: value for name, value in facts.items() if _is_by_layer(value, len(layers))}
    changed = {name: value[first:last] for name, value in kept.items()}
    kept["num_hidden_layers"], changed["num_hidden_layers"] = len(layers), last - first
    chosen = torch.nn.ModuleList(list(layers)[first:last])
    owner, attribute = next(
        (module, name)
        for module in model.modules()
        for name, child in module.named_children()
        if child is layers
    )
    counted: list[Any] = [m for layer in chosen for m in layer.modules() if hasattr(m, "layer_idx")]
    setattr(owner, attribute, chosen)
    for module in counted:
        module.layer_idx -= first
    for name, value in changed.items():
        setattr(config, name, value)
    try:
        yield
    finally:
        setattr(owner, attribute, layers)
        for module in counted:
            module.layer_idx += first
        for name, value in kept.items():
            setattr(config, name, value)


def _is_by_layer(value: object, count: int) -> bool:
    return isinstance(value, list) and len(value) == count


def difference(
    model: Any,
    stored: StoredWeights,
    converted: Any,
    tell: Callable[[float], None] = lambda _: None,
    lengths: Sequence[int] = LENGTHS,
) -> float:
    """Return by how much log-probabilities of the converted model differ from the model's own.

    Texts of several lengths are computed together, each in pieces. It tells the share of the
    comparison that is done.
    """
    exact = {
        "INFERENCE_PRECISION_HINT": "f32",
        "KV_CACHE_PRECISION": "f32",
        "DYNAMIC_QUANTIZATION_GROUP_SIZE": 0,
    }
    text_config = model.config.get_text_config()
    context = getattr(text_config, "max_position_embeddings", None) or max(lengths)
    vocabulary = min(text_config.vocab_size, _TOKENS)
    rng = np.random.default_rng(0)
    texts = [rng.integers(vocabulary, size=min(n, context)).tolist() for n in lengths]
    pages = sum(-(-len(text) // PAGE_SIZE) for text in texts)
    tell(0)
    runner = OpenVinoRunner(converted.clone(), exact, cache_tokens=pages * PAGE_SIZE)
    found, worst = _scores(runner, texts), 0.0
    tell(_SCORED)
    for count, (text, rows) in enumerate(zip(texts, found, strict=True), 1):
        with torch.inference_mode(), stored.computing():
            expected = model(input_ids=torch.tensor([text])).logits[0].float().log_softmax(-1)
        # Of the likeliest tokens: a product's last digits are large where a score is far below.
        likely = expected >= expected.max(dim=-1, keepdim=True).values - _RANGE
        own = torch.tensor(rows).log_softmax(-1)
        # A number that is none is no small difference.
        worst = max(worst, float((own - expected)[likely].abs().nan_to_num(torch.inf).max()))
        tell(_SCORED + count / len(texts) * (1 - _SCORED))
    return worst


def _scores(runner: OpenVinoRunner, texts: Sequence[list[int]]) -> list[Any]:
    """Compute texts together: in pieces of prompts, then single tokens, in pages not in order."""
    pages, rows = _pages(texts), [[] for _ in texts]  # type: tuple[list[list[int]], list[list[Any]]]
    pieces = [_pieces(len(text)) for text in texts]
    while any(pieces):
        chunks = []
        for number, (text, left) in enumerate(zip(texts, pieces, strict=True)):
            if left:
                start, stop = left.pop(0)
                owned = pages[number][: -(-stop // PAGE_SIZE)]
                chunks.append((number, Chunk(text[start:stop], start, owned, stop - start)))
        # The engine passes single tokens first.
        chunks.sort(key=lambda each: not each[1].single)
        logits, row = runner.run([chunk for _, chunk in chunks]), 0
        for number, chunk in chunks:
            for _ in chunk.ids:
                rows[number].append(logits.row(row).copy())
                row += 1
    return [np.stack(each) for each in rows]


def _pages(texts: Sequence[Sequence[int]]) -> list[list[int]]:
    """Return pages for each text, dealt out from the last to the first."""
    counts = [-(-len(text) // PAGE_SIZE) for text in texts]
    free = list(range(sum(counts)))
    return [[free.pop(0 if page % 2 else -1) for page in range(count)] for count in counts]


def _pieces(length: int) -> list[tuple[int, int]]:
    """Return two pieces of a text, then its last tokens one by one."""
    singles = range(max(1, length - 6), length)
    starts = sorted({0, max(1, singles[0] // 2), *singles, length})
    return list(itertools.pairwise(starts))


def window(config: Any) -> int | None:
    """Return how far back a model with limited attention looks, None for other models."""
    layer_types = getattr(config, "layer_types", None)
    if layer_types and not {"sliding_attention", "chunked_attention"} & {*layer_types}:
        return None
    size = getattr(config, "sliding_window", None) or getattr(config, "attention_chunk_size", None)
    return size if isinstance(size, int) else None
