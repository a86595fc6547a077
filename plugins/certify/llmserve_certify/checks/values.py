"""Whether the values of texts are the model's: embeddings, scores, the probabilities of labels."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from llmserve.plugin import Check
from llmserve_certify.encoder import distance
from llmserve_certify.endpoint import Gone, Refusal
from llmserve_certify.examination import Examination
from llmserve_certify.outcome import Broken, NotOffered, Undecided

if TYPE_CHECKING:
    from llmserve_certify.encoder import Vector

TEXTS = (
    "Cats sleep on the sofa.",
    "A",
    "The weather in Seoul is cold, and the people who live there wear long coats, thick scarves "
    "and gloves. In the evening they meet in small restaurants, drink hot tea and talk about what "
    "they saw on their way home.",
    "How do I cancel a subscription?",
    "日本語のテキストは",
    "Zażółć gęślą jaźń — naïve café: 👩‍👩‍👧‍👦",
    "two  spaces,\ttabs\n\nand lines ",
    "In the year 1969, on July 20, two people walked on the Moon.",
)
_ROUNDS = 4
_SAME = 1e-4
"""Vectors that differ by less, as a share of their length, are the same."""
_WORDS = 20_000
"""A text of so many words is longer than any limit."""


def _alone(exam: Examination) -> list[Vector]:
    if "values" not in exam.kept:
        exam.kept["values"] = [exam.values([text])[0] for text in TEXTS]
    found: list[Vector] = exam.kept["values"]
    return found


def _equal(exam: Examination) -> None:
    model = exam.encoder
    if model is None:
        raise NotOffered("it needs the model: --against")
    worst = 0.0
    for text, got in zip(TEXTS, _alone(exam), strict=True):
        want = model.values([text])[0]
        worst = max(worst, distance(want, got))
        if distance(want, got) <= exam.value_margin:
            continue
        raise Broken(
            f"the value of {text[:40]!r} is not the model's{_explained(exam, text, got)}",
            expected=_shown(want),
            got=_shown(got),
        ).with_curl(exam.endpoint.values_curl([text]))
    exam.figures |= {"texts": len(TEXTS), "largest difference": float(f"{worst:.2g}")}


def _explained(exam: Examination, text: str, got: Vector) -> str:
    """Say which mistake makes exactly this value."""
    model = exam.encoder
    for words, vector in model.mistakes(text) if model else ():
        if distance(vector, got) <= exam.value_margin:
            return f": {words}"
    return ""


def _beside(exam: Examination) -> None:
    alone = _alone(exam)
    asked = [list(TEXTS), list(reversed(TEXTS))]
    asked += [[text] for text in TEXTS] * _ROUNDS
    for texts, vectors in zip(asked, exam.values_together(asked), strict=True):
        for at, (text, got) in enumerate(zip(texts, vectors, strict=True)):
            _compare(exam, alone, texts, at, got, TEXTS.index(text))


def _compare(
    exam: Examination,
    alone: Sequence[Vector],
    texts: list[str],
    at: int,
    got: Vector,
    number: int,
) -> None:
    want = alone[number]
    if distance(want, got) <= max(exam.value_margin, _SAME):
        return
    where = "beside others in its request" if len(texts) > 1 else "beside other requests"
    other = next((n for n, v in enumerate(alone) if distance(v, got) <= _SAME), None)
    whose = f" and is that of {TEXTS[other][:40]!r}" if other is not None else ""
    raise Broken(
        f"{where}, the value of {texts[at][:40]!r} is another than alone{whose}",
        expected=_shown(want),
        got=_shown(got),
    ).with_curl(exam.endpoint.values_curl(texts))


def _cut(exam: Examination) -> None:
    """Two texts that differ only behind the limit must not have the same value without a word."""
    words = "so " * min(_WORDS, 2 * exam.encoder.limit if exam.encoder else _WORDS)
    texts = [f"{words}cats sleep", f"{words}stocks fall at noon"]
    try:
        vectors = [exam.try_values([text])[0] for text in texts]
    except Refusal as error:
        if not error.is_orderly:
            problem = f"a text over the limit is an error of the server ({error.status})"
            raise Broken(problem, expected="a refusal", got=error.words) from None
        exam.values([TEXTS[0]])
        return
    except Gone as error:
        problem = f"a text over the limit gets no answer: {error.problem}"
        raise Broken(problem, expected="a refusal", got=error.got) from None
    if distance(*vectors) > _SAME:
        raise Undecided(f"texts of {len(words) // 3} words are read to their ends")
    raise Broken(
        f"a text of {len(words) // 3} words is cut without a word: another end makes no difference",
        expected="a refusal, as long as the request does not ask for a cut",
        got="the same values",
    ).with_curl(exam.endpoint.values_curl([f"so so so … ({len(words) // 3} words)"]))


def _empty(exam: Examination) -> None:
    try:
        exam.try_values([""])
    except Refusal as error:
        if not error.is_orderly:
            words = f"an empty text is an error of the server: {error.words}"
            raise Broken(words, expected="a refusal", got=error.words) from None
    except Gone as error:
        words = f"an empty text gets no answer: {error.problem}"
        raise Broken(words, expected="a refusal", got=error.got) from None
    exam.values([TEXTS[0]])


def _shown(vector: Vector) -> str:
    head = ", ".join(f"{value:.5f}" for value in vector[:4])
    return f"[{head}{', …' if len(vector) > 4 else ''}] ({len(vector)} numbers)"


CHECKS = (
    Check(
        name="values-are-the-models",
        severity="critical",
        promise="embeddings, scores and labels are what the model's own files say",
        meaning="searches find the wrong texts, and no error says so",
        run=_equal,
        needs=("reference",),
        task="values",
    ),
    Check(
        name="values-same-in-a-batch",
        severity="critical",
        promise="a value is that of its own text, alone and beside others",
        meaning="texts are stored with the values of others, or with worse ones when it is busy",
        run=_beside,
        task="values",
    ),
    Check(
        name="cut-is-told",
        severity="major",
        promise="a text over the limit is refused, as long as no cut is asked for",
        meaning="the ends of long texts are never found, and nobody knows",
        run=_cut,
        task="values",
    ),
    Check(
        name="empty-text",
        severity="minor",
        promise="an empty text has a value or is refused, and the server goes on",
        meaning="one careless request is an error of the server",
        run=_empty,
        task="values",
    ),
)
