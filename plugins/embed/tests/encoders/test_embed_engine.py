"""Values equal those of transformers, alone and in any batch."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModel, AutoModelForSequenceClassification, AutoTokenizer

import llmserve
from llmserve.builder.build import BuildResult
from llmserve.runtime import Generation, Params, TransformersTokenizer
from llmserve_embed.engine import TorchClassifier, TorchEncoder
from tests.tiny_encoders import CONTEXT, save_classifier, save_encoder

TEXTS = ["a", "some words", "word " * 20, "nine, ten!", "Ünknown", "b" * 40, "again", "a"]


def build(recipe: str, model: Path, folder: Path, **options: Any) -> BuildResult:
    return llmserve.build(recipe, str(model), name="m", output=folder / "repository", **options)


def runtime(result: BuildResult, kind: Any) -> tuple[Any, TransformersTokenizer]:
    folder = result.folder / "1"
    components = result.manifest.components
    tokenizer = TransformersTokenizer(components["tokenizer"]["settings"], folder)
    return kind(components["generator"]["settings"], folder), tokenizer


def values(engine: Any, tokenizer: TransformersTokenizer, texts: Sequence[Any]) -> Any:
    generations = []
    for text in texts:
        pair = text if isinstance(text, tuple) else (text, None)
        ids, segments = tokenizer.encode_pair(*pair)
        decode = tokenizer.decode
        generations.append(
            Generation(
                ids, Params(), max_tokens=0, eos_ids=frozenset(), decode=decode, segments=segments
            )
        )
    engine.generate(generations, tokenizer)
    return np.stack([generation.value for generation in generations])


def pooled(folder: Path, text: str, pooling: str) -> Any:
    tokens = AutoTokenizer.from_pretrained(folder)([text], return_tensors="pt", truncation=False)
    with torch.inference_mode():
        states = AutoModel.from_pretrained(folder)(**tokens).last_hidden_state[0]
    return {
        "mean": lambda: states.mean(0),
        "cls": lambda: states[0],
        "last": lambda: states[-1],
        "max": lambda: states.amax(0),
    }[pooling]().numpy()


@pytest.mark.parametrize("pooling", ["mean", "cls", "last", "max"])
@pytest.mark.parametrize("family", ["bert", "roberta"])
def test_vectors_equal_those_of_transformers(tmp_path: Path, family: str, pooling: str) -> None:
    model = save_encoder(tmp_path / "model", family)
    result = build("embed", model, tmp_path, pooling=pooling, batch_tokens=64)
    engine, tokenizer = runtime(result, TorchEncoder)
    found = values(engine, tokenizer, TEXTS)
    for text, vector in zip(TEXTS, found, strict=True):
        np.testing.assert_allclose(vector, pooled(model, text, pooling), atol=1e-5)
        np.testing.assert_allclose(values(engine, tokenizer, [text])[0], vector, atol=1e-5)
    assert engine.context_length == CONTEXT


@pytest.mark.parametrize("count", [1, 2, 3])
def test_logits_of_pairs_equal_those_of_transformers(tmp_path: Path, count: int) -> None:
    model = save_classifier(tmp_path / "model", num_labels=count)
    engine, tokenizer = runtime(build("classify", model, tmp_path), TorchClassifier)
    pairs = [(text, f"of {text}") for text in TEXTS[:4]]
    reference = AutoModelForSequenceClassification.from_pretrained(model)
    found = values(engine, tokenizer, [*pairs, *TEXTS])
    reader = AutoTokenizer.from_pretrained(model)
    for text, row in zip([*pairs, *((text, None) for text in TEXTS)], found, strict=True):
        tokens = reader(*text, return_tensors="pt", truncation=False)
        with torch.inference_mode():
            logits = reference(**tokens).logits[0].numpy()
        np.testing.assert_allclose(row, logits, atol=1e-5)


def test_a_text_is_cut_as_transformers_cuts_it(tmp_path: Path) -> None:
    model = save_encoder(tmp_path / "model")
    _, tokenizer = runtime(build("embed", model, tmp_path), TorchEncoder)
    reader = AutoTokenizer.from_pretrained(model)
    for texts in (("word " * 90,), ("word " * 90, "another " * 9), ("short", "long " * 90)):
        cut = reader(*texts, truncation=True, max_length=20)["input_ids"]
        assert tokenizer.encode_pair(*texts, limit=20)[0] == cut
        assert len(tokenizer.encode_pair(*texts)[0]) > 20
