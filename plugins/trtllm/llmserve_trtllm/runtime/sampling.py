"""How an answer is to be made, in the names, types and tensors of the engine."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from llmserve.runtime import Params, RequestError, Tokenizer

_SECOND_NAMES = {"random_seed": "seed", "min_length": "min_tokens"}
_TYPES: dict[str, Any] = {
    "INT32": np.int32,
    "UINT32": np.uint32,
    "UINT64": np.uint64,
    "FP32": np.float32,
    "BOOL": np.bool_,
    "STRING": np.object_,
}
_INT32 = 2**31 - 1


def numpy_type(kind: str) -> Any:
    """Return numpy's name for one of Triton's types."""
    return _TYPES[kind]


class SamplingValues:
    """Turns what a request asks for into values for the engine.

    ``kinds`` are the tensors that the engine of the version has, with their types. Everything is
    always sent, for Triton batches only requests that have the same inputs, and the engine's own
    defaults are not those of every version: its seed, for one, is always the same.

    >>> SamplingValues({"temperature": "FP32", "top_k": "INT32"}).values(Params(temperature=0.5))
    {'temperature': 0.5, 'top_k': 0}
    """

    def __init__(self, kinds: Mapping[str, str], *, max_beam_width: int = 1) -> None:
        self.kinds = dict(kinds)
        self._beams = max_beam_width
        self._has = {_SECOND_NAMES.get(name, name) for name in kinds}

    def values(self, params: Params, *, end_id: int = -1, pad_id: int = 0) -> dict[str, Any]:
        """Return a value for each tensor that the engine has; refuse what it cannot do."""
        self._refuse_unknown(params)
        greedy = params.effective_temperature == 0 or params.top_k == 1
        known = {
            "end_id": end_id,
            "pad_id": pad_id,
            # A temperature of 0 divides by nothing in some versions.
            "temperature": 1.0 if greedy else params.effective_temperature,
            "top_k": 1 if greedy else max(params.top_k, 0),
            "top_p": 1.0 if greedy else params.top_p,
            "repetition_penalty": params.repetition_penalty,
            "presence_penalty": params.presence_penalty,
            "frequency_penalty": params.frequency_penalty,
            "min_tokens": params.min_tokens,
            "seed": secrets.randbits(64) if params.seed is None else params.seed,
            "beam_width": int(number("beam_width", params, 1, 1, self._beams)),
            "length_penalty": number("length_penalty", params, 0.0, -100, 100),
        }
        return {name: known[_SECOND_NAMES.get(name, name)] for name in self.kinds}

    def arrays(self, rows: list[dict[str, Any]]) -> dict[str, Any]:
        """Return the values of several prompts as tensors of one value a row."""
        return {
            name: np.array([[row[name]] for row in rows], numpy_type(kind))
            for name, kind in self.kinds.items()
        }

    def _refuse_unknown(self, params: Params) -> None:
        plain = Params()
        for name in ("frequency_penalty", "presence_penalty", "min_tokens"):
            if name not in self._has and getattr(params, name) != getattr(plain, name):
                raise RequestError(f"this engine's version of TensorRT-LLM has no {name}")
        if params.top_k > 1024:
            raise RequestError(f"top_k must be at most 1024, not {params.top_k}")


def number(name: str, params: Params, default: float, low: float, high: float) -> float:
    """Return a number that the core does not read, or refuse it."""
    value = params.extra.get(name, default)
    fits = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not fits or not low <= value <= high:
        raise RequestError(f"{name} must be from {low:g} to {high:g}, not {value!r}")
    if isinstance(default, int) and value != int(value):
        raise RequestError(f"{name} takes a whole number, not {value!r}")
    return float(value)


def pad_of(params: Params, default: int) -> int:
    """Return the id that fills up what is shorter than its neighbours."""
    return int(number("pad_id", params, default, 0, _INT32))


def word_ids(words: Sequence[str], tokenizer: Tokenizer) -> list[list[int]]:
    """Return the ids of words, each as it looks at the beginning of a text and after a space.

    Without special tokens: a BOS in the middle is what no text has, so such a word never came.
    """
    forms = [form for word in words for form in (word, f" {word}")]
    found = [tuple(tokenizer.encode(form, special=False)) for form in forms]
    return [list(ids) for ids in dict.fromkeys(found) if ids]


def word_tensor(rows: Sequence[Sequence[Sequence[int]]]) -> npt.NDArray[np.int32]:
    """Return words as the backend reads them: all ids of a row, and below them where each ends.

    >>> word_tensor([[[5, 6], [7]], []]).tolist()
    [[[5, 6, 7], [2, 3, -1]], [[0, 0, 0], [-1, -1, -1]]]
    """
    flat = [[token for word in row for token in word] for row in rows]
    width = max((len(ids) for ids in flat), default=0)
    tensor = np.zeros((len(rows), 2, width), np.int32)
    tensor[:, 1] = -1
    for index, (row, ids) in enumerate(zip(rows, flat, strict=True)):
        tensor[index, 0, : len(ids)] = ids
        tensor[index, 1, : len(row)] = np.cumsum([len(word) for word in row])
    return tensor


def words_of(tensor: npt.NDArray[np.int32]) -> list[list[int]]:
    """Read one row of such a tensor.

    >>> words_of(word_tensor([[[5, 6], [7]]])[0])
    [[5, 6], [7]]
    """
    ends = [int(end) for end in tensor[1] if end > 0]
    return [tensor[0, a:b].tolist() for a, b in zip([0, *ends], ends, strict=False)]


def bias_of(
    words: Any, weights: Any, rows: int, vocab_size: int, tokenizer: Tokenizer
) -> npt.NDArray[np.float32]:
    """Return a number for each id of the vocabulary and each row; without words no column."""
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
