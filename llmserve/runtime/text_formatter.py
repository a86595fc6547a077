"""The formatter ``text``: the answer, why it ended and how many tokens it took."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from llmserve.runtime.constrained import Compiler, form_of
from llmserve.runtime.generation import Constraint, Generation
from llmserve.runtime.logprobs import to_json
from llmserve.runtime.protocols import Answer, Tokenizer, strings


class TextFormatter:
    """Fills ``text_output``, ``finish_reason`` and the token counts.

    Log-probabilities are filled in where a request of the batch asked for them. Answers are held
    to a form where a request asks for one and the generator can.
    """

    def __init__(self, settings: Mapping[str, Any], folder: Path) -> None:
        del settings, folder
        self._compiler: Compiler | None = None

    def constrain(self, generation: Generation, tokenizer: Tokenizer) -> Constraint | None:
        """Hold an answer to a JSON schema or another form if its request asks for that."""
        form = form_of(generation.params)
        if form is None:
            return None
        if self._compiler is None:
            self._compiler = Compiler(tokenizer, generation.eos_ids)
        return self._compiler.constraint(generation, form)

    def format(self, answers: Sequence[Answer]) -> dict[str, npt.NDArray[Any]]:
        tensors = {
            "text_output": strings(
                [(answer.prompt if answer.echo else "") + answer.text for answer in answers]
            ),
            "finish_reason": strings([answer.finish_reason or "" for answer in answers]),
            "num_input_tokens": np.array([a.input_tokens for a in answers], dtype=np.int32),
            "num_output_tokens": np.array([a.output_tokens for a in answers], dtype=np.int32),
        }
        if any(answer.logprobs is not None for answer in answers):
            tensors |= _logprobs(answers)
        if any(answer.prompt_logprobs is not None for answer in answers):
            read = [to_json(answer.prompt_logprobs or (), answer.texts) for answer in answers]
            tensors["prompt_logprobs"] = strings(read)
        return tensors


def _logprobs(answers: Sequence[Answer]) -> dict[str, npt.NDArray[Any]]:
    # Prompts of one request may have answers of different lengths: noughts fill them up.
    rows = [[one.value for one in answer.logprobs or ()] for answer in answers]
    values = np.zeros((len(rows), max(map(len, rows))), dtype=np.float32)
    for filled, row in zip(values, rows, strict=True):
        filled[: len(row)] = row
    return {
        "logprobs": strings([to_json(answer.logprobs or (), answer.texts) for answer in answers]),
        "output_log_probs": values,
        "cum_log_probs": np.array([a.total_logprob for a in answers], dtype=np.float32),
    }
