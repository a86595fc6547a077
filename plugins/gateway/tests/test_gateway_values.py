"""Embeddings, rankings, scores and labels, in front of a Triton that computes them at once."""

from __future__ import annotations

import asyncio
import base64
import json
import re
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, TypeVar

import httpx2 as httpx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmserve.client import Completion, Computed, ModelInfo, TensorInfo
from llmserve.errors import (
    ContextLengthError,
    ModelNotReadyError,
    RequestRejectedError,
    ServerError,
)
from llmserve_gateway.dialects import Truncate
from llmserve_gateway.gateway import Settings
from llmserve_gateway.keys import new_key
from llmserve_gateway.value_requests import SCORES, read_embeddings, read_rerank
from llmserve_gateway.values import compute

from .gateways import NO_TRITON, Triton, app_before, ask, request_via

T = TypeVar("T")
TASKS = {"e": "embed", "r": "rerank", "c": "classify", "g": "generate", "x": "summarise-audio"}
LABELS = ["no", "perhaps", "yes"]
ROWS = 4


class Models(Triton):
    """A model for each task; a value tells the length of its text, or of its token ids."""

    all = (SimpleNamespace(url="", running=0),)

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[list[str], list[str] | None]] = []
        self.at_once = self.most_at_once = 0
        self.fails: Exception | None = None
        self.waits: list[float] = []

    async def models(self) -> list[str]:
        return [*TASKS]

    async def model(self, name: str, *, refresh: bool = False) -> ModelInfo:
        if name not in TASKS:
            raise ModelNotReadyError(f"the server does not have {name!r}")
        tensors: Any = {"text_input": None, "text_output": None}
        return ModelInfo(name, "unary", True, ROWS, tensors, tensors, "0.1", task=TASKS[name])

    async def generate(self, name: str, prompt: str, **options: Any) -> Completion:
        report = {"ids": [1, 2], "text": prompt, "context_length": 64, "longest_prompt": 32768,
                  "labels": LABELS if name == "c" else None}  # fmt: skip
        return Completion(json.dumps(report), "stop", 2, 1)

    async def compute(
        self, name: str, texts: list[str], *, pairs: list[str] | None = None, timeout: Any,
        **options: Any,
    ) -> Computed:  # fmt: skip
        self.calls.append((texts, pairs))
        self.requests.append(options)
        self.at_once += 1
        self.most_at_once = max(self.at_once, self.most_at_once)
        await asyncio.sleep(self.waits.pop() if self.waits else 0)
        self.at_once -= 1
        if self.fails is not None:
            raise self.fails
        sizes = [len(options["input_ids"])] if "input_ids" in options else [*map(len, texts)]
        return Computed(self._outputs(name, sizes, pairs), tuple(sizes))

    def _outputs(
        self, name: str, sizes: list[int], pairs: list[str] | None
    ) -> Mapping[str, np.ndarray[Any, Any]]:
        if name == "e":
            return {"embedding": np.array([[size, -0.1, 1 / 3] for size in sizes], np.float32)}
        if name == "r":
            assert pairs is not None
            return {"score": np.array([len(pair) for pair in pairs], np.float32).reshape(-1, 1)}
        order = np.array([["yes", "no", "perhaps"]] * len(sizes), dtype=np.object_)
        shares = np.array([[0.5, 0.375, 0.125]] * len(sizes), np.float32)
        return {"label": order, "probability": shares}


def post(path: str, body: Any, triton: Models | None = None, **more: Any) -> Any:
    return request_via(triton or Models(), path, json=body, **more)


def serve(triton: Models, go: Callable[[httpx.AsyncClient], Awaitable[T]]) -> T:
    """Let a client of one gateway do something."""

    async def run() -> T:
        app = app_before(triton)
        transport = httpx.ASGITransport(app=app)
        async with httpx.AsyncClient(transport=transport, base_url="http://gateway") as client:
            return await go(client)

    return asyncio.run(run())


def vectors(answer: Any) -> Any:
    data = answer.json()["data"]
    assert [entry["index"] for entry in data] == [*range(len(data))]
    return [entry["embedding"] for entry in data]


