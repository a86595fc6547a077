"""Compares a converted model with the original.

OpenVINO silently leaves out what it does not understand, such as an unusual mask.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from llmserve.graphs import StoredWeights
from llmserve.runtime.causal import off_by, pages_of, random_texts, scores
from llmserve_openvino.passes import PAGE_SIZE
from llmserve_openvino.runner import make_runner

_SCORED = 0.25
"""The share of a comparison after which only the model's own answers are left."""
LENGTHS = (96, 44, 13)
"""Of the texts that are compared."""
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
    exact = {
        "INFERENCE_PRECISION_HINT": "f32",
        "KV_CACHE_PRECISION": "f32",
        "DYNAMIC_QUANTIZATION_GROUP_SIZE": 0,
    }
    texts = random_texts(model.config, lengths)
    tell(0)
    tokens = pages_of(texts, PAGE_SIZE) * PAGE_SIZE
    runner = make_runner(converted.clone(), exact, cache_tokens=tokens, sequences=len(texts))
    found, worst = scores(runner, texts), 0.0
    tell(_SCORED)
    for count, (text, rows) in enumerate(zip(texts, found, strict=True), 1):
        with torch.inference_mode(), stored.computing():
            expected = model(input_ids=torch.tensor([text])).logits[0]
        worst = max(worst, off_by(rows, expected))
        tell(_SCORED + count / len(texts) * (1 - _SCORED))
    return worst


def window(config: Any) -> int | None:
    """Return how far back a model with limited attention looks, None for other models."""
    layer_types = getattr(config, "layer_types", None)
    if layer_types and not {"sliding_attention", "chunked_attention"} & {*layer_types}:
        return None
    sizes = (getattr(config, name, None) for name in _WINDOWS)
    return next((size for size in sizes if size and isinstance(size, int)), None)
