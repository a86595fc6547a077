"""Compares a converted model with the original.

OpenVINO silently leaves out what it does not understand, such as an unusual mask.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from llmserve.graphs import StoredWeights
from llmserve.runtime import Chunk, Embedded, ImageTower, deep_layers, seeing_kind
from llmserve.runtime.causal import off_by, pages_of, random_texts, scores
from llmserve_openvino.passes import PAGE_SIZE
from llmserve_openvino.runner import make_runner
from llmserve_openvino.seen_inputs import sees_ahead

_SCORED = 0.25
"""The share of a comparison after which only the model's own answers are left."""
LENGTHS = (96, 44, 13)
"""Of the texts that are compared."""
_SEEN = slice(3, 8)
"""Which tokens of the last of the texts stand for something else, where a model reads images."""
_PLACES = ((0, 0, 0, 0, 0), (0, 0, 0, 9, 9), (0, 9, 18, 0, 9))
"""Where those are, of a model whose tokens of an image have several positions: so far from one
another that it shows."""
_EXACT = {
    "INFERENCE_PRECISION_HINT": "f32",
    "KV_CACHE_PRECISION": "f32",
    "DYNAMIC_QUANTIZATION_GROUP_SIZE": 0,
}
_WINDOWS = ("sliding_window", "attention_chunk_size", "window_size")


def difference(
    model: Any,
    stored: StoredWeights,
    converted: Any,
    tell: Callable[[float], None] = lambda _: None,
    lengths: Sequence[int] = LENGTHS,
) -> float:
    """Return by how much log-probabilities of the converted model differ from the model's own.

    It tells the share of the comparison that is done.
    """
    texts = random_texts(model.config, lengths)
    tell(0)
    tokens = pages_of(texts, PAGE_SIZE) * PAGE_SIZE
    runner = make_runner(converted.clone(), _EXACT, cache_tokens=tokens, sequences=len(texts))
    found, worst = scores(runner, texts), 0.0
    tell(_SCORED)
    for count, (text, rows) in enumerate(zip(texts, found, strict=True), 1):
        with torch.inference_mode(), stored.computing():
            expected = model(input_ids=torch.tensor([text])).logits[0]
        worst = max(worst, off_by(rows, expected))
        tell(_SCORED + count / len(texts) * (1 - _SCORED))
    return worst


def seen_difference(model: Any, stored: StoredWeights, converted: Any) -> float:
    """Return the same of a text some of whose tokens stand for an image."""
    text = random_texts(model.config, LENGTHS[-1:])[0]
    kind, tower = seeing_kind(model.config.model_type), ImageTower(model)
    ids, count = torch.tensor([text]), _SEEN.stop - _SEEN.start
    with torch.inference_mode(), stored.computing():
        # As large as those of tokens are.
        rows = model.get_input_embeddings()(ids)[0, :count] * 1.5
        levels = [rows.roll(level + 1, 0) for level in range(1 + deep_layers(model.config))]
        places = np.array(_PLACES) if kind and kind.is_grid else None
        ahead = sees_ahead(model.config)
        embedded = Embedded(
            _SEEN.start,
            count,
            b"",
            None,
            is_whole=ahead is not None,
            positions=places,
            in_windows=ahead == "windows",
        )
        tower.keep(embedded, torch.cat(levels, dim=-1))
        chunk = Chunk(text, 0, [0], len(text), embedded=[embedded])
        inputs = tower.inputs([chunk], ids)
        if (positions := chunk.positions()) is not None:
            inputs["position_ids"] = torch.from_numpy(positions)[:, None]
        if ahead:
            # Gemma 3 calls it otherwise than Gemma 4.
            name = "token_type_ids" if ahead == "all" else "mm_token_type_ids"
            inputs[name] = torch.zeros_like(ids)
            inputs[name][0, _SEEN] = 1
        expected = model(**inputs).logits[0]
    runner = make_runner(converted.clone(), _EXACT, cache_tokens=PAGE_SIZE, embeds=tower)
    logits = runner.run([chunk])
    return off_by(np.stack([logits.row(row) for row in range(len(text))]), expected)


def window(config: Any) -> int | None:
    """Return how far back a model with limited attention looks, None for other models."""
    layer_types = getattr(config, "layer_types", None)
    if layer_types and not {"sliding_attention", "chunked_attention"} & {*layer_types}:
        return None
    sizes = (getattr(config, name, None) for name in _WINDOWS)
    return next((size for size in sizes if size and isinstance(size, int)), None)
