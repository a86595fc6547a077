"""Values equal those of transformers, alone and in any batch."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModel, AutoModelForSequenceClassification, AutoTokenizer

import llmserve
from llmserve.builder.build import BuildResult
from llmserve.errors import LLMServeError
from llmserve.runtime import Generation, Params, TransformersTokenizer
from llmserve.testing.tiny_encoders import CONTEXT, save_classifier, save_encoder, write
from llmserve_embed import convert
from llmserve_embed.compiled import MODEL, OpenVinoNetwork
from llmserve_embed.engine import OpenVinoValues, Packed, TorchClassifier, TorchEncoder

TEXTS = ["a", "some words", "word " * 20, "nine, ten!", "Ünknown", "b" * 40, "again", "a"]


def build(recipe: str, model: Path, folder: Path, **options: Any) -> BuildResult:
    name = options.pop("name", "m")
    return llmserve.build(recipe, str(model), name=name, output=folder / "repository", **options)


def runtime(result: BuildResult, kind: Any, **more: Any) -> tuple[Any, TransformersTokenizer]:
    folder = result.folder / "1"
    components = result.manifest.components
    tokenizer = TransformersTokenizer(components["tokenizer"]["settings"], folder)
    return kind({**components["generator"]["settings"], **more}, folder), tokenizer


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
    found: list[Any] = [generation.value for generation in generations]
    return np.stack(found)


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


def converted(model: Path, target: Path, loader: str, pooling: str | None, padding: int) -> Any:
    """Return an engine of OpenVINO; a build would convert in a process of its own."""
    if not target.is_dir():
        convert.main(str(model), target, {
            "loader": loader, "padding": padding, "weight_format": "auto", "pickle": False,
            "trust_remote_code": False,
        })  # fmt: skip
    network = OpenVinoNetwork(
        target / MODEL, pooling, padding, {"INFERENCE_PRECISION_HINT": "f32", "NUM_STREAMS": 2}
    )
    return Packed({"max_length": CONTEXT, "batch_tokens": 64}, network)


@pytest.mark.parametrize("family", ["bert", "roberta"])
def test_vectors_equal_those_of_transformers(tmp_path: Path, family: str) -> None:
    model, padding = save_encoder(tmp_path / "model", family), int(family == "roberta")
    result = build("embed", model, tmp_path, batch_tokens=64, generator="encoder")
    for pooling in ("mean", "cls", "last", "max"):
        engine, tokenizer = runtime(result, TorchEncoder, pooling=pooling)
        assert engine.context_length == CONTEXT
        for each in (engine, converted(model, tmp_path / "ov", "AutoModel", pooling, padding)):
            found = values(each, tokenizer, TEXTS)
            for text, vector in zip(TEXTS, found, strict=True):
                np.testing.assert_allclose(vector, pooled(model, text, pooling), atol=1e-5)
                np.testing.assert_allclose(values(each, tokenizer, [text])[0], vector, atol=1e-5)


@pytest.mark.parametrize("count", [1, 3])
def test_logits_of_pairs_equal_those_of_transformers(tmp_path: Path, count: int) -> None:
    model = save_classifier(tmp_path / "model", num_labels=count)
    result = build("classify", model, tmp_path, generator="classifier")
    engine, tokenizer = runtime(result, TorchClassifier)
    pairs = [(text, f"of {text}") for text in TEXTS[:4]]
    reference = AutoModelForSequenceClassification.from_pretrained(model)
    loader = "AutoModelForSequenceClassification"
    reader = AutoTokenizer.from_pretrained(model)
    for each in (engine, converted(model, tmp_path / "ov", loader, None, 0)):
        found = values(each, tokenizer, [*pairs, *TEXTS])
        for text, row in zip([*pairs, *((text, None) for text in TEXTS)], found, strict=True):
            tokens = reader(*text, return_tensors="pt", truncation=False)
            with torch.inference_mode():
                logits = reference(**tokens).logits[0].numpy()
            np.testing.assert_allclose(row, logits, atol=1e-5)


def test_a_text_is_cut_as_transformers_cuts_it(tmp_path: Path) -> None:
    model = save_encoder(tmp_path / "model")
    _, tokenizer = runtime(build("embed", model, tmp_path, generator="encoder"), TorchEncoder)
    reader = AutoTokenizer.from_pretrained(model)
    for texts in (("word " * 90,), ("word " * 90, "another " * 9), ("short", "long " * 90)):
        cut = reader(*texts, truncation=True, max_length=20)["input_ids"]
        assert tokenizer.encode_pair(*texts, limit=20)[0] == cut
        assert len(tokenizer.encode_pair(*texts)[0]) > 20


def test_a_file_that_the_model_brings_is_used_as_it_is(tmp_path: Path) -> None:
    model = save_encoder(tmp_path / "model")
    (model / "onnx").mkdir()
    inputs = ("input_ids", "attention_mask", "token_type_ids")
    example = tuple(torch.ones(2, 3, dtype=torch.int64) for _ in inputs)
    shapes = tuple({0: torch.export.Dim.DYNAMIC, 1: torch.export.Dim.DYNAMIC} for _ in inputs)
    torch.onnx.export(
        AutoModel.from_pretrained(model).eval(), example, model / "onnx" / "model.onnx",
        input_names=inputs, output_names=["last_hidden_state"], dynamic_shapes=shapes,
        verbose=False,
    )  # fmt: skip
    (model / "model.safetensors").unlink()
    result = build("embed", model, tmp_path, generator="encoder-openvino", file="onnx/model.onnx")
    engine, tokenizer = runtime(result, OpenVinoValues)
    expected = [pooled(save_encoder(tmp_path / "same"), text, "mean") for text in TEXTS]
    np.testing.assert_allclose(values(engine, tokenizer, TEXTS), expected, atol=1e-5)
    config = json.loads((model / "config.json").read_text())
    write(model / "config.json", {**config, "architectures": ["BertForSequenceClassification"]})
    with pytest.raises(LLMServeError, match="it has no output of logits"):
        build("classify", model, tmp_path, generator="classifier-openvino", file="onnx/model.onnx")
