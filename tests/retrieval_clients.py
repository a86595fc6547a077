"""Clients of others for embeddings and rankings, unchanged, against a gateway that runs.

    python -m venv build/clients
    build/clients/bin/pip install openai cohere litellm langchain-openai langchain-cohere \\
        llama-index-embeddings-openai-like llama-index-postprocessor-cohere-rerank \\
        llama-index-postprocessor-jinaai-rerank
    build/clients/bin/python tests/retrieval_clients.py http://127.0.0.1:8080 EMBEDDER RERANKER

It needs nothing of llmserve. Together these take 400 MB, so that `make test` has only those that
are light: see plugins/gateway/tests/gateway_live/test_gateway_values_live.py.
"""

from __future__ import annotations

import json
import sys
import time
import traceback
from collections.abc import Callable
from importlib import import_module
from importlib.metadata import version
from typing import Any
from urllib.request import Request, urlopen

# Short, for models of tests.
TEXTS = ["a server answers", "Tokyo is", "x"]
QUERY = "Which capital?"
_NEAR = 1e-5

Check = Callable[[str, str, str], None]
CHECKS: dict[str, tuple[str, Check]] = {}


def check(name: str, package: str) -> Callable[[Check], Check]:
    def add(function: Check) -> Check:
        CHECKS[name] = package, function
        return function

    return add


def of(module: str, name: str) -> Any:
    return getattr(import_module(module), name)


def post(root: str, path: str, body: Any) -> Any:
    request = Request(f"{root}{path}", json.dumps(body).encode(),
                      {"content-type": "application/json"})  # fmt: skip
    with urlopen(request, timeout=60) as answer:
        return json.load(answer)


def vectors(root: str, model: str) -> list[list[float]]:
    data = post(root, "/v1/embeddings", {"model": model, "input": TEXTS})["data"]
    return [entry["embedding"] for entry in data]


def order(root: str, model: str) -> list[tuple[int, float]]:
    body = {"model": model, "query": QUERY, "documents": TEXTS}
    results = post(root, "/v1/rerank", body)["results"]
    return [(result["index"], result["relevance_score"]) for result in results]


def same(got: Any, expected: Any) -> None:
    flat_got, flat_expected = flat(got), flat(expected)
    assert len(flat_got) == len(flat_expected), (len(flat_got), len(flat_expected))
    worst = max(abs(a - b) for a, b in zip(flat_got, flat_expected, strict=True))
    assert worst < _NEAR, worst


def flat(value: Any) -> list[float]:
    if isinstance(value, (list, tuple)):
        return [number for item in value for number in flat(item)]
    return [float(value)]


@check("openai embeddings", "openai")
def _openai(root: str, embedder: str, reranker: str) -> None:
    client = of("openai", "OpenAI")(base_url=f"{root}/v1", api_key="none")
    for more in ({}, {"encoding_format": "float"}):
        answer = client.embeddings.create(model=embedder, input=TEXTS, **more)
        same([entry.embedding for entry in answer.data], vectors(root, embedder))


@check("LangChain embeddings", "langchain-openai")
def _langchain(root: str, embedder: str, reranker: str) -> None:
    langchain = of("langchain_openai", "OpenAIEmbeddings")(
        base_url=f"{root}/v1", api_key="none", model=embedder, check_embedding_ctx_length=False
    )
    same(langchain.embed_documents(TEXTS), vectors(root, embedder))
    same(langchain.embed_query(TEXTS[0]), vectors(root, embedder)[0])


@check("LangChain reranker", "langchain-cohere")
def _langchain_rerank(root: str, embedder: str, reranker: str) -> None:
    client = of("cohere", "ClientV2")(api_key="none", base_url=root)
    ranker = of("langchain_cohere", "CohereRerank")(client=client, model=reranker, top_n=3)
    found = ranker.rerank(TEXTS, QUERY)
    same([(r["index"], r["relevance_score"]) for r in found], order(root, reranker))
    document = of("langchain_core.documents", "Document")
    documents = [document(page_content=text) for text in TEXTS]
    best = ranker.compress_documents(documents, QUERY)[0]
    assert best.page_content == TEXTS[order(root, reranker)[0][0]]


