"""A request's bias on words, as the engine takes it: a number for each id of the vocabulary."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from llmserve.runtime.errors import RequestError
from llmserve.runtime.protocols import Tokenizer
from llmserve.runtime.stage import Tensors


def bias_of(
    given: Tensors, rows: int, vocab_size: int, tokenizer: Tokenizer
) -> npt.NDArray[np.float32]:
    """Return the bias of each row; without any it has no column."""
    words = given.get("EMBEDDING_BIAS_WORDS")
    weights = given.get("EMBEDDING_BIAS_WEIGHTS")
    if words is None and weights is None:
        return np.zeros((rows, 0), np.float32)
    if words is None or weights is None or words.shape != weights.shape:
        raise RequestError("embedding_bias_words and embedding_bias_weights have to be as many")
    bias = np.zeros((rows, vocab_size), np.float32)
    for row in range(rows):
        for word, weight in zip(words[row].tolist(), weights[row].tolist(), strict=True):
            for token in set(tokenizer.encode(_text(word), special=False)):
                bias[row, token] += weight
    return bias


def _text(word: Any) -> str:
    try:
        return word.decode() if isinstance(word, bytes) else str(word)
    except UnicodeDecodeError:
        raise RequestError("embedding_bias_words is not UTF-8") from None
