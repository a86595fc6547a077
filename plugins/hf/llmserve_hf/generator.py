"""Runs transformers' ``generate`` in Triton, with separate parameters for each row of a batch."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmserve.runtime import (
    ADAPTERS,
    DEFAULT_ADAPTER_MB,
    Adapters,
    Generation,
    ImageProcessor,
    RequestError,
    Tokenizer,
    adapter_names,
    causal,
)

if TYPE_CHECKING:
    from llmserve_hf.rows import Row

# torch and transformers are imported when a model is loaded: a build only inspects the class and
# need not wait for them.


_ALONE = frozenset({
    "deepseek_v4", "hy_v4", "minimax_m3_vl_text", "recurrent_gemma", "reformer", "rwkv", "xlstm",
})  # fmt: skip
"""Kinds of models that answer otherwise beside a longer text: they read what fills the row."""


class TransformersGenerator:
    """A causal model, of text or of images and text: the runtime of ``transformers``."""

    def __init__(self, settings: Mapping[str, Any], folder: Path) -> None:
        from transformers import GenerationConfig

        from llmserve.runtime import LoraProducts, speed_up

        self._model = causal.load(settings, folder)
        self.context_length = causal.context_length(self._model)
        # Requests call them.
        images = ImageProcessor(settings, folder, context_length=self.context_length)
        self.read_images, self.about_images = images.read, images.about
        self.eos_ids = causal.eos_ids(self._model)
        config = self._model.config.get_text_config()
        self.is_alone = config.model_type in _ALONE
        """Whether texts of different lengths are computed one by one."""
        self._original_length = causal.original_length(config.to_dict()) or sys.maxsize
        # Llama 4's scores change with the place in a row at each multiple of this.
        self._even_length = getattr(config, "floor_scale", None) or sys.maxsize
        # Each row's request decides when it ends, so generate() itself has no end token; and it
        # must not sample with the model's defaults, which no request asked for.
        self._model.generation_config = GenerationConfig(pad_token_id=0)
        # A model spread over devices keeps its modules: they know where their weights are.
        if self._model.device.type == "cpu" and settings["device"] != "balanced":
            speed_up(self._model)
        self._folder, self._lora = folder, LoraProducts(self._model)
        # Models that were built before there were adapters have no such setting.
        budget = settings.get("adapter_mb", DEFAULT_ADAPTER_MB) * 1_000_000
        self._adapters = Adapters(folder / ADAPTERS, self._lora, budget)

    # `llmserve check` calls it.
    try_imports = staticmethod(causal.try_imports)
    # Builds and `llmserve adapter` call it.
    adapter_shapes = staticmethod(causal.adapter_shapes)

    def generate(self, generations: Sequence[Generation], tokenizer: Tokenizer) -> None:
        """Run one batch until every row is done."""
        from llmserve_hf.rows import Row

        rows = [Row(generation, tokenizer) for generation in generations]
        for row in rows:
            self._find_adapter(row)
        while rows := [row for row in rows if not row.generation.done]:
            held = [row for row in rows if self._hold(row)]
            try:
                for row in held:
                    if row.generation.wants_prompt_logits:
                        self._push_prompt_logits(row)
                for batch in self._batches(held):
                    self._run(batch, self._length(batch))
            finally:
                for row in held:
                    if row.adapter:
                        self._adapters.release(row.adapter)

    @property
    def adapters(self) -> list[str]:
        """The names that requests may give at the moment."""
        return adapter_names(self._folder)

    def _find_adapter(self, row: Row) -> None:
        """Look up the adapter that a row's request names; one that has none fails alone."""
        if name := row.generation.params.adapter:
            try:
                row.adapter = self._adapters.find(name)
            except RequestError as error:
                row.generation.fail(error)

    def _hold(self, row: Row) -> bool:
        """Have a row's adapter in memory; return whether the row can run now."""
        if not row.adapter:
            return True
        try:
            return self._adapters.hold(row.generation.params.adapter or "", row.adapter)
        except RequestError as error:
            row.generation.fail(error)
            return False

    def _push_prompt_logits(self, row: Row) -> None:
        import torch

        generation = row.generation
        ids = torch.tensor([generation.prompt_ids], device=self._model.device)
        with torch.inference_mode(), self._lora.of_rows([row.adapter], (1, 1)):
            seen = self._seen([row])
            logits = self._model(input_ids=ids, **seen).logits[0, :-1].float().cpu().numpy()
        while generation.wants_prompt_logits:
            generation.push_prompt(logits[len(generation.prompt_logprobs) - 1])

    def _batches(self, rows: Sequence[Row]) -> list[Sequence[Row]]:
        """Return which rows run together: in some models, only those of one length.

        Processors join the images of several prompts in ways of their own, so one with images runs
        alone. It then runs to its end, and is never continued.
        """
        seeing = [[row] for row in rows if row.generation.images]
        rows = [row for row in rows if not row.generation.images]
        return [*self._text_batches(rows), *seeing]

    def _text_batches(self, rows: Sequence[Row]) -> list[Sequence[Row]]:
        if not rows:
            return []
        lengths = {len(row.ids) for row in rows}
        end = max(lengths) + self._length(rows)
        # With longrope, all rows rotate as the longest does.
        is_turning = min(lengths) <= self._original_length < end or end >= self._even_length
        if len(lengths) > 1 and (self.is_alone or is_turning):
            return [[row] for row in rows]
        return [rows]

    def _length(self, rows: Sequence[Row]) -> int:
        """Return for how many tokens the rows can run together.

        A row that is done stays in the batch until its end, so the end must be within the context
        of every row; rows that need more tokens continue in another batch.
        """
        length = max(row.tokens_left for row in rows)
        if self.context_length is None:
            return length
        return min(length, *(self.context_length - len(row.ids) for row in rows))

    def _seen(self, rows: Sequence[Row]) -> dict[str, Any]:
        """Return what the model computes the images of a row from."""
        if len(rows) > 1 or not rows[0].generation.images:
            return {}
        device, dtype = self._model.device, self._model.dtype
        return {
            # Sums of a mask in 16 bits would be rounded.
            name: tensor.to(device, dtype)
            if tensor.is_floating_point() and not name.endswith("_mask")
            else tensor.to(device)
            for name, tensor in rows[0].generation.images.items()
        }

    def _run(self, rows: Sequence[Row], length: int) -> None:
        import torch

        from llmserve_hf.rows import RowChooser, RowFinisher

        width = max(len(row.ids) for row in rows)
        # Padding is on the left, so that the last position of every row is its newest token.
        ids = [[0] * (width - len(row.ids)) + row.ids for row in rows]
        mask = [[0] * (width - len(row.ids)) + [1] * len(row.ids) for row in rows]
        device = self._model.device
        keys = [row.adapter for row in rows]
        with torch.inference_mode(), self._lora.of_rows(keys, (len(keys), 1)):
            self._model.generate(
                input_ids=torch.tensor(ids, device=device),
                attention_mask=torch.tensor(mask, device=device),
                **self._seen(rows),
                max_new_tokens=length,
                do_sample=False,
                logits_processor=[RowChooser(rows)],
                stopping_criteria=[RowFinisher(rows)],
            )