@check("LlamaIndex embeddings", "llama-index-embeddings-openai-like")
def _llama_index(root: str, embedder: str, reranker: str) -> None:
    embedding = of("llama_index.embeddings.openai_like", "OpenAILikeEmbedding")(
        model_name=embedder, api_base=f"{root}/v1", api_key="none"
    )
    same(embedding.get_text_embedding_batch(TEXTS), vectors(root, embedder))
    same(embedding.get_query_embedding(TEXTS[0]), vectors(root, embedder)[0])


def _nodes() -> list[Any]:
    text_node = of("llama_index.core.schema", "TextNode")
    scored = of("llama_index.core.schema", "NodeWithScore")
    return [scored(node=text_node(text=text, id_=str(i)), score=0.0)
            for i, text in enumerate(TEXTS)]  # fmt: skip


@check("LlamaIndex reranker of Cohere", "llama-index-postprocessor-cohere-rerank")
def _llama_index_cohere(root: str, embedder: str, reranker: str) -> None:
    ranker = of("llama_index.postprocessor.cohere_rerank", "CohereRerank")(
        api_key="none", model=reranker, top_n=3, base_url=root
    )
    found = ranker.postprocess_nodes(_nodes(), query_str=QUERY)
    same([(int(node.node.id_), node.score) for node in found], order(root, reranker))


@check("LlamaIndex reranker of Jina", "llama-index-postprocessor-jinaai-rerank")
def _llama_index_jina(root: str, embedder: str, reranker: str) -> None:
    ranker = of("llama_index.postprocessor.jinaai_rerank", "JinaRerank")(
        api_key="none", model=reranker, top_n=3, base_url=f"{root}/v1"
    )
    found = ranker.postprocess_nodes(_nodes(), query_str=QUERY)
    same([(int(node.node.id_), node.score) for node in found], order(root, reranker))


@check("LiteLLM embeddings", "litellm")
def _litellm(root: str, embedder: str, reranker: str) -> None:
    for provider in ("openai", "hosted_vllm"):
        answer = of("litellm", "embedding")(
            model=f"{provider}/{embedder}", input=TEXTS, api_base=f"{root}/v1", api_key="none"
        )
        same([entry["embedding"] for entry in answer.data], vectors(root, embedder))
        assert answer.usage.prompt_tokens > 0


@check("LiteLLM rerank", "litellm")
def _litellm_rerank(root: str, embedder: str, reranker: str) -> None:
    for provider, base in (
        ("hosted_vllm", root), ("cohere", root), ("jina_ai", f"{root}/v1/rerank")
    ):  # fmt: skip
        answer = of("litellm", "rerank")(
            model=f"{provider}/{reranker}", query=QUERY, documents=TEXTS, top_n=3, api_base=base,
            api_key="none",
        )  # fmt: skip
        found = [(r["index"], r["relevance_score"]) for r in answer.results]
        same(found, order(root, reranker))


@check("Cohere rerank", "cohere")
def _cohere(root: str, embedder: str, reranker: str) -> None:
    for name in ("Client", "ClientV2"):
        client = of("cohere", name)(api_key="none", base_url=root)
        answer = client.rerank(model=reranker, query=QUERY, documents=TEXTS, top_n=3)
        found = [(result.index, result.relevance_score) for result in answer.results]
        same(found, order(root, reranker))


def main() -> int:
    root, embedder, reranker = sys.argv[1:]
    failed = 0
    for name, (package, function) in CHECKS.items():
        started = time.perf_counter()
        try:
            function(root, embedder, reranker)
            what = "works"
        except Exception:
            traceback.print_exc()
            what, failed = "FAILED", failed + 1
        seconds = time.perf_counter() - started
        print(f"{name:32} {package} {version(package):10} {what} ({seconds:.1f} s)", flush=True)
    return failed


if __name__ == "__main__":
    sys.exit(main())
