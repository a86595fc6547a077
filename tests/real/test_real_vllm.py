"""A real chat model, served by ``vllm`` with each driver; only `make test-vllm` installs vLLM."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from llmserve.testing import LiveTriton
from tests.real.questions import check_city, message
from tests.real.reference import CHATS, TOKENS, Reference

pytest.importorskip("vllm", reason="only `make test-vllm` installs vLLM")
pytestmark = pytest.mark.real

# Without `enforce_eager`, each load would compile for a minute. The cache of some contexts of 8,192
# tokens would take gigabytes.
OPTIONS = {"enforce_eager": True, "dtype": "float32", "max_model_len": 1024}


@pytest.mark.parametrize("batching", ["continuous", "static", "dynamic"])
def test_answers_are_those_of_generate_alone_and_with_others(
    triton: LiveTriton, real_folder: Path, reference: Reference, batching: str
) -> None:
    model = triton.build("vllm", str(real_folder), **OPTIONS, batching=batching)

    def answer(chat: str) -> str:
        return triton.client.generate(model, messages=message(chat), max_tokens=TOKENS).text

    assert answer(CHATS[0]) == reference.answers[0]
    with ThreadPoolExecutor(len(CHATS)) as pool:
        assert list(pool.map(answer, CHATS)) == reference.answers
    check_city(triton.client, model)
