"""Ollama's client for Python and LangChain's classes over it, unchanged, against a real model."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import ollama
import pytest
from langchain_ollama import ChatOllama, OllamaEmbeddings, OllamaLLM

from llmserve.testing import LiveTriton
from llmserve.testing.tiny_encoders import save_encoder

from .process import Gateway

pytestmark = pytest.mark.long

QUESTION = "What is the capital of Japan?"
MESSAGES = [{"role": "user", "content": QUESTION}]
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"enum": ["Tokyo", "Paris"]}},
    "required": ["city"],
}
FEW: Any = {"num_predict": 5, "temperature": 0}


@pytest.fixture(scope="module")
def client(gateway: Gateway) -> ollama.Client:
    return ollama.Client(host=gateway.root)


@pytest.fixture(scope="module")
def embedder(triton: LiveTriton, tmp_path_factory: pytest.TempPathFactory) -> str:
    return triton.build("embed", str(save_encoder(tmp_path_factory.mktemp("embedder"))))


def get_weather(city: str) -> str:
    """Look up the weather.

    Args:
        city: Where.
    """
    return city


def test_chats_and_texts_come_whole_and_in_lines(client: ollama.Client, model: str) -> None:
    whole = client.chat(f"{model}:latest", MESSAGES, options=FEW)
    assert (whole.done, whole.done_reason, whole.eval_count) == (True, "length", 5)
    parts = list(client.chat(model, MESSAGES, options=FEW, stream=True))
    assert "".join(part.message.content or "" for part in parts) == whole.message.content != ""
    assert (parts[-1].eval_count, parts[-1].done) == (5, True)
    raw: Any = {"prompt": "The capital of Japan is", "raw": True, "options": FEW}
    text = client.generate(model, **raw).response
    pieces = client.generate(model, **raw, stream=True)
    assert "".join(piece.response or "" for piece in pieces) == text
    assert client.generate(model, "").done_reason == "load"


def test_answers_have_a_form_calls_and_log_probabilities(client: ollama.Client, model: str) -> None:
    answer = client.chat(model, MESSAGES, format=SCHEMA, options={"num_predict": 64})
    assert json.loads(answer.message.content or "").keys() == {"city"}
    call = {"function": {"name": "get_weather", "arguments": {"city": "Tokyo"}}}
    history: list[Any] = [
        *MESSAGES,
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_name": "get_weather", "content": "Sunny."},
    ]
    for turns in (MESSAGES, history):
        assert client.chat(model, turns, tools=[get_weather], options=FEW).done
    told = client.chat(model, MESSAGES, options=FEW, logprobs=True, top_logprobs=2)
    assert told.logprobs
    assert [len(each.top_logprobs or ()) for each in told.logprobs] == [2] * 5


def test_models_are_listed_shown_and_need_no_pull(client: ollama.Client, model: str) -> None:
    assert f"{model}:latest" in [each.model for each in client.list().models]
    assert f"{model}:latest" in [each.model for each in client.ps().models]
    assert "completion" in (client.show(model).capabilities or ())
    assert client.pull(model).status == "success"
    assert [each.status for each in client.pull(model, stream=True)] == ["success"]


def test_what_is_refused_has_a_status_and_a_sentence(client: ollama.Client, model: str) -> None:
    calls: list[tuple[int, Callable[[], Any]]] = [
        (404, lambda: client.chat("none", MESSAGES)),
        (404, lambda: list(client.chat("none", MESSAGES, stream=True))),
        (404, lambda: client.pull("none")),
        (400, lambda: client.chat(model, MESSAGES, think=True)),
        (400, lambda: client.chat(model, MESSAGES, options={"num_predict": "x"})),
    ]
    for status, call in calls:
        with pytest.raises(ollama.ResponseError) as refused:
            call()
        assert refused.value.status_code == status
        assert not refused.value.error.startswith("{")


def test_embeddings_are_the_same_alone_and_beside_others(
    gateway: Gateway, client: ollama.Client, embedder: str
) -> None:
    texts = ["a server answers", "Tokyo"]
    both = client.embed(embedder, texts).embeddings
    assert client.embeddings(embedder, "Tokyo").embedding == pytest.approx(both[1], abs=1e-5)
    chain = OllamaEmbeddings(model=embedder, base_url=gateway.root)
    for found, expected in zip(chain.embed_documents(texts), both, strict=True):
        assert found == pytest.approx(expected, abs=1e-5)
    assert chain.embed_query("Tokyo") == pytest.approx(both[1], abs=1e-5)


def test_langchains_classes_answer_as_its_client(
    gateway: Gateway, client: ollama.Client, model: str
) -> None:
    shared: Any = {"model": model, "base_url": gateway.root, "temperature": 0}
    chat = ChatOllama(**shared, num_predict=5, validate_model_on_init=True)
    whole = chat.invoke(QUESTION)
    assert whole.content == client.chat(model, MESSAGES, options=FEW).message.content
    assert whole.usage_metadata
    assert whole.usage_metadata["output_tokens"] == 5
    assert "".join(str(chunk.content) for chunk in chat.stream(QUESTION)) == whole.content
    schema = {"title": "Place", "description": "A place.", **SCHEMA}
    formed = ChatOllama(**shared, num_predict=64).with_structured_output(
        schema, method="json_schema"
    )
    found: Any = formed.invoke(QUESTION)
    assert found.keys() == {"city"}
    text = OllamaLLM(**shared, num_predict=5)
    assert "".join(text.stream("Hi")) == text.invoke("Hi") != ""
