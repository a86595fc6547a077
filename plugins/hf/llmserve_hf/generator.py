"""transformers' ``generate`` in Triton, with every row of a batch on its own terms."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, GenerationConfig

from llmserve.runtime.generation import Generation
from llmserve.runtime.located import located
from llmserve.runtime.protocols import Tokenizer
from llmserve_hf.rows import RowChooser, RowFinisher


class TransformersGenerator:
    """An ``AutoModelForCausalLM``; the runtime of the generator ``transformers``."""

    def __init__(self, settings: Mapping[str, Any], folder: Path) -> None:
        where, options = located(settings, folder)
        device = settings["device"]
        if device == "auto":
            device = "cuda" if torch.cuda.is_available() else "cpu"
        self._model = AutoModelForCausalLM.from_pretrained(
            where,
            dtype=_dtype(settings["dtype"], device),
            device_map="balanced" if device == "balanced" else {"": device},
            use_safetensors=None if settings.get("pickle") else True,
            **options,
        ).eval()
        config = self._model.config.get_text_config()
        self.context_length: int | None = getattr(config, "max_position_embeddings", None)
        eos = self._model.generation_config.eos_token_id
        self.eos_ids = frozenset(eos if isinstance(eos, list) else [] if eos is None else [eos])
        # When a row ends is for its request to say, so generate() itself knows no end; and what
        # it samples by default would be nobody's wish here.
        self._model.generation_config = GenerationConfig(pad_token_id=0)

    def generate(self, generations: Sequence[Generation], tokenizer: Tokenizer) -> None:
        """Run one batch until every row is done."""
        rows = list(generations)
        width = max(len(row.prompt_ids) for row in rows)
        # Padding stands on the left, so that the last position of every row is its newest token.
        ids = [[0] * (width - len(row.prompt_ids)) + row.prompt_ids for row in rows]
        mask = [[0] * (width - len(row.prompt_ids)) + [1] * len(row.prompt_ids) for row in rows]
        device = self._model.device
        with torch.inference_mode():
            self._model.generate(
                input_ids=torch.tensor(ids, device=device),
                attention_mask=torch.tensor(mask, device=device),
                max_new_tokens=max(row.max_tokens for row in rows),
                do_sample=False,
                logits_processor=[RowChooser(rows, tokenizer)],
                stopping_criteria=[RowFinisher(rows)],
            )


def _dtype(asked: str, device: str) -> Any:
    if asked != "auto":
        return getattr(torch, asked)
    # Half precision is slow on most CPUs and never exact; a GPU takes what the checkpoint has.
    return torch.float32 if device == "cpu" else "auto"