@pytest.mark.parametrize(
    ("sent", "sizes"),
    [("four", [4]), (["a", "three"], [1, 5]), ([7, 8, 9], [3]), ([[7], [8, 9]], [1, 2])],
    ids=["text", "texts", "ids", "lists of ids"],
)
def test_embeddings_of_texts_and_of_token_ids(sent: Any, sizes: list[int]) -> None:
    answer = post("/v1/embeddings", {"model": "e", "input": sent, "user": "me"})
    assert answer.status_code == 200, answer.text
    assert [vector[0] for vector in vectors(answer)] == sizes
    content = answer.json()
    assert (content["object"], content["model"]) == ("list", "e")
    assert content["usage"] == {"prompt_tokens": sum(sizes), "total_tokens": sum(sizes)}


def test_both_encodings_have_the_same_numbers() -> None:
    body = {"model": "e", "input": ["a", "three"]}
    numbers = np.array(vectors(post("/v1/embeddings", body)), np.float32)
    encoded = vectors(post("/v1/embeddings", {**body, "encoding_format": "base64"}))
    decoded = [np.frombuffer(base64.b64decode(text), "<f4") for text in encoded]
    np.testing.assert_array_equal(numbers, decoded)


@settings(max_examples=30, deadline=None)
@given(st.lists(st.integers(1, 30), min_size=1, max_size=21), st.lists(st.floats(0, 0.003)))
def test_many_texts_keep_their_order(lengths: list[int], waits: list[float]) -> None:
    """A model takes some of them at once, and answers when it likes."""
    triton = Models()
    triton.waits = waits
    request = read_embeddings({"model": "e", "input": ["x" * length for length in lengths]})

    async def go() -> Computed:
        client: Any = triton
        return await compute(client, await triton.model("e"), request, None)

    computed = asyncio.run(go())
    assert computed.outputs["embedding"][:, 0].tolist() == lengths
    assert computed.input_tokens == tuple(lengths)
    assert all(len(call) <= ROWS for call, _ in triton.calls)
    # Others have their turns between them.
    assert triton.most_at_once <= 2


def test_nothing_more_is_asked_for_once_a_call_has_failed() -> None:
    triton = Models()
    triton.fails = RequestRejectedError("no", code="model_failed")
    answer = post("/v1/embeddings", {"model": "e", "input": ["a"] * 21}, triton)
    assert (answer.status_code, len(triton.calls)) == (500, 2)
    triton.fails = None
    assert post("/v1/embeddings", {"model": "e", "input": ["a"] * 21}, triton).status_code == 200


def test_calls_are_not_larger_than_the_model_is_sent_at_once() -> None:
    request = read_embeddings({"model": "e", "input": ["x" * 400_000] * 5})
    assert [len(texts) for texts, _, _ in request.calls(100)] == [2, 2, 1]
    assert request.estimated_tokens == 2_000_000 // 3 + 1


def test_options_reach_the_model_by_any_of_their_names() -> None:
    for sent, expected in (
        ({"dimensions": 2}, {"dimensions": 2}),
        ({"normalize": False}, {"normalize": False}),
        ({"normalize": None}, {}),
        ({"use_activation": False}, {"normalize": False}),
        ({"truncate": True, "prompt_name": "query"}, {"truncate": True, "prompt_name": "query"}),
        ({"truncate": False}, {}),
        ({"truncate_prompt_tokens": -1}, {"truncate": True}),
        ({"truncate_prompt_tokens": 64}, {"truncate": True}),
    ):
        request = read_embeddings({"model": "e", "input": "a", **sent})
        assert request.options == expected
        assert request.unknown == frozenset()


def test_documents_are_ranked_as_jina_and_cohere_do() -> None:
    documents = ["bb", {"text": "dddd"}, "", "bb", "ccc"]
    body = {"model": "r", "query": "which?", "documents": documents, "top_n": 4}

    async def go(client: httpx.AsyncClient) -> None:
        for path, returned in (("/v1/rerank", True), ("/rerank", True), ("/v2/rerank", False)):
            answer = await client.post(path, json=body)
            assert answer.status_code == 200, answer.text
            results = answer.json()["results"]
            # Equals stay in their order.
            assert [result["index"] for result in results] == [1, 4, 0, 3]
            assert [result["relevance_score"] for result in results] == [4, 3, 2, 2]
            assert answer.json()["usage"]["total_tokens"] == 5 * len("which?")
            assert ("document" in results[0]) == returned
            other = await client.post(path, json={**body, "return_documents": not returned})
            (with_text,) = {True: results, False: other.json()["results"]}[returned][:1]
            assert with_text["document"] == {"text": "dddd"}
            assert "document" not in {True: other.json()["results"], False: results}[returned][0]
        for none in (0, None):
            everything = await client.post("/rerank", json={**body, "top_n": none})
            assert len(everything.json()["results"]) == 5

    serve(Models(), go)


