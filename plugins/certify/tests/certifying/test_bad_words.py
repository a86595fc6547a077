"""What is proof that a server does not keep a forbidden word away: the tokens, not the text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from llmserve.client import Logprob
from llmserve_certify.checks import CHECKS
from llmserve_certify.examine import Ask, Broken, Examination, Refusal, Reply, Undecided

from .scripted import Scripted
from .toy_server import SIZE, ToyModel

TEXT = " the of and to"
MODEL = ToyModel()
USUAL = MODEL.encode(TEXT, special=False)
OTHER = [token for letter in TEXT for token in MODEL.encode(letter, special=False)]


class Spelling(ToyModel):
    """Writes the text in its usual tokens, or if they may not come, in single letters."""

    def scores(self, ids: Sequence[int], shift: int = 0) -> Any:
        scores = np.full(SIZE, -20.0, np.float32)
        scores[1] = 0.0
        for begin in range(len(ids) + 1):
            written = self.decode((), ids[begin:])
            if TEXT.startswith(written):
                rest = TEXT[len(written) :]
                for score, more in ((15.0, rest[:1]), (20.0, rest)):
                    scores[self.encode(more, special=False)[:1]] = score
                break
        return scores


class Server(Scripted):
    """Writes the text, also if a word of it is forbidden, and tells its tokens or does not."""

    def __init__(self, tokens: Sequence[Logprob] | None, other: str = TEXT) -> None:
        super().__init__(lambda prompt, asked: "")
        self.tokens, self.other = tokens, other

    def ask(self, ask: Ask) -> Reply:
        if "logprobs" in ask.options and self.tokens is None:
            raise Refusal(400, "no logprobs")
        text = self.other if ask.options.get("bad_words") == ["the"] else TEXT
        return Reply(text, logprobs=tuple(self.tokens or ()) or None)


def tokens(ids: Sequence[int], *, named: str = "") -> list[Logprob]:
    texts = [MODEL.decode((), [token]).replace(" ", named or " ") for token in ids]
    return [Logprob(-1 if named else i, t, -0.5) for i, t in zip(ids, texts, strict=True)]


def run(server: Server, model: ToyModel | None) -> None:
    next(check for check in CHECKS if check.name == "bad-words").run(Examination(server, model))


@pytest.mark.parametrize("model", [None, MODEL], ids=["alone", "model"])
@pytest.mark.parametrize("named", ["", "\u2581", "\u0120", " "])
def test_the_usual_tokens_are_a_fault(model: ToyModel | None, named: str) -> None:
    with pytest.raises(Broken, match="its usual tokens are in the answer"):
        run(Server(tokens(USUAL, named=named)), model)


@pytest.mark.parametrize("named", ["", " "])
def test_other_tokens_of_the_word_are_none(named: str) -> None:
    with pytest.raises(Undecided, match="'the' is in the answer in other tokens"):
        run(Server(tokens(OTHER, named=named)), MODEL)


def test_the_model_tells_whether_other_tokens_explain_an_answer() -> None:
    """Forbidden its usual tokens, this model writes the same text in others."""
    with pytest.raises(Undecided, match="'the' is in the answer in other tokens"):
        run(Server(None), Spelling())


def test_an_answer_that_the_forbidden_tokens_alone_explain_is_a_fault() -> None:
    class Certain(Spelling):
        """Would end rather than write single letters."""

        def scores(self, ids: Sequence[int], shift: int = 0) -> Any:
            scores = super().scores(ids, shift)
            scores[1] = 16.0
            return scores

    with pytest.raises(Broken, match="its usual tokens are in the answer"):
        run(Server(None), Certain())


def test_an_answer_that_nothing_explains_is_undecided() -> None:
    with pytest.raises(Undecided, match="the model does not explain in which tokens"):
        run(Server(None, other=" and of the"), Spelling())


def test_without_tokens_and_model_only_no_effect_at_all_is_a_fault() -> None:
    with pytest.raises(Broken, match="bad_words is accepted and has no effect on 4 answers"):
        run(Server(None), None)
    with pytest.raises(Undecided, match="only the model can say in which tokens"):
        run(Server(None, other=" and of the"), None)


@pytest.mark.parametrize("model", [None, MODEL], ids=["alone", "model"])
def test_a_word_that_stays_away_is_right(model: ToyModel | None) -> None:
    run(Server(None, other=" and to offer"), model)


def test_a_word_is_forbidden_that_has_its_usual_tokens() -> None:
    """This model writes its first word in single letters, so that to forbid it changes nothing."""

    class Spelled(Spelling):
        def scores(self, ids: Sequence[int], shift: int = 0) -> Any:
            scores = super().scores(ids, shift)
            scores[[self.encode(word, special=False)[0] for word in ("the", " the")]] = -20.0
            return scores

    class Obedient(Server):
        def ask(self, ask: Ask) -> Reply:
            forbidden.append(ask.options.get("bad_words"))
            return super().ask(ask)

    forbidden: list[Any] = []
    with pytest.raises(Undecided):
        run(Obedient(tokens(OTHER)), Spelled())
    assert ["of"] in forbidden
    assert ["the"] not in forbidden
