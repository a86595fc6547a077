"""The three models of Acme's ensemble, each as it runs in Triton."""

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
    """Text to ids, with the length that is asked for."""

    def answer(self, raw: Any) -> Tensors:
        """Give a row per prompt, all of the longest one's width."""
        prompts = read_prompts(raw, self.parts)
        width = max(len(prompt.ids) for prompt in prompts)
        ids = [prompt.ids + [-1] * (width - len(prompt.ids)) for prompt in prompts]
        lengths = [prompt.params.max_tokens or width for prompt in prompts]
        return {"prompt_ids": np.array(ids), "length": np.array(lengths, np.int32)[:, None]}


class Echo(_Stage):
    """Ids to the same ids."""

    def answer(self, raw: Any) -> Tensors:
        """Give as many ids as the row asks for."""
        given = tensors_of(raw)
        ids = given["prompt_ids"].copy()
        for row, length in zip(ids, given["length"][:, 0], strict=True):
            row[length:] = -1
        return {"output_ids": ids}


class Write(_Stage):
    """Ids to text."""

    def answer(self, raw: Any) -> Tensors:
        """Give what the formatter makes of each row."""
        given = tensors_of(raw)
        rows = zip(given["prompt_ids"].tolist(), given["output_ids"].tolist(), strict=True)
        answers = []
        for prompt, output in rows:
            said = [token for token in output if token >= 0]
            text = self.parts.tokenizer.decode(said)
            read = sum(token >= 0 for token in prompt)
            answers.append(Answer(text, "", "length", read, len(said), False, so_far=text))
        tensors = self.parts.formatter.format(answers)
        return {name: values.reshape(-1, 1) for name, values in tensors.items()}