def test_scores_are_in_the_order_of_the_texts() -> None:
    triton = Models()

    async def go(client: httpx.AsyncClient) -> None:
        for one, two in SCORES.any_of:
            for first in ("query", ["one", "two", "three"]):
                body = {"model": "r", one: first, two: ["a", "ccc", "bb"]}
                for path in ("/score", "/v1/score"):
                    answer = await client.post(path, json=body)
                    assert answer.status_code == 200, answer.text
                    data = answer.json()["data"]
                    assert data[1] == {"index": 1, "object": "score", "score": 3.0}
                    assert [entry["score"] for entry in data] == [1, 3, 2]
                    assert triton.requests[-1]["x-request-id"] in answer.json()["id"]
                    texts = first if isinstance(first, list) else [first] * 3
                    assert triton.calls[-1] == (texts, ["a", "ccc", "bb"])
            alone = await client.post("/score", json={"model": "r", one: "a", two: "b"})
            assert len(alone.json()["data"]) == 1

    serve(triton, go)


def test_an_embedder_compares_by_the_angle_between_embeddings() -> None:
    triton = Models()
    body = {"model": "e", "query": "a", "documents": ["three", "b", "xx"]}
    answer = post("/rerank", body, triton).json()
    assert [result["index"] for result in answer["results"]] == [1, 2, 0]
    assert answer["usage"]["total_tokens"] == 1 + 5 + 1 + 2
    # Each text once.
    assert sorted(triton.calls) == [(["a"], None), (["three", "b", "xx"], None)]
    vectors = np.array([[size, -0.1, 1 / 3] for size in (1, 5, 1, 2)])
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    scores = [result["relevance_score"] for result in answer["results"]]
    np.testing.assert_allclose(scores, (vectors[0] @ vectors[1:].T)[[1, 2, 0]], atol=1e-6)
    pairs = {"model": "e", "text_1": ["a", "three"], "text_2": ["b", "c"]}
    first, second = post("/score", pairs).json()["data"]
    assert first["score"] == pytest.approx(1)
    assert second["score"] == pytest.approx(vectors[0] @ vectors[1], abs=1e-6)


@pytest.mark.parametrize(
    ("prompts", "sent", "used"),
    [
        (["query", "passage"], {}, [{"prompt_name": "query"}, {"prompt_name": "passage"}]),
        (["query"], {}, [{"prompt_name": "query"}, {}]),
        (["query", "other"], {"prompt_name": "other"}, [{"prompt_name": "other"}] * 2),
        ([], {}, [{}, {}]),
    ],
    ids=["both", "one", "chosen", "none"],
)
def test_an_embedder_reads_questions_and_documents_with_its_own_prompts(
    prompts: list[str], sent: dict[str, Any], used: list[dict[str, Any]]
) -> None:
    triton: Any = Models()
    request = read_rerank({"model": "e", "query": "a", "documents": ["b"], **sent})

    async def go() -> None:
        await compute(triton, await triton.model("e"), request, None, prompts)

    asyncio.run(go())
    assert triton.requests == used


def test_labels_have_probabilities_in_the_order_of_the_classes() -> None:
    triton = Models()
    body = {"model": "c", "input": ["a", "b"], "text_pair": ["c", "d"]}
    first, _ = post("/classify", body, triton).json()["data"]
    assert first == {"index": 0, "label": "yes", "probs": [0.375, 0.125, 0.5], "num_classes": 3,
                     "labels": LABELS}  # fmt: skip
    assert triton.calls == [(["a", "b"], ["c", "d"])]


E_TEXT = {"model": "e", "input": "a"}
R_TEXT = {"model": "r", "query": "q", "documents": ["a"]}
S_TEXT = {"model": "r", "text_1": "a", "text_2": "b"}
C_TEXT = {"model": "c", "input": "a"}


