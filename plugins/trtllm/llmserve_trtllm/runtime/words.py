"""Stop and bad words in the form that TensorRT-LLM takes them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from llmserve.runtime.protocols import Tokenizer


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
