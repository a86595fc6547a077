"""Whether the log-probabilities of an answer are the model's."""

from __future__ import annotations

import math

from llmserve.plugin import Check
from llmserve_certify.examination import Examination
from llmserve_certify.outcome import Broken, NotOffered

_TOLERANCE = 1e-3
_TOP = 4
# Servers round at other places than the copy on which rounding is measured: of vLLM's in bfloat16,
# one token of sixty differed by 2.1 times as much. Probabilities of another prompt, or made at
# another temperature, differ by far more.
_TIMES = 4


def _equal(exam: Examination) -> None:
    exam.offer("logprobs", _TOP)
    worst, divergences = 0.0, []
    compared = 0
    allowed = _TOLERANCE + _TIMES * exam.noise().logprob
    for prompt in exam.prompts[:5]:
        ask = exam.greedy(prompt, 12, logprobs=_TOP)
        answer = exam.ask(ask)
        if not answer.logprobs and not answer.text:
            continue
        if not answer.logprobs:
            words = "logprobs is accepted and has no effect: none are in the answer"
            raise Broken(words, expected="log-probabilities", got=None, ask=ask)
        found = exam.walk(ask, answer)
        ended = len(answer.logprobs) == len(found.ids) + 1
        if not found.is_complete or not (ended or len(answer.logprobs) == len(found.ids)):
            continue
        for at, want in enumerate(found.logprobs):
            entry = answer.logprobs[at]
            compared += 1
            worst = max(worst, abs(entry.logprob - want))
            # So that a difference that is no number is none that is allowed.
            if not abs(entry.logprob - want) <= allowed:
                raise Broken(
                    f"the log-probability of token {at + 1}, {entry.token!r}, differs by "
                    f"{abs(entry.logprob - want):.3g}; {exam.precision} explains {allowed:.2g}",
                    expected=round(want, 5),
                    got=round(entry.logprob, 5),
                    ask=ask,
                )
            _check_order([top.logprob for top in entry.top])
            divergences.append(_divergence(found.tops[at], [t.logprob for t in entry.top]))
    if not compared:
        raise NotOffered("no answer has a log-probability for each of its tokens")
    exam.figures |= {"tokens": compared, "largest difference": round(worst, 6)}
    if known := [value for value in divergences if value is not None]:
        exam.figures["mean KL of the top"] = max(0.0, round(sum(known) / len(known), 7))


def _check_order(tops: list[float]) -> None:
    if any(map(math.isnan, tops)) or tops != sorted(tops, reverse=True):
        raise Broken("the likeliest tokens are not in order", got=tops)


def _divergence(model: tuple[float, ...], server: list[float]) -> float | None:
    """Return the Kullback-Leibler divergence of the likeliest tokens, paired by rank."""
    pairs = list(zip(model, server, strict=False))
    if not pairs or not all(map(math.isfinite, server)):
        return None
    return sum(math.exp(p) * (p - q) for p, q in pairs)


CHECKS = (
    Check(
        name="log-probabilities",
        severity="major",
        promise="log-probabilities equal the model's",
        meaning="scores, rankings and confidence that are made of them are wrong",
        run=_equal,
        needs=("reference",),
        follows=("begin-token", "greedy-is-the-models"),
    ),
)