WRONG = [
    ("/v1/embeddings", {"model": "e"}, "input", "non-empty string"),
    ("/v1/embeddings", {**E_TEXT, "input": ""}, "input", "input is empty"),
    ("/v1/embeddings", {**E_TEXT, "input": []}, "input", "non-empty string"),
    ("/v1/embeddings", {**E_TEXT, "input": ["a", ""]}, "input", r"input\[1\] is empty"),
    ("/v1/embeddings", {**E_TEXT, "input": ["a", 7]}, "input", r"input\[1\] must be a text"),
    ("/v1/embeddings", {**E_TEXT, "input": ["a", [7]]}, "input", "not both"),
    ("/v1/embeddings", {**E_TEXT, "input": [[7], []]}, "input", r"input\[1\] must be"),
    ("/v1/embeddings", {**E_TEXT, "input": [-1]}, "input", r"input\[0\] must be"),
    ("/v1/embeddings", {**E_TEXT, "input": [True]}, "input", r"input\[0\] must be"),
    ("/v1/embeddings", {**E_TEXT, "input": {"text": "a"}}, "input", "non-empty string"),
    ("/v1/embeddings", {**E_TEXT, "input": "\ud800"}, "input", "UTF-8"),
    ("/v1/embeddings", {**E_TEXT, "input": ["a"] * 10_000}, "input", "10000 texts.*2048"),
    ("/v1/embeddings", {**E_TEXT, "model": 7}, "model", "non-empty string"),
    ("/v1/embeddings", {**E_TEXT, "encoding_format": "hex"}, "encoding_format", "base64"),
    ("/v1/embeddings", {**E_TEXT, "encoding_format": ["float"]}, "encoding_format", "base64"),
    ("/v1/embeddings", {**E_TEXT, "dimensions": 0}, "dimensions", "at least 1"),
    ("/v1/embeddings", {**E_TEXT, "dimensions": "2"}, "dimensions", "integer"),
    ("/v1/embeddings", {**E_TEXT, "normalize": 1}, "normalize", "true or false"),
    ("/v1/embeddings", {**E_TEXT, "embed_dtype": "int8"}, "embed_dtype", "float32"),
    ("/v1/embeddings", {**E_TEXT, "truncate": "END"}, "truncate", "true or false"),
    ("/v1/embeddings", {**E_TEXT, "truncate_prompt_tokens": 8}, "truncate_prompt_tokens",
     "limit of 64 tokens"),
    ("/v1/embeddings", {**E_TEXT, "truncation_side": "left"}, "truncation_side", "end"),
    ("/v1/rerank", {**R_TEXT, "query": ""}, "query", "non-empty"),
    ("/v1/rerank", {**R_TEXT, "query": ["q"]}, "query", "non-empty"),
    ("/v1/rerank", {**R_TEXT, "documents": "a"}, "documents", "list"),
    ("/v1/rerank", {**R_TEXT, "documents": []}, "documents", "at least one"),
    ("/v1/rerank", {**R_TEXT, "documents": ["a", {"title": "a"}]}, "documents",
     r"documents\[1\] must be a text"),
    ("/v1/rerank", {**R_TEXT, "documents": ["a"] * 10_000}, "documents", "2048"),
    ("/v2/rerank", {**R_TEXT, "top_n": -1}, "top_n", "at least 0"),
    ("/v2/rerank", {**R_TEXT, "max_tokens_per_doc": 8}, "max_tokens_per_doc", "64"),
    ("/v2/rerank", {**R_TEXT, "return_documents": 1}, "return_documents", "true or false"),
    ("/v1/rerank", {**R_TEXT, "rank_fields": ["a"]}, "rank_fields", "only the text"),
    ("/rerank", {**R_TEXT, "use_activation": False}, "use_activation", "raw numbers"),
    ("/score", {"model": "r", "text_1": "a"}, "text_2", "text_1 and text_2"),
    ("/score", {**S_TEXT, "text_1": ["a", "b"]}, "text_1", "2 and 1"),
    ("/v1/score", {**S_TEXT, "text_2": [{"content": []}]}, "text_2", r"text_2\[0\]"),
    ("/classify", {**C_TEXT, "text_pair": ["a", "b"]}, "text_pair", "as many"),
    ("/classify", {**C_TEXT, "input": [1], "text_pair": "a"}, "text_pair", "as many"),
]  # fmt: skip


