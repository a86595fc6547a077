"""Models that answer with values: what a request may have, and what fails alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmserve.contract.failures import read
from llmserve.contract.options import READING, VECTOR
from llmserve.contract.tensors import EMBEDDING, INPUT_TOKENS, SCORE, TEXT_PAIR
from llmserve.runtime import (
    BatchDriver,
    EmbeddingFormatter,
    Generation,
    LabelFormatter,
    ScoreFormatter,
)
from llmserve.runtime.answer.params import Params
from llmserve.runtime.protocols import Answer
from llmserve.testing import ByteTokenizer, FakeRequest, make_parts

INPUTS = [tensor.name for tensor in (*READING, *VECTOR, TEXT_PAIR)]


class Pairs(ByteTokenizer):
    prompts: Mapping[str, str] = {"query": "q: "}

    def encode_pair(
        self, text: str, pair: str | None = None, *, limit: int | None = None
    ) -> tuple[list[int], list[int] | None]:
        first, second = list(text.encode()), list((pair or "").encode())
        ids = [1, *first, 2, *second][:limit]
        segments = ([0] * (len(first) + 2) + [1] * len(second))[:limit]
        return ids, None if pair is None else segments


class Sums:
    """The sum of a text's ids, their number, and how many are of the second text."""

    context_length: int | None = 40
    eos_ids: frozenset[int] = frozenset()

    def __init__(self) -> None:
        self.batches: list[int] = []

    def generate(self, generations: Sequence[Generation], tokenizer: Any) -> None:
        self.batches.append(len(generations))
        for generation in generations:
            ids = generation.prompt_ids
            total = np.nan if ord("!") in ids else float(sum(ids))
            row = [total, len(ids), sum(generation.segments or ())]
            generation.finish(np.array(row, dtype=np.float32))


def started(formatter: Any = None, *, batched: bool = True, **more: Any) -> tuple[Any, Sums]:
    settings = {"size": 3, "dimensions": 0, "normalize": False}
    sums = Sums()
    driver = BatchDriver({}, Path())
    parts = make_parts(
        sums,
        tokenizer=more.pop("tokenizer", Pairs()),
        formatter=formatter or EmbeddingFormatter(settings, Path()),
        inputs=INPUTS,
        answers="vector",
        outputs=(EMBEDDING, INPUT_TOKENS),
        batched=batched,
        **more,
    )
    driver.start(parts)
    return driver, sums


def embeddings(*requests: FakeRequest, **more: Any) -> list[Any]:
    driver, _ = started(**more)
    driver.execute(list(requests))
    return [None if request.error else request.responses[0].tensors for request in requests]


def failure(request: FakeRequest) -> tuple[str, str | None]:
    error: Any = request.responses[0].error
    found = read(error.message())
    return found.code, found.param


def test_each_text_gets_its_value_and_its_count() -> None:
    (tensors,) = embeddings(FakeRequest({"text_input": ["a", "bb"]}))
    assert tensors["embedding"].tolist() == [[100, 3, 0], [199, 4, 0]]
    assert tensors["num_input_tokens"].tolist() == [[3], [4]]


def test_without_a_batch_dimension_there_is_a_row_for_each_text() -> None:
    (tensors,) = embeddings(FakeRequest({"text_input": np.array([b"a", b"b"])}), batched=False)
    assert tensors["embedding"].shape == (2, 3)
    assert tensors["num_input_tokens"].shape == (2,)


def test_a_pair_has_segments() -> None:
    (tensors,) = embeddings(FakeRequest({"text_input": ["a"], "text_pair": ["bcd"]}))
    assert tensors["embedding"].tolist() == [[97 + 3 + 98 + 99 + 100, 6, 3]]


def test_what_is_no_number_fails_alone_and_nothing_is_computed_twice() -> None:
    driver, sums = started()
    requests = [FakeRequest({"text_input": [text]}) for text in ("a", "!", "b")]
    driver.execute(requests)
    assert failure(requests[1]) == ("not_a_number", None)
    assert [request.error for request in (requests[0], requests[2])] == [None, None]
    assert sums.batches == [3]


