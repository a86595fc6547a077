"""Images in float32: answers are those of ``generate()``, beside texts in one step."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from llmserve.testing import LiveTriton
from llmserve.testing.tiny_seeing import data_url, picture, save_seeing

pytest.importorskip("vllm", reason="only `make test-vllm` installs vLLM")
pytestmark = pytest.mark.skipif(
    find_spec("torchvision") is None, reason="vLLM's models that see import torchvision"
)

MAX_TOKENS = 12
ASKED = [("what?", [1]), ("and", [1, 2]), ("which of them", [3, 2, 1]), ("hello", []), ("so", [4])]


@pytest.mark.parametrize("family", ["llava", "idefics3"])
def test_answers_are_those_of_generate(triton: LiveTriton, tmp_path: Path, family: str) -> None:
    import transformers

    # vLLM for CPUs has heads of 32 numbers and more.
    folder = save_seeing(family, tmp_path / "model", hidden_size=128)
    reference: Any = transformers.AutoModelForImageTextToText.from_pretrained(
        folder, dtype=torch.float32
    ).eval()
    processor: Any = transformers.AutoProcessor.from_pretrained(folder)
    _as_released(folder / "model.safetensors")
    model = triton.build(
        "vllm", str(folder), dtype="float32", enforce_eager=True, max_num_seqs=4,
    )  # fmt: skip

    def chat(text: str, seeds: list[int]) -> list[dict[str, Any]]:
        parts = [*({"type": "image"} for _ in seeds), {"type": "text", "text": text}]
        return [{"role": "user", "content": parts}]

    def expected(text: str, seeds: list[int]) -> str:
        inputs = processor(
            text=[processor.apply_chat_template(chat(text, seeds), add_generation_prompt=True)],
            images=[[picture(seed) for seed in seeds]] if seeds else None,
            add_special_tokens=False, return_tensors="pt",
        )  # fmt: skip
        ids = reference.generate(**inputs, max_new_tokens=MAX_TOKENS, do_sample=False)
        answer = ids[0, inputs["input_ids"].shape[1] :]
        return str(processor.tokenizer.decode(answer, skip_special_tokens=True))

    def asked(text: str, seeds: list[int]) -> str:
        return triton.client.generate(
            model, "", messages=json.dumps(chat(text, seeds)),
            image_url=[data_url(picture(seed)) for seed in seeds] or None, max_tokens=MAX_TOKENS,
        ).text  # fmt: skip

    with ThreadPoolExecutor(len(ASKED)) as pool:
        found = list(pool.map(lambda each: asked(*each), ASKED))
    assert found == [expected(*each) for each in ASKED]


def _as_released(file: Path) -> None:
    """Name a tower's weights as files of earlier versions of transformers do, which vLLM reads."""
    weights = load_file(file)
    names = {
        name: name.replace("vision_tower.", "vision_tower.vision_model.")
        for name in weights
        if name.startswith("vision_tower.") and "vision_model" not in name
    }
    renamed = {names.get(name, name): value for name, value in weights.items()}
    save_file(renamed, file, metadata={"format": "pt"})