def test_what_is_wrong_is_said_once_and_the_next_request_is_served() -> None:
    triton = Models()

    async def go(client: httpx.AsyncClient) -> None:
        for path, body, param, words in WRONG:
            # Not the client's own JSON, which refuses half a character.
            answer = await client.post(path, content=json.dumps(body))
            assert answer.status_code == 400, (path, body, answer.text)
            error = answer.json()["error"]
            assert (error["type"], error["param"]) == ("invalid_request_error", param)
            assert len(error["message"]) < 200
            # Where Jina's and Cohere's clients read it.
            also = {"/v1/rerank": "detail", "/rerank": "detail", "/v2/rerank": "message"}.get(path)
            assert also is None or answer.json()[also] == error["message"]
            assert re.search(words, error["message"]), error["message"]
        assert not triton.calls
        for path, body in (("/v1/embeddings", E_TEXT), ("/rerank", R_TEXT), ("/score", S_TEXT),
                           ("/classify", C_TEXT)):  # fmt: skip
            assert (await client.post(path, json=body)).status_code == 200

    serve(triton, go)


CHATS: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "Hi"}]},
    "/v1/completions": {"prompt": "Hi"},
    "/v1/responses": {"input": "Hi"},
    "/v1/messages": {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4},
}


def test_nobody_talks_to_an_embedder() -> None:
    triton = Models()
    what = "'e' computes embeddings, at /v1/embeddings: this needs one that generates text"

    async def go(client: httpx.AsyncClient) -> None:
        for path, body in CHATS.items():
            for stream in (False, True):
                answer = await client.post(path, json={"model": "e", "stream": stream, **body})
                assert answer.status_code == 400
                assert answer.json()["error"]["message"] == what

    serve(triton, go)
    assert not triton.requests


OTHERS = [
    ("/v1/embeddings", E_TEXT, "g", "'g' generates text, at /v1/chat/completions: "
     "this needs one that computes embeddings"),
    ("/v1/embeddings", E_TEXT, "r", "'r' ranks documents by a query, at /v1/rerank: "
     "this needs one that computes embeddings"),
    ("/classify", C_TEXT, "x", "'x' is for summarise-audio: this needs one that tells which "
     "labels a text has"),
    ("/score", S_TEXT, "c", "'c' tells which labels a text has, at /classify: this needs one "
     "that ranks documents by a query or one that computes embeddings"),
]  # fmt: skip


def test_a_model_for_something_else_is_named() -> None:
    async def go(client: httpx.AsyncClient) -> None:
        for path, body, name, what in OTHERS:
            answer = await client.post(path, json={**body, "model": name})
            assert answer.status_code == 400
            assert answer.json()["error"] == {
                "message": what, "type": "invalid_request_error", "param": "model",
                "code": "unsupported_task",
            }  # fmt: skip
            missing = await client.post(path, json={**body, "model": "none"})
            code = missing.json()["error"]["code"]
            assert (missing.status_code, code) == (404, "model_not_found")

    serve(Models(), go)


def test_a_text_that_is_too_long_is_refused_with_what_would_cut_it() -> None:
    triton = Models()
    details = {"context": 64, "prompt_tokens": 70}
    triton.fails = ContextLengthError("70", code="context_length_exceeded", details=details)
    error = post("/v1/embeddings", E_TEXT, triton).json()["error"]
    assert error["code"] == "context_length_exceeded"
    assert "64 tokens" in error["message"]
    assert error["message"].endswith("70 tokens; truncate: true has it cut")


def test_a_giant_is_refused_before_its_model_reads_it_unless_it_is_to_be_cut() -> None:
    triton = Models()
    giant = {"model": "e", "input": ["a", "x" * 1_000_000]}
    ranking = {"model": "r", "query": "q", "documents": ["x" * 1_000_000], "truncate": False}

    async def go(client: httpx.AsyncClient) -> None:
        # A model that is known.
        assert (await client.post("/v1/embeddings", json=E_TEXT)).status_code == 200
        assert (await client.post("/rerank", json=R_TEXT)).status_code == 200
        triton.calls.clear()
        for path, body, param in (
            ("/v1/embeddings", giant, "input"),
            ("/rerank", ranking, "query"),
        ):
            answer = await client.post(path, json=body)
            error = answer.json()["error"]
            assert answer.status_code == 400
            assert (error["code"], error["param"]) == ("context_length_exceeded", param)
            assert not triton.calls
            assert (await client.post(path, json={**body, "truncate": True})).status_code == 200
            assert triton.calls
            triton.calls.clear()

    serve(triton, go)


