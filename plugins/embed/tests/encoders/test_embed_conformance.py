"""The conformance suite of recipes whose models answer with values, and what clients see."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from llmserve.errors import ContextLengthError, UsageError
from llmserve.testing import LiveTriton, ValueConformance
from llmserve.testing.tiny_encoders import save_classifier, save_encoder, save_graph


@pytest.fixture(scope="module", autouse=True)
def _models(tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("encoders")
    TestEmbed.model = str(save_encoder(folder / "encoder", pooling="mean_tokens"))
    save_graph(Path(TestEmbed.model))
    TestRerank.model = str(save_classifier(folder / "ranker", num_labels=1))
    TestClassify.model = str(
        save_classifier(folder / "classifier", id2label={0: "no", 1: "perhaps", 2: "yes"})
    )
    save_graph(Path(TestClassify.model))


class TestEmbed(ValueConformance):
    recipe = "embed"
    options = {"generator": "encoder"}

    def test_openvino_gives_the_same_vectors(self, triton: LiveTriton, name: str) -> None:
        other = triton.build("embed", self.model, generator="encoder-openvino")
        texts = ["a", "some words", "word " * 20]
        expected = triton.client.embed(name, texts)
        np.testing.assert_allclose(triton.client.embed(other, texts), expected, atol=1e-5)

    def test_a_graph_in_its_own_backend_gives_the_same_vectors(
        self, triton: LiveTriton, name: str
    ) -> None:
        other = triton.build("embed", self.model, generator="encoder-onnx", batch_tokens=64)
        texts = ["a", "some words", "word " * 20, *(f"{number}" for number in range(300))]
        expected = triton.client.embed(name, texts)
        np.testing.assert_allclose(triton.client.embed(other, texts), expected, atol=1e-5)
        with pytest.raises(ContextLengthError):
            triton.client.embed(other, "word " * 90)
        short = triton.client.embed(other, ["a", "word " * 90], truncate=True, dimensions=4)
        assert short.shape == (2, 4)

    def test_vectors_have_the_length_1(self, triton: LiveTriton, name: str) -> None:
        vectors = triton.client.embed(name, ["a", "b", "c"])
        np.testing.assert_allclose(np.linalg.norm(vectors, axis=1), 1, rtol=1e-5)
        short = triton.client.embed(name, "a", dimensions=4)
        np.testing.assert_allclose(short, vectors[0, :4] / np.linalg.norm(vectors[0, :4]), 1e-5)

    def test_many_texts_are_several_requests(self, triton: LiveTriton, name: str) -> None:
        texts = [f"{number}" for number in range(600)]
        vectors = triton.client.embed(name, texts)
        some = triton.client.embed(name, texts[500:510])
        np.testing.assert_allclose(vectors[500:510], some, atol=1e-5)

    def test_one_is_nobody_to_talk_to(self, triton: LiveTriton, name: str) -> None:
        with pytest.raises(UsageError, match=f"^{name} computes embeddings"):
            next(triton.client.stream(name, "a"))

    def test_query_and_the_emitted_client_print_vectors(
        self, triton: LiveTriton, name: str, tmp_path: Path
    ) -> None:
        expected = triton.client.embed(name, "nine").tolist()
        url, file = triton.server.grpc_url, tmp_path / "v.npy"
        queried = run("-m", "llmserve_cli", "query", name, "nine", "--url", url, "--json")
        assert json.loads(queried)["embedding"] == pytest.approx(expected, abs=1e-6)
        run("-m", "llmserve_cli", "query", name, "nine", "--url", url, "--npy", str(file))
        np.testing.assert_allclose(np.load(file), [expected], atol=1e-6)
        emitted = run(str(triton.repository / name / "client.py"), "nine", "--url", url)
        assert json.loads(emitted)["embedding"] == pytest.approx(expected, abs=1e-6)


class TestRerank(ValueConformance):
    recipe = "rerank"
    options = {"generator": "classifier"}
    pair = "a document, of words"

    def test_documents_are_in_the_order_of_their_scores(
        self, triton: LiveTriton, name: str
    ) -> None:
        documents = ["one", "two words", "", "three more words"]
        ranked = triton.client.rerank(name, "which?", documents)
        scores = [document.score for document in ranked]
        assert scores == sorted(scores, reverse=True)
        assert sorted(document.index for document in ranked) == [0, 1, 2, 3]
        assert all(0 < score < 1 for score in scores)
        assert all(document.document == documents[document.index] for document in ranked)


class TestClassify(ValueConformance):
    recipe = "classify"
    options = {"generator": "classifier"}

    def test_probabilities_are_of_all_labels(self, triton: LiveTriton, name: str) -> None:
        (labels,) = triton.client.classify(name, ["is it?"])
        assert set(labels.probabilities) == {"no", "perhaps", "yes"}
        assert sum(labels.probabilities.values()) == pytest.approx(1, abs=1e-5)
        assert labels.probability == max(labels.probabilities.values())
        (pair,) = triton.client.classify(name, ["is it?"], pairs=["it is"])
        assert pair.probabilities != labels.probabilities

    def test_a_graph_in_its_own_backend_gives_the_same_labels(
        self, triton: LiveTriton, name: str
    ) -> None:
        # Without a batch dimension, which the vectors above have.
        options: dict[str, Any] = {"generator": "classifier-onnx", "max_batch_size": 0}
        other = triton.build("classify", self.model, **options)
        for pairs in (None, ["it is"] * 3):
            texts = ["is it?", "no", "words " * 9]
            expected = triton.client.classify(name, texts, pairs=pairs)
            for ours, theirs in zip(
                triton.client.classify(other, texts, pairs=pairs), expected, strict=True
            ):
                assert ours.label == theirs.label
                assert ours.probabilities == pytest.approx(theirs.probabilities, abs=1e-5)


def run(*words: str) -> str:
    done = subprocess.run([sys.executable, *words], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout
