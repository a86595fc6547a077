"""The three models of Acme's ensemble as they run in Triton."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from llmserve.runtime import Answer, Parts, Tensors, read_prompts, respond, tensors_of


class _Stage:
    def __init__(self, settings: Mapping[str, Any], folder: Path) -> None:
        del settings, folder

    def start(self, parts: Parts) -> None:
        self.parts = parts

    def execute(self, requests: Sequence[Any]) -> Sequence[Any]:
        return respond(requests, self.answer, self.parts)

    def answer(self, raw: Any) -> Tensors:
        raise NotImplementedError

    def finalize(self) -> None:
        pass


class Read(_Stage):
    """Turns text into ids, together with the requested length."""

    def answer(self, raw: Any) -> Tensors:
        """Return one row per prompt, padded to the longest prompt."""
        prompts = read_prompts(raw, self.parts)
        width = max(len(prompt.ids) for prompt in prompts)
        ids = [prompt.ids + [-1] * (width - len(prompt.ids)) for prompt in prompts]
        lengths = [prompt.params.max_tokens or width for prompt in prompts]
        return {"prompt_ids": np.array(ids), "length": np.array(lengths, np.int32)[:, None]}


class Echo(_Stage):
    """Returns the ids that it receives."""

    def answer(self, raw: Any) -> Tensors:
        """Keep the requested number of ids in each row."""
        tensors = tensors_of(raw)
        ids = tensors["prompt_ids"].copy()
        for row, length in zip(ids, tensors["length"][:, 0], strict=True):
            row[length:] = -1
        return {"output_ids": ids}


class Write(_Stage):
    """Turns ids into text."""

    def answer(self, raw: Any) -> Tensors:
        """Return the formatter's output for each row."""
        inputs = tensors_of(raw)
        rows = zip(inputs["prompt_ids"].tolist(), inputs["output_ids"].tolist(), strict=True)
        answers = []
        for prompt, output in rows:
            ids = [token for token in output if token >= 0]
            text = self.parts.tokenizer.decode(ids)
            input_tokens = sum(token >= 0 for token in prompt)
            answers.append(Answer(text, "", "length", input_tokens, len(ids), False, so_far=text))
        outputs = self.parts.formatter.format(answers)
        return {name: values.reshape(-1, 1) for name, values in outputs.items()}
