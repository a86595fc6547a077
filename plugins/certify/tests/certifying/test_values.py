"""Servers of embeddings with one fault each: the right check names it, and a right one has none."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest

from llmserve_certify.checks import CHECKS
from llmserve_certify.endpoint import Refusal
from llmserve_certify.examine import Examination, Report, run_checks
from llmserve_certify.page import page

from .scripted import Scripted

LIMIT = 64


def vector(text: str) -> Any:
    """Return the vector of the words within the limit."""
    words = text.split(" ")[:LIMIT]
    seed = zlib.crc32(" ".join(words).encode())
    return np.random.default_rng(seed).standard_normal(16).astype(np.float32)


class Model:
    name, precision, limit = "hashes", "float32", LIMIT

    def describe(self) -> dict[str, str]:
        return {}

    def values(self, texts: Sequence[str]) -> list[Any]:
        return [vector(text) for text in texts]

    def mistakes(self, text: str) -> Iterator[tuple[str, Any]]:
        value = vector(text)
        yield "it is of length 1", value / np.linalg.norm(value)

    def noise(self, precision: str, texts: Sequence[str]) -> float:
        return 1e-6


class Server(Scripted):
    task = "embed"

    def __init__(self, fault: str = "") -> None:
        super().__init__(lambda prompt, asked: "")
        self.fault = fault

    def values(self, texts: Sequence[str]) -> list[Any]:
        if "" in texts:
            raise Refusal(500 if self.fault == "empty-crashes" else 400, "empty")
        if self.fault != "cut" and any(len(text.split(" ")) > LIMIT for text in texts):
            raise Refusal(400, "too long")
        found = [vector(text) for text in texts]
        if self.fault == "of-length-one":
            found = [value / np.linalg.norm(value) for value in found]
        if self.fault == "order-changed" and len(found) > 1:
            found[0], found[1] = found[1], found[0]
        if self.fault == "padding-pooled":
            most = max(map(len, texts))
            found = [value * len(text) / most for value, text in zip(found, texts, strict=True)]
        return found[:-1] if self.fault == "one-too-few" and len(found) > 1 else found


def examined(fault: str = "", *, known: bool = True) -> Report:
    return run_checks(Examination(Server(fault), encoder=Model() if known else None), CHECKS)


@pytest.mark.parametrize(
    ("fault", "check", "words"),
    [
        ("of-length-one", "values-are-the-models", "it is of length 1"),
        ("order-changed", "values-same-in-a-batch", "is that of"),
        ("padding-pooled", "values-same-in-a-batch", "is another than alone"),
        ("one-too-few", "values-same-in-a-batch", "8 texts have 7 values"),
        ("cut", "cut-is-told", "without a word"),
        ("empty-crashes", "empty-text", "an error of the server"),
    ],
)
@pytest.mark.parametrize("known", [True, False])
def test_a_fault_is_named(fault: str, check: str, words: str, known: bool) -> None:
    faults = examined(fault, known=known).faults
    if check == "values-are-the-models" and not known:
        # Only the model can tell.
        assert faults == []
        return
    assert [verdict.name for verdict in faults] == [check]
    assert words in faults[0].words


@pytest.mark.parametrize("known", [True, False])
def test_a_right_server_has_no_fault(known: bool) -> None:
    report = examined(known=known)
    assert report.faults == []
    assert report.counted()["passed"] == (4 if known else 3)
    assert {verdict.name for verdict in report.verdicts} >= {"cut-is-told"}
    # What explains a difference is a share, of vectors, and no logits.
    assert ("logits" in page(report), "of the length of a vector" in page(report)) == (False, known)
