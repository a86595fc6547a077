"""transformers' ``generate`` in Triton, with every row of a batch on its own terms."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import GenerationConfig

from llmserve.runtime.causal import context_length, eos_ids, load
from llmserve.runtime.generation import Generation
from llmserve.runtime.protocols import Tokenizer
from llmserve_hf.rows import RowChooser, RowFinisher


class TransformersGenerator:
    """An ``AutoModelForCausalLM``; the runtime of the generator ``transformers``."""

    def __init__(self, settings: Mapping[str, Any], folder: Path) -> None:
        self._model = load(settings, folder)
        self.context_length = context_length(self._model)
        self.eos_ids = eos_ids(self._model)
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
