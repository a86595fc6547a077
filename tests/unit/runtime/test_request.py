"""Reading a request's tensors."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from llmserve.runtime.answer.request import read_prompts
from llmserve.runtime.contract import TYPES
from llmserve.runtime.errors import RequestError
from llmserve.testing import FakeRequest, make_parts

INTEGERS = [kind for kind in TYPES.values() if "int" in kind]
# Every option that takes a whole number.
OPTIONS = ("max_tokens", "min_tokens", "top_k", "seed", "end_id", "logprobs", "prompt_logprobs")


class Generator:
    """Reading a request needs its limits only."""

    context_length = 64
    eos_ids: frozenset[int] = frozenset()

    def generate(self, generations: Any, tokenizer: Any) -> None:
        """Nothing is generated here."""


@pytest.mark.parametrize("batched", [True, False])
@pytest.mark.parametrize("kind", INTEGERS)
def test_a_whole_number_is_read_from_any_integer_type(kind: str, batched: bool) -> None:
    shape = (1, 1) if batched else (1,)
    tensors = {name: np.full(shape, 3, kind) for name in OPTIONS}
    tensors["input_ids"] = np.full((*shape[:-1], 4), 65, kind)
    raw = FakeRequest({"text_input": np.full(shape, b"abc", np.object_), **tensors})
    parts = make_parts(Generator(), inputs=[*OPTIONS, "input_ids"], batched=batched)
    (prompt,) = read_prompts(raw, parts)
    assert [getattr(prompt.params, name) for name in OPTIONS] == [3] * len(OPTIONS)
    assert prompt.params.input_ids == (65, 65, 65, 65)


def test_the_largest_number_of_a_type_is_not_wrapped() -> None:
    parts = make_parts(Generator(), inputs=["max_tokens", "seed"])
    largest = np.array([[2**64 - 1]], np.uint64)
    (prompt,) = read_prompts(FakeRequest({"text_input": ["abc"], "seed": largest}), parts)
    assert prompt.params.seed == 2**64 - 1
    with pytest.raises(RequestError, match=f"max_tokens must be .* not {2**64 - 1}"):
        read_prompts(FakeRequest({"text_input": ["abc"], "max_tokens": largest}), parts)
