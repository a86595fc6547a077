"""A real encoder, served by ``embed``: its vectors are those of transformers, and have meaning."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModel, AutoTokenizer

from llmserve.testing import LiveTriton

pytestmark = [pytest.mark.real, pytest.mark.long]

TOPICS = {
    "Where do cats sleep?": "The cat sleeps on the sofa all day.",
    "How do I bake bread?": "Mix flour, water, salt and yeast, and bake the dough for an hour.",
    "When was the war over?": "Peace was signed in the spring of 1945.",
}


def reference(folder: Path, texts: list[str]) -> Any:
    """Return the mean of the vectors of each text's tokens, of the length 1."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModel.from_pretrained(folder, dtype=torch.float32).eval()
    vectors = []
    with torch.inference_mode():
        for text in texts:
            tokens = tokenizer(text, return_tensors="pt", truncation=True, max_length=256)
            vectors.append(model(**tokens).last_hidden_state[0].mean(0).numpy())
    found = np.stack(vectors)
    return found / np.linalg.norm(found, axis=1, keepdims=True)


def test_vectors_are_those_of_transformers(triton: LiveTriton, encoder_folder: Path) -> None:
    name = triton.build("embed", str(encoder_folder), generator="encoder-openvino")
    draw = random.Random(0)
    words = (encoder_folder / "vocab.txt").read_text(encoding="utf-8").split()
    texts = [" ".join(draw.choices(words, k=draw.randint(1, 300))) for _ in range(60)]
    vectors = triton.client.embed(name, texts, truncate=True)
    np.testing.assert_allclose(vectors, reference(encoder_folder, texts), atol=1e-5)


def test_an_answer_is_nearest_to_its_question(triton: LiveTriton, encoder_folder: Path) -> None:
    name = triton.build("embed", str(encoder_folder), generator="encoder-openvino")
    questions = triton.client.embed(name, [*TOPICS])
    answers = triton.client.embed(name, [*TOPICS.values()])
    assert (questions @ answers.T).argmax(axis=1).tolist() == [0, 1, 2]
