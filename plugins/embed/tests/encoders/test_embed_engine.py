"""Values equal those of transformers, alone and in any batch."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from functools import partial
from http.server import BaseHTTPRequestHandler
from itertools import zip_longest
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from transformers import (
    CONFIG_MAPPING,
    AutoModel,
    AutoModelForSequenceClassification,
    AutoTokenizer,
)

import llmserve
from llmserve import BuildResult
from llmserve.errors import LLMServeError, OutputError
from llmserve.graphs import parts
from llmserve.plugin import Ended, ModelSource, max_length
from llmserve.runtime import Generation, Params, TransformersTokenizer
from llmserve.runtime.answer.reading import encode
from llmserve.testing import run
from llmserve.testing.tiny_encoders import (
    CONTEXT,
    save_classifier,
    save_decoder,
    save_encoder,
    save_graph,
    write,
)
from llmserve.testing.web import http_server, reply
from llmserve_embed import convert
from llmserve_embed.compiled import MODEL, OpenVinoNetwork
from llmserve_embed.engine import OpenVinoValues, Packed, TorchClassifier, TorchEncoder

pytestmark = pytest.mark.long

COMMIT = "0123456789abcdef0123456789abcdef01234567"
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
    pairs = [text if isinstance(text, tuple) else (text, None) for text in texts]
    read = [tokenizer.encode_pair(*pair) for pair in pairs]
    return values_of_ids(engine, [ids for ids, _ in read], [segments for _, segments in read])


def values_of_ids(engine: Any, rows: Sequence[list[int]], segments: Sequence[Any] = ()) -> Any:
    generations = [
        Generation(ids, Params(), max_tokens=0, eos_ids=frozenset(), decode=str, segments=of_which)
        for ids, of_which in zip_longest(rows, segments)
    ]
    engine.generate(generations, None)
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


def converted(
    model: Path, target: Path, loader: str, pooling: str | None, padding: int, form: str = "auto"
) -> Any:
    """Return an engine of OpenVINO; a build would convert in a process of its own."""
    if not target.is_dir():
        convert.main(model, target, {
            "loader": loader, "padding": padding, "weight_format": form, "pickle": False,
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


@pytest.mark.parametrize(("form", "width", "near"), [("int8", 1, 0.02), ("bf16", 2, 0.02)])
def test_weights_are_stored_in_the_requested_format(
    tmp_path: Path, form: str, width: int, near: float
) -> None:
    model = save_encoder(tmp_path / "model")
    engine = converted(model, tmp_path / "ov", "AutoModel", "mean", 0, form)
    found, expected = values_of_ids(engine, [[5, 6, 7, 8]])[0], AutoModel.from_pretrained(model)
    with torch.inference_mode():
        states = expected(torch.tensor([[5, 6, 7, 8]])).last_hidden_state[0].mean(0).numpy()
    assert 0 < np.abs(found - states).max() < near * np.abs(states).max()
    stored = (tmp_path / "ov" / "openvino_model.bin").stat().st_size
    assert stored < (width + 1) * sum(weight.numel() for weight in expected.parameters())


def test_a_large_model_is_compared_part_by_part(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, checked = save_encoder(tmp_path / "model", "roberta"), []
    check = convert.check

    def noted(*given: Any) -> float:
        checked.append(check(*given))
        return checked[-1]

    monkeypatch.setattr(convert, "check", noted)
    monkeypatch.setattr(convert, "parts", partial(parts, limit=1))
    engine = converted(model, tmp_path / "ov", "AutoModel", "mean", 1)
    assert len(checked) == 2
    assert max(checked) < 1e-5
    tokens = AutoTokenizer.from_pretrained(model)(["some words"], truncation=False)["input_ids"]
    np.testing.assert_allclose(
        values_of_ids(engine, tokens)[0], pooled(model, "some words", "mean"), atol=1e-5
    )


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


def test_a_decoder_takes_a_texts_last_token_whatever_it_is(tmp_path: Path) -> None:
    """Its configuration names no padding, and the id 0 may be a token like others."""
    model = save_decoder(tmp_path / "model")
    result = build("classify", model, tmp_path, generator="classifier")
    padding = result.manifest.components["generator"]["settings"]["padding"]
    assert padding == json.loads((model / "config.json").read_text())["eos_token_id"]
    engine, _ = runtime(result, TorchClassifier)
    reference = AutoModelForSequenceClassification.from_pretrained(model)
    loader = "AutoModelForSequenceClassification"
    texts = [[5, 6, 0], [7, 0], [5, 6, 9, 8, 0, 0], [0]]
    for each in (engine, converted(model, tmp_path / "ov", loader, None, padding)):
        for ids, row in zip(texts, values_of_ids(each, texts), strict=True):
            with torch.inference_mode():
                logits = reference(input_ids=torch.tensor([ids])).logits[0].numpy()
            np.testing.assert_allclose(row, logits, atol=1e-5)


def test_a_text_is_cut_as_transformers_cuts_it(tmp_path: Path) -> None:
    model = save_encoder(tmp_path / "model")
    _, tokenizer = runtime(build("embed", model, tmp_path, generator="encoder"), TorchEncoder)
    reader = AutoTokenizer.from_pretrained(model)
    for texts in (("word " * 90,), ("word " * 90, "another " * 9), ("short", "long " * 90)):
        cut = reader(*texts, truncation=True, max_length=20)["input_ids"]
        assert tokenizer.encode_pair(*texts, limit=20)[0] == cut
        assert len(tokenizer.encode_pair(*texts)[0]) > 20


def test_a_long_text_whose_beginning_is_cut_is_read_to_its_end(tmp_path: Path) -> None:
    model = save_encoder(tmp_path / "model")
    named = json.loads((model / "tokenizer_config.json").read_text())
    write(model / "tokenizer_config.json", {**named, "truncation_side": "left"})
    _, tokenizer = runtime(build("embed", model, tmp_path, generator="encoder"), TorchEncoder)
    reader = AutoTokenizer.from_pretrained(model)
    parts: Any = SimpleNamespace(
        tokenizer=tokenizer, generator=SimpleNamespace(context_length=CONTEXT)
    )
    text = "some words " * 9_000 + "the end, at last"
    ids, _ = encode(text, None, Params(truncate=True), parts)
    assert ids == reader(text, truncation=True, max_length=CONTEXT)["input_ids"]


OFFSETS: dict[str, dict[str, Any]] = {
    "camembert": {},
    "data2vec-text": {},
    "esm": {"position_embedding_type": "absolute", "mask_token_id": 5},
    "ibert": {},
    "longformer": {"attention_window": 8},
    "luke": {"entity_vocab_size": 5, "entity_emb_size": 8},
    "mpnet": {},
    "roberta": {},
    "roberta-prelayernorm": {},
    "xlm-roberta": {},
    "xlm-roberta-xl": {},
    "xmod": {"languages": ["en_XX"], "default_language": "en_XX"},
    "bert": {},
}


@pytest.mark.parametrize("family", OFFSETS)
def test_a_text_may_have_as_many_tokens_as_the_model_has_places_for(
    tmp_path: Path, family: str
) -> None:
    config = CONFIG_MAPPING[family](
        vocab_size=50, hidden_size=8, num_hidden_layers=1, num_attention_heads=2,
        intermediate_size=8, max_position_embeddings=26, pad_token_id=1, **OFFSETS[family],
    )  # fmt: skip
    config.save_pretrained(tmp_path)
    most = max_length(ModelSource("model", tmp_path))
    assert most == (26 if family == "bert" else 24)
    model = AutoModel.from_config(config).eval()
    with torch.inference_mode():
        model(torch.full((1, most), 7))
        with pytest.raises((IndexError, RuntimeError)):
            model(torch.full((1, most + 1), 7))


@pytest.mark.parametrize(
    ("free", "why"),
    [(4096, "0 MB free: the disk is full"), (1 << 30, "1074 MB free: iostream error")],
)
def test_a_full_disk_is_no_fault_of_the_model(
    free: int, why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object, **__: object) -> None:
        raise RuntimeError("basic_ios::clear: iostream error")

    def here(command: Sequence[str], **_: object) -> Ended:
        left = SimpleNamespace(free=free)
        monkeypatch.setattr("llmserve.builder.programs.shutil.disk_usage", lambda _: left)
        with pytest.raises(SystemExit) as ended:
            convert.main(Path(command[-3]), Path(command[-2]), json.loads(command[-1]))
        return Ended(int(str(ended.value.code)), "iostream error")

    monkeypatch.setattr("llmserve_embed.convert.ov.save_model", full)
    monkeypatch.setattr("llmserve_embed.prepare.run_program", here)
    model = save_encoder(tmp_path / "model")
    with pytest.raises(OutputError, match=f"cannot be written, with {why}: make some space"):
        build("embed", model, tmp_path, generator="encoder-openvino")
    assert not (tmp_path / "repository").exists()


def test_a_file_that_the_model_brings_is_used_as_it_is(tmp_path: Path) -> None:
    model = save_encoder(tmp_path / "model")
    save_graph(model)
    (model / "model.safetensors").unlink()
    with pytest.raises(LLMServeError, match="has no weights that can be converted") as error:
        build("embed", model, tmp_path, generator="encoder-openvino")
    assert "--set file=onnx/model.onnx" in str(error.value.hint)
    result = build("embed", model, tmp_path, generator="encoder-openvino", file="onnx/model.onnx")
    engine, tokenizer = runtime(result, OpenVinoValues)
    expected = [pooled(save_encoder(tmp_path / "same"), text, "mean") for text in TEXTS]
    np.testing.assert_allclose(values(engine, tokenizer, TEXTS), expected, atol=1e-5)
    config = json.loads((model / "config.json").read_text())
    write(model / "config.json", {**config, "architectures": ["BertForSequenceClassification"]})
    with pytest.raises(LLMServeError, match="it has no output of logits"):
        build("classify", model, tmp_path, generator="classifier-openvino", file="onnx/model.onnx")


def test_a_file_of_a_model_on_the_hub_comes_with_its_weights_and_no_other_does(
    tmp_path: Path,
) -> None:
    model = save_encoder(tmp_path / "model")
    save_graph(model, external=True)
    (model / "model.safetensors").unlink()
    assert (model / "onnx" / "model.onnx.data").is_file()
    (model / "onnx" / "other.onnx").write_bytes(b"not for us")
    files = {str(p.relative_to(model)): p for p in model.rglob("*") if p.is_file()}
    siblings = [{"rfilename": name} for name in files]
    page = json.dumps({"id": "acme/tiny", "sha": COMMIT, "siblings": siblings}).encode()
    asked = []

    def serve(request: BaseHTTPRequestHandler) -> None:
        if request.path.startswith("/api/models/acme/tiny"):
            reply(request, page)
            return
        name = request.path.partition("/resolve/")[2].partition("/")[2]
        content = files[name].read_bytes() if name in files else b""
        asked.append(name)
        etag = name.replace("/", "-")
        headers = {"ETag": f'"{etag}"', "X-Repo-Commit": COMMIT, "X-Linked-Size": str(len(content))}
        reply(request, content, 200 if content else 404, headers)

    clean = {key: value for key, value in os.environ.items() if not key.startswith("HF_")}
    command = [
        *("build", "--plugin", "embed", "--generator", "encoder-openvino", "--model", "acme/tiny"),
        *("--output", str(tmp_path / "repository")),
    ]
    with http_server(serve) as url:
        env = {**clean, "HF_HOME": str(tmp_path / "home"), "HF_ENDPOINT": url}
        unnamed = run(*command, env=env)
        done = run(*command, "--set", "file=onnx/model.onnx", env=env)
    assert "acme/tiny has no weights that can be converted" in unnamed.stderr
    assert done.returncode == 0, done.stderr
    assert "onnx/other.onnx" not in asked
    built = tmp_path / "repository" / "tiny" / "1" / "openvino"
    assert {path.name for path in built.iterdir()} == {"model.onnx", "model.onnx.data"}
