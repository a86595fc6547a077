"""What is proof that an answer goes on where it would end."""

from __future__ import annotations

import pytest

from llmserve_certify.checks import CHECKS
from llmserve_certify.examine import Ask, Broken, Examination, Reply
from llmserve_certify.outcome import Undecided

from .scripted import Scripted

WORDS = [f" word{number}" for number in range(20)]


class Ignoring(Scripted):
    """Ends its answer after twenty tokens, whatever it is asked, and counts them or does not."""

    def __init__(self, counts: bool) -> None:
        super().__init__(lambda prompt, asked: "")
        self.counts = counts

    def ask(self, ask: Ask) -> Reply:
        taken = WORDS[: ask.options["max_tokens"]]
        count = len(taken) if self.counts else None
        return Reply("".join(taken), output_tokens=count)


@pytest.mark.parametrize(("counts", "outcome"), [(True, Broken), (False, Undecided)])
@pytest.mark.parametrize("check", ["ignore-eos", "min-tokens"])
def test_an_option_that_is_ignored_has_no_effect_by_a_limit(
    check: str, counts: bool, outcome: type[Exception]
) -> None:
    with pytest.raises(outcome):
        next(c for c in CHECKS if c.name == check).run(Examination(Ignoring(counts)))


def test_an_answer_that_is_cut_may_have_no_text_at_its_end() -> None:
    """Of special tokens nothing is shown: it looks as if the answer ended before them."""

    class Special(Scripted):
        def ask(self, ask: Ask) -> Reply:
            return Reply(" yes", "length", 3, ask.options["max_tokens"])

    exam = Examination(Special(lambda prompt, asked: ""))
    next(c for c in CHECKS if c.name == "finish-reason").run(exam)