class Cutting(Models):
    """Models that read at most 64 characters, and cut what is longer if they are to."""

    async def model(self, name: str, *, refresh: bool = False) -> ModelInfo:
        info = await super().model(name, refresh=refresh)
        cut = TensorInfo("truncate", "BOOL", (1,), optional=True)
        return replace(info, inputs={**info.inputs, "truncate": cut})

    async def compute(self, name: str, texts: list[str], **options: Any) -> Computed:
        computed = await super().compute(name, texts, **options)
        sizes = [max(map(len, both)) for both in zip(texts, options["pairs"] or texts, strict=True)]
        if max(sizes) > 64 and not options.get("truncate"):
            raise ContextLengthError("70", code="context_length_exceeded", details={"context": 64})
        return replace(computed, input_tokens=tuple(min(size, 64) for size in sizes))


@pytest.mark.parametrize("truncate", ["ranking", "all", "none"])
def test_texts_that_are_too_long_are_cut_where_that_is_the_setting_and_that_is_said(
    truncate: Truncate,
) -> None:
    settings = Settings(NO_TRITON, truncate=truncate)
    for path, kind, body in (
        ("/rerank", "ranking", {"model": "r", "query": "q", "documents": ["a", "b" * 70]}),
        ("/v2/rerank", "ranking", {"model": "e", "query": "q", "documents": ["a", "b" * 70]}),
        ("/score", "ranking", {"model": "r", "text_1": "q", "text_2": ["a", "b" * 70]}),
        ("/v1/embeddings", "all", {"model": "e", "input": ["a", "b" * 70]}),
        ("/classify", "all", {"model": "c", "input": ["a", "b" * 70]}),
    ):
        for said in ({}, {"truncate": True}, {"truncation": True}, {"truncate": False}):
            answer = post(path, {**body, **said}, Cutting(), settings=settings)
            wanted = next(iter(said.values())) if said else truncate in (kind, "all")
            assert answer.status_code == (200 if wanted else 400), (path, said)
            if wanted:
                (warning,) = answer.json()["meta"]["warnings"]
                assert re.match(r"[a-z_2]+\[1\] reaches the 64 tokens", warning)
        fitting = json.loads(json.dumps(body).replace("b" * 70, "b"))
        answer = post(path, fitting, Cutting(), settings=settings).json()
        assert "warnings" not in answer.get("meta", {})
    older = post("/rerank", R_TEXT, Models(), settings=settings)
    assert older.status_code == 200, "a model that cannot cut is not asked to"
    ids = {"model": "e", "input": [[7], [8, 9]]}
    assert post("/v1/embeddings", ids, Models(), settings=settings).status_code == 200


def test_voyages_shape_is_that_of_its_fields() -> None:
    body = {"model": "r", "query": "q", "documents": ["a", "ccc", "bb"], "top_k": 2}
    answer = post("/v1/rerank", {**body, "truncation": True, "return_documents": True}).json()
    assert answer["data"] == [{"index": 1, "relevance_score": 3.0, "document": "ccc"},
                              {"index": 2, "relevance_score": 2.0, "document": "bb"}]  # fmt: skip
    assert answer["usage"]["total_tokens"] > 0
    assert "results" not in answer
    assert "document" not in post("/v1/rerank", body).json()["data"][0]
    embedded = {"model": "e", "input": ["a"], "input_type": None, "truncation": True,
                "output_dtype": "float", "output_dimension": 2}  # fmt: skip
    triton = Models()
    assert post("/v1/embeddings", embedded, triton).status_code == 200
    assert triton.requests[-1]["dimensions"] == 2
    refused = post("/v1/embeddings", {**embedded, "output_dtype": "int8"}).json()["error"]
    assert refused["param"] == "output_dtype"


