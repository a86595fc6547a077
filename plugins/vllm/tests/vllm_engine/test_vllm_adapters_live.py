"""Adapters in float32: answers are those of the merged models, whatever else is running."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from llmserve.errors import ClientError
from llmserve.testing import LiveTriton
from llmserve.testing.tiny_adapters import merged, save_adapter

from .references import MAX_TOKENS, OPTIONS, PROMPTS, save_tiny_llama, text_of, tiny_llama

pytest.importorskip("vllm", reason="only `make test-vllm` installs vLLM")

NAMES = ("", "one", "two", "wide", "three")
ASKED = [(name, prompt) for name in NAMES for prompt in PROMPTS[-6:]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder, model = tmp_path_factory.mktemp("tiny"), tiny_llama()
    save_adapter(folder / "one", model, targets=("q_proj", "v_proj", "down_proj"), seed=1)
    save_adapter(folder / "two", model, targets=("q_proj",), seed=2, rank=2)
    save_adapter(folder / "wide", model, targets=("up_proj",), seed=3, rank=40, use_rslora=True)
    save_adapter(folder / "three", model, targets=("o_proj", "gate_proj"), seed=4)
    save_tiny_llama(folder / "model")
    return folder


@pytest.fixture(scope="module")
def expected(folder: Path) -> dict[tuple[str, tuple[int, ...]], str]:
    found = {}
    for name in NAMES:
        model: Any = merged(tiny_llama(), folder / name) if name else tiny_llama()
        for prompt in (prompt for each, prompt in ASKED if each == name):
            ids = torch.tensor([prompt])
            with torch.inference_mode():
                output = model.generate(
                    ids, attention_mask=torch.ones_like(ids), max_new_tokens=MAX_TOKENS,
                    do_sample=False,
                )  # fmt: skip
            found[name, prompt] = text_of([int(token) for token in output[0, len(prompt) :]])
    return found


@pytest.mark.parametrize("batching", ["continuous", "dynamic"])
def test_answers_are_those_of_the_merged_models_alone_and_in_one_step(
    triton: LiveTriton,
    folder: Path,
    expected: dict[tuple[str, tuple[int, ...]], str],
    batching: str,
) -> None:
    # Of four adapters, two run in a step; the others wait in vLLM.
    model = triton.build(
        "vllm", str(folder / "model"), **OPTIONS, batching=batching, max_loras=2,
        adapters=",".join(f"{name}={folder / name}" for name in NAMES if name),
    )  # fmt: skip

    def answer(key: tuple[str, tuple[int, ...]]) -> str:
        name, prompt = key
        options: dict[str, Any] = {"adapter": name} if name else {}
        found = triton.client.generate(
            model, text_of(prompt), max_tokens=MAX_TOKENS, ignore_eos=True, **options
        )
        return str(found.text).strip()

    for name in NAMES:
        alone = (name, PROMPTS[-1])
        assert answer(alone) == expected[alone], name
    with ThreadPoolExecutor(len(ASKED)) as pool:
        answers = dict(zip(ASKED, pool.map(answer, ASKED), strict=True))
    assert answers == expected
    assert len({expected[name, PROMPTS[-1]] for name in NAMES}) == len(NAMES)
    with pytest.raises(ClientError, match="has no adapter 'none'"):
        triton.client.generate(model, "w3", adapter="none", max_tokens=1)
