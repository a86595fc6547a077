"""Client libraries and bad input, with an embedder, a reranker and a classifier in one Triton."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import httpx2 as httpx
import numpy as np
import openai
import pytest
from playwright.sync_api import Page, expect
from safetensors.torch import load_file, save_file

from llmserve.testing import LiveTriton
from llmserve.testing.tiny_encoders import CONTEXT, save_classifier, save_encoder

from .process import Gateway

pytestmark = pytest.mark.long

TEXTS = ["one", "two words", "and three more"]
QUERY, DOCUMENTS = "which?", ["one", "two words", "", "three more words"]
LABELS = ["no", "perhaps", "yes"]
HOLE = "+"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("values")


@pytest.fixture(scope="module")
def embedder(triton: LiveTriton, folder: Path) -> str:
    """Its weights for one letter are no numbers."""
    source = save_encoder(folder / "embedder", pooling="mean_tokens")
    weights = load_file(source / "model.safetensors")
    (name,) = (name for name in weights if name.endswith("word_embeddings.weight"))
    words = json.loads((source / "tokenizer.json").read_text())["model"]["vocab"]
    weights[name][words[HOLE]] = float("nan")
    save_file(weights, source / "model.safetensors", {"format": "pt"})
    return triton.build("embed", str(source))


@pytest.fixture(scope="module")
def reranker(triton: LiveTriton, folder: Path) -> str:
    return triton.build("rerank", str(save_classifier(folder / "reranker", num_labels=1)))


@pytest.fixture(scope="module")
def classifier(triton: LiveTriton, folder: Path) -> str:
    labels = dict(enumerate(LABELS))
    return triton.build("classify", str(save_classifier(folder / "labels", id2label=labels)))


@pytest.fixture(scope="module")
def vectors(triton: LiveTriton, embedder: str) -> Any:
    return triton.client.embed(embedder, TEXTS)


@pytest.fixture(scope="module")
def order(triton: LiveTriton, reranker: str) -> list[tuple[int, float]]:
    ranked = triton.client.rerank(reranker, QUERY, DOCUMENTS)
    return [(document.index, document.score) for document in ranked]


def close(got: Any, expected: Any) -> None:
    np.testing.assert_allclose(np.asarray(got), expected, atol=1e-5)


def test_openai_embeds(gateway: Gateway, embedder: str, vectors: Any) -> None:
    client: Any = gateway.client().embeddings
    for encoding in ({}, {"encoding_format": "float"}, {"encoding_format": "base64"}):
        answer = client.create(model=embedder, input=TEXTS, **encoding)
        got = [entry.embedding for entry in answer.data]
        if encoding.get("encoding_format") == "base64":
            got = [np.frombuffer(base64.b64decode(text), "<f4").tolist() for text in got]
        close(got, vectors)
        assert [entry.index for entry in answer.data] == [0, 1, 2]
        assert answer.usage.total_tokens == answer.usage.prompt_tokens > len(TEXTS)
    (one,) = client.create(model=embedder, input=TEXTS[0], dimensions=4).data
    close(one.embedding, vectors[0, :4] / np.linalg.norm(vectors[0, :4]))


def test_token_ids_are_embedded_as_their_text_is(
    gateway: Gateway, embedder: str, vectors: Any
) -> None:
    ids = [gateway.post("/tokenize", {"model": embedder, "prompt": text}).json()["tokens"]
           for text in TEXTS]  # fmt: skip
    client = gateway.client().embeddings
    close([entry.embedding for entry in client.create(model=embedder, input=ids).data], vectors)
    close(client.create(model=embedder, input=ids[1]).data[0].embedding, vectors[1])


def test_langchain_embeds(gateway: Gateway, embedder: str, vectors: Any) -> None:
    from langchain_openai import OpenAIEmbeddings

    # Its own tokenizer would cut texts into the tokens of OpenAI's models.
    options: Any = {"base_url": gateway.url, "api_key": "none", "model": embedder,
                    "check_embedding_ctx_length": False}  # fmt: skip
    langchain = OpenAIEmbeddings(**options)
    close(langchain.embed_documents(TEXTS), vectors)
    close(langchain.embed_query(TEXTS[2]), vectors[2])


def test_cohere_ranks(gateway: Gateway, reranker: str, order: list[tuple[int, float]]) -> None:
    import cohere

    new: Any = cohere.ClientV2(api_key="none", base_url=gateway.root)
    old: Any = cohere.Client(api_key="none", base_url=gateway.root)
    for client, more in ((new, {}), (old, {}), (new, {"top_n": 2, "max_tokens_per_doc": 4096})):
        answer = client.rerank(model=reranker, query=QUERY, documents=DOCUMENTS, **more)
        found = [(result.index, result.relevance_score) for result in answer.results]
        close(found, order[: more.get("top_n")])
    returned = old.rerank(model=reranker, query=QUERY, documents=DOCUMENTS, return_documents=True)
    assert returned.results[0].document.text == DOCUMENTS[order[0][0]]


def test_one_long_document_leaves_the_others_their_ranks(
    gateway: Gateway, reranker: str, order: list[tuple[int, float]]
) -> None:
    import cohere

    documents = [*DOCUMENTS, "word " * 1000]
    for client in (
        cohere.ClientV2(api_key="none", base_url=gateway.root),
        cohere.Client(api_key="none", base_url=gateway.root),
    ):
        answer: Any = client.rerank(model=reranker, query=QUERY, documents=documents)
        found = [(r.index, r.relevance_score) for r in answer.results]
        close([pair for pair in found if pair[0] < len(DOCUMENTS)], order)
        assert answer.meta.warnings == [
            f"documents[{len(DOCUMENTS)}] reaches the {CONTEXT} tokens that the model reads, "
            "and is cut there"
        ]
    texts = {"model": reranker, "query": QUERY, "texts": documents}
    ranked = gateway.post("/rerank", texts).json()
    close([(one["index"], one["score"]) for one in ranked], found)


def test_scores_and_labels_are_those_of_the_model(
    triton: LiveTriton,
    gateway: Gateway,
    reranker: str,
    classifier: str,
    order: list[tuple[int, float]],
) -> None:
    body = {"model": reranker, "text_1": QUERY, "text_2": DOCUMENTS}
    scores = [entry["score"] for entry in gateway.post("/v1/score", body).json()["data"]]
    close(scores, [score for _, score in sorted(order)])
    (labels,) = triton.client.classify(classifier, TEXTS[:1])
    (data,) = gateway.post("/classify", {"model": classifier, "input": TEXTS[0]}).json()["data"]
    assert data["label"] == labels.label
    close(data["probs"], [labels.probabilities[label] for label in LABELS])
    assert data["labels"] == LABELS


def test_models_say_what_they_are_for(
    gateway: Gateway, embedder: str, reranker: str, classifier: str, model: str
) -> None:
    models = {entry["id"]: entry for entry in httpx.get(f"{gateway.url}/models").json()["data"]}
    tasks = {embedder: "embed", reranker: "rerank", classifier: "classify", model: "generate"}
    assert {name: models[name]["task"] for name in tasks} == tasks
    assert models[embedder]["max_model_len"] == models[reranker]["max_model_len"] == CONTEXT
    with pytest.raises(openai.BadRequestError, match="computes embeddings, at /v1/embeddings"):
        gateway.client().completions.create(model=embedder, prompt="a")
    with pytest.raises(openai.BadRequestError, match="generates text, at /v1/chat/completions"):
        gateway.client().embeddings.create(model=model, input="a")


def test_bad_input_costs_nobody_else_anything(
    gateway: Gateway, embedder: str, reranker: str, vectors: Any
) -> None:
    embed: dict[str, Any] = {"model": embedder, "input": TEXTS}
    rank = {"model": reranker, "query": QUERY, "documents": DOCUMENTS}
    bad = [
        ("/v1/embeddings", {**embed, "input": ["a"] * 10_000}, None),
        ("/v1/embeddings", {**embed, "input": ["a", ""]}, "empty_prompt"),
        ("/v1/embeddings", {**embed, "input": "word " * 200_000}, "context_length_exceeded"),
        ("/v1/embeddings", {**embed, "input": ["a", "word " * 60]}, "context_length_exceeded"),
        ("/v1/embeddings", {**embed, "input": [1 << 30]}, "invalid_value"),
        ("/v1/embeddings", {**embed, "dimensions": 4096}, "invalid_value"),
        ("/v1/embeddings", {**embed, "prompt_name": "nobody's"}, "invalid_value"),
        (
            "/rerank",
            {**rank, "documents": ["a", "word " * 200_000], "truncate": False},
            "context_length_exceeded",
        ),
        ("/v1/embeddings", {**embed, "input": ["a", HOLE, "b"]}, "not_a_number"),
    ]
    for path, body, code in bad:
        answer = gateway.post(path, body)
        assert answer.status_code == (422 if code == "not_a_number" else 400), answer.text
        assert answer.json()["error"]["code"] == code
        client: Any = gateway.client()
        got = client.embeddings.create(**embed)
        close([entry.embedding for entry in got.data], vectors)
    cut = {**embed, "input": ["a", "word " * 200_000], "truncate": True}
    assert len(gateway.post("/v1/embeddings", cut).json()["data"]) == 2


def test_the_page_shows_a_ranking(
    embedder: str, reranker: str, order: list[tuple[int, float]], page: Page
) -> None:
    page.locator("#tab-rank").click()
    options = page.locator("#rank-model option").evaluate_all("all => all.map((one) => one.value)")
    # Rerankers come first, and nothing that has other answers than scores. Other tests may have
    # loaded others.
    assert options[0].startswith("rerank")
    assert options.index(reranker) < options.index(embedder)
    page.locator("#rank-model").select_option(reranker)
    chats = page.locator("#chat-model option").evaluate_all("all => all.map((one) => one.value)")
    assert not {embedder, reranker} & {*chats}
    page.locator("#query").fill(QUERY)
    page.locator("#documents").fill("\n".join(filter(None, DOCUMENTS)))
    page.keyboard.press("Control+Enter")
    expect(page.locator("#ranking li")).to_have_count(3)
    expected = [DOCUMENTS[index] for index, _ in order if DOCUMENTS[index]]
    assert page.locator("#ranking .text").all_inner_texts() == expected
    widths = page.locator("#ranking .bar div").evaluate_all(
        "all => all.map((one) => one.style.width)"
    )
    scores = [score for index, score in order if DOCUMENTS[index]]
    close([float(width.removesuffix("%")) / 100 for width in widths], scores)
    assert page.evaluate("document.documentElement.scrollWidth") == 360
    page.locator("#documents").fill("word " * 100)
    page.locator("#rank-send").click()
    # It has more tokens than the model reads, and says that it was cut.
    expect(page.locator("#ranking li")).to_have_count(1)
    expect(page.locator("#rank-figures")).to_contain_text("documents[0]")
    assert page.evaluate("document.documentElement.scrollWidth") == 360
    page.locator("#tab-load").click()
    listed = page.locator("#models").inner_text()
    assert f"{embedder} computes embeddings, {CONTEXT} tokens" in listed
    assert f"{reranker} ranks documents" in listed
    assert page.evaluate("document.documentElement.scrollWidth") == 360