def test_hugging_faces_inference_has_its_own_paths_and_names_no_model() -> None:
    embed = {"inputs": ["a", "three"], "normalize": True, "truncate": True}
    vectors = [pytest.approx([size, -0.1, 1 / 3]) for size in (1, 5)]
    assert post("/embed", embed).json() == vectors
    assert len(post("/embed", {"inputs": "a"}).json()) == 1
    body = {"query": "q", "texts": ["a", "ccc", "bb"], "raw_scores": False,
            "truncation_direction": "Right"}  # fmt: skip
    ranked = [{"index": 1, "score": 3.0}, {"index": 2, "score": 2.0}, {"index": 0, "score": 1.0}]
    assert post("/rerank", body).json() == ranked
    texts = post("/rerank", {**body, "return_text": True}).json()
    assert [entry["text"] for entry in texts] == ["ccc", "bb", "a"]
    assert post("/rerank", {**body, "model": "e"}).status_code == 200
    wrong = {"raw_scores": True, "texts": [], "truncation_direction": "Left"}
    for param, value in wrong.items():
        answer = post("/rerank", {**body, param: value})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)

    class TextAlone(Models):
        async def models(self) -> list[str]:
            return ["g"]

    answer = post("/rerank", body, TextAlone())
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "model")


def test_a_number_that_is_none_is_no_answer() -> None:
    class Broken(Models):
        def _outputs(self, *_: Any) -> Any:
            return {"embedding": np.array([[np.nan, 1]], np.float32)}

    answer = post("/v1/embeddings", E_TEXT, Broken())
    assert (answer.status_code, answer.json()["error"]["code"]) == (422, "not_a_number")
    failing = Models()
    failing.fails = RequestRejectedError("NaN", code="not_a_number")
    assert post("/v1/embeddings", E_TEXT, failing).status_code == 422


def test_a_query_counts_for_each_of_its_documents() -> None:
    documents = [str(number) for number in range(1000)]
    request = read_rerank({"model": "r", "query": "x" * 300, "documents": documents})
    assert request.estimated_tokens == pytest.approx(100_000, rel=0.02)
    assert len(request.prompts) == 1001
    body = {"model": "r", "query": "x" * 40_000, "documents": documents}
    answer = post("/rerank", body)
    assert (answer.status_code, answer.json()["error"]["code"]) == (413, "request_too_large")


def test_keys_and_limits_hold_for_values(tmp_path: Any) -> None:
    keys = tmp_path / "keys"
    key = new_key(keys, "me", models=["e"], tokens_per_minute=1000)
    guarded = Settings(NO_TRITON, keys=keys)
    headers = {"authorization": f"Bearer {key}"}
    assert ask(guarded, "POST", "/v1/embeddings", json=E_TEXT).status_code == 401
    assert post("/rerank", R_TEXT, settings=guarded, headers=headers).status_code == 403
    long = {"model": "e", "input": ["x" * 3000]}
    statuses = [
        answer.status_code
        for answer in post("/v1/embeddings", long, settings=guarded, headers=headers, times=2)
    ]
    assert statuses == [200, 429]


def test_metrics_count_what_was_read_and_models_say_what_they_are_for() -> None:
    async def go(client: httpx.AsyncClient) -> str:
        await client.post("/v1/embeddings", json={"model": "e", "input": ["four", "a"]})
        models = (await client.get("/v1/models")).json()["data"]
        assert {model["id"]: model["task"] for model in models} == TASKS
        return (await client.get("/metrics")).text

    text = serve(Models(), go)
    assert 'vllm:prompt_tokens_total{model_name="e"} 5.0' in text
    assert 'llmserve_requests_total{model_name="e",outcome="stop"} 1.0' in text


def test_when_one_side_of_pairs_fails_the_other_is_not_computed() -> None:
    class OneSided(Models):
        async def compute(self, name: str, texts: list[str], **options: Any) -> Computed:
            if texts == ["q"]:
                raise ServerError("the query's side failed")
            self.calls.append((texts, None))
            await asyncio.sleep(0.02)
            return await super().compute(name, texts, **options)

    triton = OneSided()

    async def go(client: httpx.AsyncClient) -> None:
        body = {"model": "e", "query": "q", "documents": [f"d{n}" for n in range(40 * ROWS)]}
        assert (await client.post("/rerank", json=body)).status_code >= 500
        asked = len(triton.calls)
        await asyncio.sleep(0.2)
        assert len(triton.calls) == asked < 40

    serve(triton, go)
