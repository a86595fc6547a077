"""How checks are run: what ends one of them, and what that does to the others."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from llmserve.certify import Check, Examination, NotOffered, Refusal, Verdict, run_checks
from llmserve.certify.checks import CHECKS
from llmserve.certify.endpoint import Ask, Reply
from llmserve.certify.examination import Budget
from llmserve.certify.page import page
from llmserve.certify.reference import Noise
from llmserve.errors import RequestRejectedError
from tests.scripted import Scripted
from tests.toy_server import ToyModel


def verdicts(exam: Examination, *names: str, more: Sequence[Check] = ()) -> list[Verdict]:
    checks = [check for check in CHECKS if check.name in names]
    return [*run_checks(exam, [*more, *checks]).verdicts]


def test_a_check_that_ends_with_an_error_loses_no_other() -> None:
    def wrong(exam: Examination) -> None:
        raise LookupError("no such\nplace")

    own = Check(name="own", severity="minor", promise="it is", meaning="it is not", run=wrong)
    first, second = verdicts(
        Examination(Scripted(lambda prompt, asked: " yes")), "repeatable", more=[own]
    )
    assert (first.state, second.state) == ("unfinished", "passed")
    assert first.words == "the check ends with LookupError: no such place"


def test_a_template_that_refuses_a_part_of_a_chat_is_no_reason_to_end() -> None:
    class Strict(ToyModel):
        """Has a template that takes an answer of a tool only after its call."""

        def render(self, messages: Sequence[Mapping[str, Any]], *, opened: bool = True) -> str:
            if messages[0]["role"] == "tool":
                raise ValueError("roles must alternate")
            return super().render(messages, opened=opened) + "weather" * any(
                "tool_calls" in message for message in messages
            )

    class Talking(Scripted):
        chats = True

        def ask(self, ask: Ask) -> Reply:
            return Reply(" zzz of nobody", input_tokens=1 if ask.messages else None)

    exam = Examination(Talking(lambda prompt, asked: ""), Strict())
    (found,) = verdicts(exam, "chat-tools")
    assert found.state == "failed"
    assert "tokens there and" in found.words


def test_rounding_is_measured_only_if_a_check_asks_how_much_it_explains() -> None:
    class Measured(ToyModel):
        measured = 0

        def noise(self, precision: str, sequences: Sequence[Sequence[int]]) -> Noise:
            self.measured += 1
            return super().noise(precision, sequences)

    def answer(prompt: str, asked: int) -> str:
        return f"{prompt} yes"

    model, check = Measured(), [check for check in CHECKS if check.name == "empty-prompt"]
    # Answers that begin with their prompts are forgotten, and would be asked for once more.
    exam = Examination(Scripted(answer), model, budget=Budget(requests=11))
    report = run_checks(exam, check)
    assert (report.margin, report.requests, model.measured) == (None, 11, 0)
    assert "which explains" not in page(report)
    report = run_checks(Examination(Scripted(answer), model), CHECKS)
    assert report.margin
    assert model.measured == 1


def test_a_value_that_is_refused_says_nothing_of_another() -> None:
    class Picky(Scripted):
        def ask(self, ask: Ask) -> Reply:
            if ask.options.get("top_k") == 0:
                raise Refusal(400, "top_k must be positive")
            return super().ask(ask)

    exam = Examination(Picky(lambda prompt, asked: " yes"))
    for _ in range(2):
        exam.offer("top_k", 1)
        with pytest.raises(NotOffered, match="must be positive"):
            exam.offer("top_k", 0)
    assert exam.asked == 2


@pytest.mark.parametrize(("status", "hint"), [(401, "set OPENAI_API_KEY"), (400, "--set")])
def test_a_refusal_of_the_first_request_has_a_hint(status: int, hint: str) -> None:
    def refuse(prompt: str, asked: int) -> str:
        raise Refusal(status, "no")

    with pytest.raises(RequestRejectedError) as found:
        run_checks(Examination(Scripted(refuse)), CHECKS)
    assert hint in str(found.value)