def test_one_bad_text_of_a_request_fails_it_with_one_response() -> None:
    request = FakeRequest({"text_input": ["!", "a", "!"]})
    embeddings(request)
    assert failure(request) == ("not_a_number", None)
    assert len(request.responses) == 1


@pytest.mark.parametrize(
    ("text", "options", "code", "param"),
    [
        ("", {}, "empty_prompt", "text_input"),
        ("x" * 39, {}, "context_length_exceeded", None),
        ("x" * 5000, {}, "context_length_exceeded", None),
        ("x" * 500_000, {}, "context_length_exceeded", None),
        ("x", {"dimensions": 4}, "invalid_value", "dimensions"),
        ("x", {"dimensions": 0}, "invalid_value", "dimensions"),
        ("x", {"normalize": "yes"}, "invalid_value", "normalize"),
        ("x", {"prompt_name": "passage"}, "invalid_value", "prompt_name"),
        ("x", {"temperature": 1.0}, "unsupported_option", "temperature"),
    ],
)
def test_what_cannot_be_done_is_refused_alone(
    text: str, options: dict[str, Any], code: str, param: str | None
) -> None:
    bad, good = FakeRequest({"text_input": [text]}, **options), FakeRequest({"text_input": ["a"]})
    embeddings(bad, good)
    assert failure(bad) == (code, param)
    assert good.error is None


@given(st.integers(1, 3000), st.booleans())
def test_a_text_is_cut_only_if_the_request_says_so(length: int, truncate: bool) -> None:
    request = FakeRequest({"text_input": ["x" * length]}, truncate=truncate)
    (tensors,) = embeddings(request)
    if length <= 38 or truncate:
        assert tensors["num_input_tokens"].tolist() == [[min(length + 2, 40)]]
    else:
        assert failure(request)[0] == "context_length_exceeded"


class Ends(Pairs):
    """Cuts the beginning of a text."""

    cuts_beginnings = True

    def encode_pair(
        self, text: str, pair: str | None = None, *, limit: int | None = None
    ) -> tuple[list[int], list[int] | None]:
        ids, segments = super().encode_pair(text, pair)
        return ids[-limit if limit else 0 :], segments


def test_a_text_whose_beginning_is_cut_is_read_to_its_end() -> None:
    text = "x" * 50_000 + "the end"
    request = FakeRequest({"text_input": [text]}, truncate=True)
    driver, _ = started(tokenizer=Ends())
    driver.execute([request])
    kept = [*text.encode()][-39:]
    assert request.responses[0].tensors["embedding"].tolist() == [[sum(kept) + 2, 40, 0]]
    refused = FakeRequest({"text_input": [text]})
    driver.execute([refused])
    assert failure(refused) == ("context_length_exceeded", None)


class Whole(Pairs):
    """Returns everything if the limit has no place for its special tokens, as transformers does."""

    def encode_pair(
        self, text: str, pair: str | None = None, *, limit: int | None = None
    ) -> tuple[list[int], list[int] | None]:
        return super().encode_pair(text, pair, limit=None if limit and limit < 3 else limit)


def test_a_text_that_cannot_be_cut_is_refused() -> None:
    driver, sums = started(tokenizer=Whole())
    sums.context_length = 2
    request = FakeRequest({"text_input": ["some text"]}, truncate=True)
    driver.execute([request])
    assert failure(request) == ("context_length_exceeded", None)
    assert sums.batches == []


def test_the_models_own_prompt_is_put_before_a_text() -> None:
    named, plain = embeddings(
        FakeRequest({"text_input": ["a"]}, prompt_name="query"), FakeRequest({"text_input": ["a"]})
    )
    assert named["num_input_tokens"].item() - plain["num_input_tokens"].item() == len("q: ")


