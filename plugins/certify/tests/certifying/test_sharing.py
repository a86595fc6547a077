"""What is and is no proof that a server mixes up its requests."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest

from llmserve_certify.checks import CHECKS
from llmserve_certify.checks.sharing import marked
from llmserve_certify.endpoint import Refusal
from llmserve_certify.examination import PROMPTS
from llmserve_certify.examine import Broken, Examination

from .scripted import Scripted

CROWD = marked(PROMPTS, 64)
LONG = " there was nothing at all to see"


def run(name: str, exam: Examination) -> None:
    next(check for check in CHECKS if check.name == name).run(exam)


def own(prompt: str) -> str:
    """Return an answer that no other prompt has."""
    return f"{LONG} {10 + CROWD.index(prompt)}"


def swapped_at(count: int, one: int, other: int) -> Callable[[str, int], str]:
    def answer(prompt: str, asked: int) -> str:
        at = CROWD.index(prompt)
        return own(CROWD[other if at == one and asked == count else at])

    return answer


@pytest.mark.parametrize("quick", [False, True])
def test_the_answer_to_another_request_is_found(quick: bool) -> None:
    exam = Examination(Scripted(swapped_at(1, 3, 12)), quick=quick)
    with pytest.raises(Broken, match="another request") as found:
        run("own-answer", exam)
    assert found.value.ask is not None
    assert found.value.ask.prompt == CROWD[3]


@pytest.mark.parametrize(("check", "more"), [("own-answer", ""), ("no-foreign-text", " again")])
def test_prompts_with_the_same_words_may_share_a_tie(check: str, more: str) -> None:
    """Rounding lets one of them have the other's answer, or the beginning of it, at times."""

    def answer(prompt: str, asked: int) -> str:
        is_other = CROWD.index(prompt) == 3 and asked == 1
        return own(CROWD[11]) + more if is_other else own(prompt)

    run(check, Examination(Scripted(answer)))


@pytest.mark.parametrize("check", ["own-answer", "no-foreign-text"])
def test_short_answers_are_the_same_by_chance(check: str) -> None:
    def answer(prompt: str, asked: int) -> str:
        at = CROWD.index(prompt)
        if at == 3:
            return " Yes" if asked == 1 else f"{LONG} Yes"
        return " Yes" if at == 4 else own(prompt)

    run(check, Examination(Scripted(answer)))


def test_a_wrong_answer_may_be_anothers_wrong_answer() -> None:
    """Wrong positions make answers of nobody: the same wrong one twice is no exchange."""

    def answer(prompt: str, asked: int) -> str:
        at = CROWD.index(prompt)
        wrong = {3: asked == 1, 4: asked < 4}.get(at, False)
        return f"{LONG} nowhere" if wrong else own(prompt)

    run("own-answer", Examination(Scripted(answer)))


def test_text_of_another_request_is_found() -> None:
    def answer(prompt: str, asked: int) -> str:
        before = own(CROWD[4]) + "\n" if CROWD.index(prompt) == 3 and asked == 1 else ""
        return before + own(prompt)

    with pytest.raises(Broken, match="text of another request"):
        run("no-foreign-text", Examination(Scripted(answer)))


def refusing(prompts: Sequence[str], *, beside: Sequence[str] = ()) -> Scripted:
    """Refuse some prompts always, and others the first time, which is beside others."""

    def answer(prompt: str, asked: int) -> str:
        if prompt in prompts or (prompt in beside and asked == 1):
            raise Refusal(500, "too long")
        before = own(CROWD[4]) if CROWD.index(prompt) == 3 and asked == 3 else ""
        return before + own(prompt)

    return Scripted(answer)


def test_what_is_refused_alone_is_left_out_of_the_crowd() -> None:
    with pytest.raises(Broken, match="text of another request") as found:
        run("no-foreign-text", Examination(refusing(CROWD[10:20], beside=CROWD[30:31]), quick=True))
    assert found.value.ask is not None
    assert found.value.ask.prompt == CROWD[3]


def test_a_refusal_only_beside_others_is_a_fault() -> None:
    def answer(prompt: str, asked: int) -> str:
        if prompt == CROWD[5] and asked != 2:
            raise Refusal(500, "no place")
        return own(prompt)

    with pytest.raises(Broken, match="refused beside others"):
        run("own-answer", Examination(Scripted(answer), quick=True))
