"""A model of transformers with its pooling or its logits, as one function of padded ids."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from llmserve_embed.packing import GPU_PASS_COST

Values = Callable[[Any, torch.Tensor], torch.Tensor]
"""Makes the values of each row from a model's output and the mask of its tokens."""


class TorchNetwork:
    """Runs a model on its device, which each pass has for itself."""

    streams = 1

    def __init__(self, model: Any, values: Values, padding: int) -> None:
        self._model = model
        self._values = values
        self.padding = padding
        # A decoder with a head finds a row's last token by it.
        model.config.pad_token_id = model.config.get_text_config().pad_token_id = padding
        self.pass_cost = 32 if model.device.type == "cpu" else GPU_PASS_COST
        self._has_segments = reads_segments(model)

    def __call__(
        self, ids: npt.NDArray[Any], mask: npt.NDArray[Any], segments: npt.NDArray[Any]
    ) -> npt.NDArray[np.float32]:
        device = self._model.device
        inputs = {
            "input_ids": torch.from_numpy(ids).to(device),
            "attention_mask": torch.from_numpy(mask).to(device),
        }
        if self._has_segments:
            inputs["token_type_ids"] = torch.from_numpy(segments).to(device)
        with torch.inference_mode():
            values = self._values(self._model(**inputs), inputs["attention_mask"])
        found: npt.NDArray[np.float32] = values.float().cpu().numpy()
        return found


def reads_segments(model: Any) -> bool:
    """Whether a model has vectors for the first and the second text.

    GPT-2 and others take such ids for further tokens, and their tokenizers never give any.
    """
    config = model.config
    has_vectors = hasattr(config, "type_vocab_size") or config.model_type in ("funnel", "xlnet")
    return has_vectors and "token_type_ids" in inspect.signature(model.forward).parameters


def logits(output: Any, mask: torch.Tensor) -> torch.Tensor:
    del mask
    values: torch.Tensor = output.logits
    return values


def pooled(pooling: str) -> Values:
    """Return what makes one vector of those of a text's tokens."""
    pool = _POOLINGS[pooling]

    def values(output: Any, mask: torch.Tensor) -> torch.Tensor:
        return pool(output.last_hidden_state.float(), mask)

    return values


def _mean(states: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    weights = mask.unsqueeze(-1).to(states.dtype)
    return (states * weights).sum(1) / weights.sum(1)


def _first(states: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    del mask
    return states[:, 0]


def _last(states: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return states[torch.arange(len(states), device=states.device), mask.sum(1) - 1]


def _largest(states: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return states.masked_fill(mask.unsqueeze(-1) == 0, -torch.inf).amax(1)


_POOLINGS = {"mean": _mean, "cls": _first, "last": _last, "max": _largest}