def test_how_a_text_is_read_is_told_as_text() -> None:
    (tensors,) = embeddings(FakeRequest({"text_input": ["a"]}, prompt_only=True))
    assert b'"context_length": 40' in tensors["text_output"].item()
    assert "embedding" not in tensors


def test_ids_are_taken_as_they_are() -> None:
    (tensors,) = embeddings(FakeRequest({"text_input": [""]}, input_ids="[5, 6]"))
    assert tensors["embedding"].tolist() == [[11, 2, 0]]


@pytest.mark.parametrize(
    ("more", "options", "code", "param"),
    [
        ({"text_pair": ["b"]}, {}, "invalid_value", "text_pair"),
        ({}, {"prompt_name": "query"}, "invalid_value", "prompt_name"),
        ({}, {"input_ids": str([5] * 41)}, "context_length_exceeded", None),
        # Their end is a special token, which a tokenizer would keep.
        ({}, {"input_ids": str([5] * 41), "truncate": True}, "invalid_value", "truncate"),
    ],
)
def test_beside_ids_nothing_is_ignored_and_they_are_not_cut(
    more: dict[str, Any], options: dict[str, Any], code: str, param: str | None
) -> None:
    request = FakeRequest({"text_input": [""], **more}, **{"input_ids": "[5, 6]", **options})
    embeddings(request)
    assert failure(request) == (code, param)


def test_beside_ids_a_pair_may_be_empty() -> None:
    request = FakeRequest({"text_input": [""], "text_pair": [""]}, input_ids="[5, 6]")
    (tensors,) = embeddings(request)
    assert tensors["embedding"].tolist() == [[11, 2, 0]]


def test_an_embedding_is_cut_before_it_is_normalized() -> None:
    request = FakeRequest({"text_input": ["a"]}, dimensions=2, normalize=True)
    (tensors,) = embeddings(request)
    whole = np.array([100.0, 3.0])
    np.testing.assert_allclose(tensors["embedding"][0], whole / np.linalg.norm(whole), rtol=1e-6)


def test_a_tokenizer_without_pairs_refuses_them() -> None:
    driver = BatchDriver({}, Path())
    formatter = ScoreFormatter({"sigmoid": True}, Path())
    driver.start(
        make_parts(
            Sums(),
            formatter=formatter,
            inputs=INPUTS,
            answers="logits",
            outputs=(SCORE, INPUT_TOKENS),
        )
    )
    request = FakeRequest({"text_input": ["a"], "text_pair": ["b"]})
    driver.execute([request])
    assert failure(request) == ("unsupported_option", "text_pair")


def answer(*logits: float) -> Answer:
    value = np.array(logits, dtype=np.float32)
    return Answer("", "", "stop", 3, 0, echo=False, value=value, params=Params())


def test_a_score_is_a_sigmoid_or_the_share_of_the_second_class() -> None:
    sigmoid, plain = (ScoreFormatter({"sigmoid": on}, Path()) for on in (True, False))
    assert sigmoid.format([answer(0.0)])["score"].tolist() == [0.5]
    assert plain.format([answer(-7.5)])["score"].tolist() == [-7.5]
    assert plain.format([answer(1.0, 1.0)])["score"].tolist() == [0.5]
    assert sigmoid.format([answer(-1000.0), answer(1000.0)])["score"].tolist() == [0.0, 1.0]


def test_labels_are_sorted_by_probability() -> None:
    one, several = (
        LabelFormatter({"labels": ["a", "b", "é"], "several": on}, Path()) for on in (False, True)
    )
    tensors = one.format([answer(0.0, 3.0, 1.0)])
    assert [label.decode() for label in tensors["label"][0]] == ["b", "é", "a"]
    assert abs(tensors["probability"].sum() - 1) < 1e-6
    assert several.format([answer(0.0, 0.0, 0.0)])["probability"].tolist() == [[0.5] * 3]
