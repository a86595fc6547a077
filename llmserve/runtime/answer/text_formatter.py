"""The formatter ``text``: the answer, its finish reason and its token counts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from llmserve.runtime.answer.compiling import Compiled, Compiler, Form
from llmserve.runtime.answer.constrained import FormConstraint, call_form_of, form_of
from llmserve.runtime.answer.generation import Constraint, Generation
from llmserve.runtime.answer.logprobs import to_json
from llmserve.runtime.answer.staged import StagedConstraint
from llmserve.runtime.protocols import Answer, Tokenizer, strings


class TextFormatter:
    """Fills ``text_output``, ``finish_reason`` and the token counts.

    Log-probabilities are filled in if a request of the batch asks for them. Answers are constrained
    if a request asks for it and the generator supports it.
    """

    def __init__(self, settings: Mapping[str, Any], folder: Path) -> None:
        del settings, folder
        self._compiler: Compiler | None = None

    def constrain(self, generation: Generation, tokenizer: Tokenizer) -> Constraint | None:
        """Return the constraint that the request asks for, such as a JSON schema, or None."""
        params = generation.params
        form, call = form_of(params), call_form_of(params)
        budget = params.thinking_marks and params.thinking_token_budget is not None
        if form is None and call is None and not budget:
            return None

        def started(form: Form) -> Future[Compiled]:
            if self._compiler is None:
                self._compiler = Compiler(tokenizer, generation.eos_ids)
            return self._compiler.start(form)

        whole = FormConstraint(generation, started(form)) if form else None
        if not (params.thinking_marks or params.call_marks):
            return whole
        # Compiled once: a later call of the same answer must not wait, nor be refused.
        new_call = partial(FormConstraint, generation, started(call)) if call else None
        return StagedConstraint(generation, tokenizer, whole, new_call)

    def close(self) -> None:
        """End what compiles constraints; what waits to be compiled is dropped."""
        if self._compiler is not None:
            self._compiler.close()
            self._compiler = None

    def format(self, answers: Sequence[Answer]) -> dict[str, npt.NDArray[Any]]:
        tensors = {
            "text_output": strings(
                [(answer.prompt if answer.echo else "") + answer.text for answer in answers]
            ),
            "finish_reason": strings([answer.finish_reason or "" for answer in answers]),
            "num_input_tokens": np.array([a.input_tokens for a in answers], dtype=np.int32),
            "num_output_tokens": np.array([a.output_tokens for a in answers], dtype=np.int32),
        }
        if any(answer.cached_tokens is not None for answer in answers):
            cached = [answer.cached_tokens or 0 for answer in answers]
            tensors["num_cached_tokens"] = np.array(cached, dtype=np.int32)
        if any(answer.logprobs is not None for answer in answers):
            tensors |= _logprobs(answers)
        if any(answer.prompt_logprobs is not None for answer in answers):
            logprobs = [to_json(answer.prompt_logprobs or (), answer.texts) for answer in answers]
            tensors["prompt_logprobs"] = strings(logprobs)
        return tensors


def _logprobs(answers: Sequence[Answer]) -> dict[str, npt.NDArray[Any]]:
    # The answers to one request's prompts may differ in length: they are padded with zeros.
    rows = [[logprob.value for logprob in answer.logprobs or ()] for answer in answers]
    values = np.zeros((len(rows), max(map(len, rows))), dtype=np.float32)
    for padded, row in zip(values, rows, strict=True):
        padded[: len(row)] = row
    return {
        "logprobs": strings([to_json(answer.logprobs or (), answer.texts) for answer in answers]),
        "output_log_probs": values,
        "cum_log_probs": np.array([a.total_logprob for a in answers], dtype=np.float32),
    }
