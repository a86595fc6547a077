"""What is proof that a server does not keep to a constraint."""

from __future__ import annotations

import pytest

from llmserve_certify.checks import CHECKS
from llmserve_certify.endpoint import Ask, Reply
from llmserve_certify.examine import Broken, Examination

from .scripted import Scripted

FITTING = '{"sure": true, "number": 2}'


class Constrained(Scripted):
    """Has schemas in chats, as OpenAI's API, and with prompts if it is told so."""

    takes: frozenset[str] | None = frozenset({"json_schema"})

    def __init__(self, *, prompts: bool, chats: bool) -> None:
        super().__init__(lambda prompt, asked: "")
        self.chats = True
        self._prompts, self._chats = prompts, chats

    def ask(self, ask: Ask) -> Reply:
        is_met = self._chats if ask.messages else self._prompts
        return Reply(FITTING if is_met else "Hello there", "stop")


def run(exam: Examination) -> None:
    next(check for check in CHECKS if check.name == "constrained").run(exam)


@pytest.mark.parametrize(("prompts", "noted"), [(True, False), (False, True)])
def test_a_schema_that_holds_in_chats_is_met(prompts: bool, noted: bool) -> None:
    exam = Examination(Constrained(prompts=prompts, chats=True))
    run(exam)
    words = "json_schema is accepted and ignored with a prompt, and holds in a chat"
    assert (words in exam.notes) == noted


def test_a_schema_that_holds_nowhere_is_a_fault() -> None:
    with pytest.raises(Broken, match="json_schema is accepted, and the answer does not meet it"):
        run(Examination(Constrained(prompts=False, chats=False)))


@pytest.mark.parametrize(
    ("text", "is_met"),
    [
        ("{" + 40 * "\n", True),
        ('{ "number": 2,\n"sure" : fa', True),
        ("-by-date" * 9, False),
        ('{"answer": "yes and', False),
    ],
)
def test_an_answer_that_is_cut_has_to_begin_as_the_schema_says(text: str, is_met: bool) -> None:
    class Cut(Constrained):
        def ask(self, ask: Ask) -> Reply:
            return Reply(text, "length", output_tokens=48)

    exam = Examination(Cut(prompts=True, chats=True))
    if is_met:
        run(exam)
    else:
        with pytest.raises(Broken):
            run(exam)
