"""The formatters of models that answer with values: embeddings, scores, labels."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from llmserve.runtime.answer.params import Params
from llmserve.runtime.errors import RequestError, invalid_value
from llmserve.runtime.protocols import Answer

Array = npt.NDArray[Any]
_SMALLEST_LENGTH = 1e-12


class EmbeddingFormatter:
    """Fills ``embedding``, cut and of length 1 if the request or the model wants it."""

    def __init__(self, settings: Mapping[str, Any], folder: Path) -> None:
        del folder
        self._size: int | None = settings["size"]
        self._dimensions: int | None = settings["dimensions"] or None
        self._normalize: bool = settings["normalize"]

    def check(self, params: Params) -> None:
        if params.dimensions and self._size and params.dimensions > self._size:
            problem = f"must be at most {self._size}, the size of this model's embeddings"
            raise invalid_value("dimensions", f"{problem}, not {params.dimensions}")

    def format(self, answers: Sequence[Answer]) -> dict[str, Array]:
        vectors = [self._vector(answer) for answer in answers]
        if len({len(vector) for vector in vectors}) > 1:
            raise RequestError(
                "the texts of a request have embeddings of one size: send the same dimensions",
                code="invalid_value",
                param="dimensions",
            )
        return {"embedding": np.stack(vectors), **_counts(answers)}

    def _vector(self, answer: Answer) -> Array:
        params = answer.params or Params()
        vector = _value(answer)[: params.dimensions or self._dimensions]
        if self._normalize if params.normalize is None else params.normalize:
            vector = vector / max(float(np.linalg.norm(vector)), _SMALLEST_LENGTH)
        return np.asarray(vector, dtype=np.float32)


class ScoreFormatter:
    """Fills ``score``: of one logit itself or its sigmoid, of two the probability of the second."""

    def __init__(self, settings: Mapping[str, Any], folder: Path) -> None:
        del folder
        self._sigmoid: bool = settings["sigmoid"]

    def format(self, answers: Sequence[Answer]) -> dict[str, Array]:
        logits = np.stack([_value(answer) for answer in answers])
        if logits.shape[1] == 2:
            scores = _softmax(logits)[:, 1]
        else:
            scores = _sigmoid(logits[:, 0]) if self._sigmoid else logits[:, 0]
        return {"score": scores.astype(np.float32), **_counts(answers)}


class LabelFormatter:
    """Fills ``label`` and ``probability``: all labels of each text, the likeliest first."""

    def __init__(self, settings: Mapping[str, Any], folder: Path) -> None:
        del folder
        self.labels: list[str] = settings["labels"]
        self._labels = np.array([label.encode() for label in self.labels], dtype=np.object_)
        self._several: bool = settings["several"]

    def format(self, answers: Sequence[Answer]) -> dict[str, Array]:
        logits = np.stack([_value(answer) for answer in answers])
        probabilities = _sigmoid(logits) if self._several else _softmax(logits)
        order = np.argsort(-probabilities, axis=1, kind="stable")
        return {
            "label": self._labels[order],
            "probability": np.take_along_axis(probabilities, order, axis=1).astype(np.float32),
            **_counts(answers),
        }


def _value(answer: Answer) -> Array:
    if answer.value is None:
        raise RuntimeError("the generator ended an answer without a value")
    return answer.value


def _counts(answers: Sequence[Answer]) -> dict[str, Array]:
    counts = [answer.input_tokens for answer in answers]
    return {"num_input_tokens": np.array(counts, dtype=np.int32)}


def _sigmoid(logits: Array) -> Array:
    # Of either sign without an overflow.
    halves: Array = 0.5 * (1.0 + np.tanh(0.5 * logits.astype(np.float64)))
    return halves


def _softmax(logits: Array) -> Array:
    powers = np.exp(logits.astype(np.float64) - logits.max(axis=1, keepdims=True))
    shares: Array = powers / powers.sum(axis=1, keepdims=True)
    return shares
