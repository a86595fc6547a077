"""Whether an exported graph does what the model does, before anything is kept of it."""

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
    """Feed prompts of different lengths, then steps of all of them in one batch.

    Returns the greatest difference of a logit, as a part of the greatest logit, and raises
    :class:`ValueError` where that is too much or another token would be chosen.
    """
    prompts = _prompts(model, shape)
    room = max(map(len, prompts)) + 2
    rows = [_feed(run, shape, [prompt], [0], room, shape.empty(1, 1)) for prompt in prompts]
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
        held = [len(text) for text in texts]
        for text, token in zip(texts, tokens.tolist(), strict=True):
            text.append(token)
        fed = [[int(token)] for token in tokens]
        # Every other step leaves a gap, as it comes about when sequences join others.
        room += 1 + step % 2
        logits, cache = _feed(run, shape, fed, held, room, cache)
    return worst


def _prompts(model: Any, shape: Shape) -> list[list[int]]:
    lengths = list(_LENGTHS)
    window = getattr(model.config.get_text_config(), "sliding_window", None)
    if window and window < (shape.context or window):
        # A model that looks back only so far has to be seen doing so.
        lengths.append(window + 3)
    source = torch.Generator().manual_seed(1)
    return [
        torch.randint(shape.vocabulary, (length,), generator=source).tolist() for length in lengths
    ]


def _feed(
    run: Runner,
    shape: Shape,
    fed: list[list[int]],
    held: list[int],
    room: int,
    cache: list[torch.Tensor],
) -> tuple[npt.NDArray[Any], list[torch.Tensor]]:
    new = len(fed[0])
    mask = np.zeros((len(fed), room), np.int64)
    for row, before in enumerate(held):
        mask[row, room - new - before :] = 1
    states = names.states(shape.layers)
    answer = run(
        {
            names.INPUT_IDS: np.array(fed, np.int64),
            names.POSITION_IDS: np.arange(new) + np.array(held, np.int64)[:, None],
            names.ATTENTION_MASK: mask,
            names.PAST_MASK: np.zeros((len(fed), cache[0].shape[2]), np.int64),
            **{past: part.numpy() for (past, _), part in zip(states, cache, strict=True)},
        }
    )
    present = [torch.from_numpy(np.array(answer[name])) for _, name in states]
    return answer[names.LOGITS], present


def _expected(model: Any, texts: list[list[int]]) -> npt.NDArray[Any]:
    with torch.inference_mode():
        rows = [torch.tensor([text]) for text in texts]
        answers = [model(input_ids=ids, attention_mask=torch.ones_like(ids)) for ids in rows]
        return np.stack([answer.logits[0, -1].float().numpy() for answer in answers])
