"""Rows of a batch with different adapters, and none."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from llmserve.runtime import RequestError
from llmserve.testing import ByteTokenizer, generation
from llmserve.testing.tiny_adapters import merged, save_adapter
from llmserve.testing.tiny_models import VOCAB, make_model
from llmserve_hf.generator import TransformersGenerator

PROMPTS = [[(3 * i + 1) % VOCAB for i in range(length)] for length in (5, 17, 9)]


@pytest.mark.parametrize("megabytes", [1, 1024])
def test_each_row_answers_as_the_model_with_its_adapter(tmp_path: Path, megabytes: int) -> None:
    model = make_model("llama")
    model.save_pretrained(tmp_path / "model")
    for seed, name in enumerate(("one", "two")):
        folder = tmp_path / "adapters" / name
        # Each takes more than half a megabyte.
        save_adapter(folder, model, targets=("q_proj", "up_proj"), seed=seed, rank=300)
    settings = {"path": "model", "device": "cpu", "dtype": "float32", "adapter_mb": megabytes}
    generator = TransformersGenerator(settings, tmp_path)
    assert generator.adapters == ["one", "two"]
    rows = [
        generation(prompt, 12, adapter=name)
        for prompt in PROMPTS
        for name in (None, "one", "two", "none")
    ]
    generator.generate(rows, ByteTokenizer())
    for row in rows:
        adapter = row.params.adapter
        if adapter == "none":
            assert isinstance(row.error, RequestError)
            assert row.error.code == "adapter_not_found"
            continue
        reference = merged(model, tmp_path / "adapters" / adapter) if adapter else model
        ids = list(row.prompt_ids)
        for token in row.token_ids:
            with torch.inference_mode():
                assert int(reference(torch.tensor([ids])).logits[0, -1].argmax()) == token
            ids.append(token)
        assert len(row.token_ids) == 12
