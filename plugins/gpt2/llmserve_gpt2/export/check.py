"""Checks that an exported graph computes the same as the model, before the graph is kept."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from llmserve_gpt2.export import names
from llmserve_gpt2.export.model import Shape

Arrays = Mapping[str, npt.NDArray[Any]]
Runner = Callable[[Arrays], Arrays]

_LENGTHS = (1, 4, 9)
_STEPS = 6
_TOLERANCE = 1e-3


def check(run: Runner, model: Any, shape: Shape) -> float:
    """Run prompts of different lengths, then steps of all of them in one batch.

    Returns the greatest difference of a logit, relative to the greatest logit. Raises
    :class:`ValueError` if it is too large or if another token would be chosen.
    """
    prompts = _prompts(model, shape)
    length = max(map(len, prompts)) + 2
    rows = [_run(run, shape, [prompt], [0], length, shape.empty(1, 1)) for prompt in prompts]
    cache = [torch.cat(parts) for parts in zip(*(states for _, states in rows), strict=True)]
    logits = np.concatenate([logits for logits, _ in rows])
    texts = [list(prompt) for prompt in prompts]
    worst = 0.0
    for step in range(_STEPS + 1):
        expected = _expected(model, texts)
        worst = max(worst, float(np.abs(logits - expected).max() / np.abs(expected).max()))
        tokens = expected.argmax(-1)
        if not worst <= _TOLERANCE or (logits.argmax(-1) != tokens).any():
            raise ValueError(f"its logits are off by {worst:.2g} after {step} steps")
        past_tokens = [len(text) for text in texts]
        for text, token in zip(texts, tokens.tolist(), strict=True):
            text.append(token)
        new_tokens = [[int(token)] for token in tokens]
        # Every second step leaves a gap, as happens when sequences join others.
        length += 1 + step % 2
        logits, cache = _run(run, shape, new_tokens, past_tokens, length, cache)
    return worst


def _prompts(model: Any, shape: Shape) -> list[list[int]]:
    lengths = list(_LENGTHS)
    window = getattr(model.config.get_text_config(), "sliding_window", None)
    if window and window < (shape.context or window):
        # The sequence must exceed the sliding window for the check to cover it.
        lengths.append(window + 3)
    source = torch.Generator().manual_seed(1)
    return [
        torch.randint(shape.vocabulary, (length,), generator=source).tolist() for length in lengths
    ]


def _run(
    run: Runner,
    shape: Shape,
    new_tokens: list[list[int]],
    past_tokens: list[int],
    length: int,
    cache: list[torch.Tensor],
) -> tuple[npt.NDArray[Any], list[torch.Tensor]]:
    rows, new = len(new_tokens), len(new_tokens[0])
    mask = np.zeros((rows, length), np.int64)
    for row, past in enumerate(past_tokens):
        mask[row, length - new - past :] = 1
    states = names.states(shape.layers)
    outputs = run(
        {
            names.INPUT_IDS: np.array(new_tokens, np.int64),
            names.POSITION_IDS: np.arange(new) + np.array(past_tokens, np.int64)[:, None],
            names.ATTENTION_MASK: mask,
            names.PAST_MASK: np.zeros((rows, cache[0].shape[2]), np.int64),
            **{name: part.numpy() for (name, _), part in zip(states, cache, strict=True)},
        }
    )
    present = [torch.from_numpy(np.array(outputs[name])) for _, name in states]
    return outputs[names.LOGITS], present


def _expected(model: Any, texts: list[list[int]]) -> npt.NDArray[Any]:
    with torch.inference_mode():
        rows = [torch.tensor([text]) for text in texts]
        answers = [model(input_ids=ids, attention_mask=torch.ones_like(ids)) for ids in rows]
        return np.stack([answer.logits[0, -1].float().numpy() for answer in answers])
