"""Whether a word that a request forbids stays away.

Servers forbid tokens: those of the word's usual spelling, with and without a space before it. The
same word may come in other tokens, which is no fault, so the text alone does not tell.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from llmserve.client import Logprob
from llmserve.plugin import Check
from llmserve_certify.endpoint import Ask, Gone, Refusal, Reply
from llmserve_certify.examination import Examination
from llmserve_certify.outcome import Broken, NotOffered, Undecided

_SPACES = str.maketrans({"\u2581": " ", "\u0120": " "})
"""How tokenizers write a space in the name of a token."""
_TELLING = 2
"""The least answers that are as without the option, to say that it has no effect."""


def _bad_words(exam: Examination) -> None:
    exam.offer("bad_words", ["\u00a7\u00a7"])
    tried, same = 0, []
    otherwise: list[tuple[str, bool | None]] = []
    for prompt in exam.prompts[:4]:
        plain = exam.alone(exam.greedy(prompt)).text
        if not (word := _word_of(exam, prompt, plain)):
            continue
        tried += 1
        ask = exam.greedy(prompt, bad_words=[word])
        answer = exam.ask(ask)
        if not _shows(answer.text, word):
            continue
        is_banned = _has_usual_tokens(exam, ask, answer, word)
        if is_banned:
            words = f"bad_words={[word]!r} is accepted, and its usual tokens are in the answer"
            raise Broken(words, expected="another word", got=answer.text, ask=ask)
        otherwise.append((word, is_banned))
        same += [(ask, answer)] if answer.text == plain and is_banned is None else []
    if len(same) == tried >= _TELLING:
        ask, answer = same[0]
        words = f"bad_words is accepted and has no effect on {tried} answers"
        raise Broken(words, expected="other answers", got=answer.text, ask=ask)
    if otherwise:
        raise Undecided(_undecided(exam, *otherwise[0]))
    if not tried:
        raise Undecided("no answer has a word to forbid")


def _undecided(exam: Examination, word: str, is_banned: bool | None) -> str:
    if is_banned is not None:
        return (
            f"{word!r} is in the answer in other tokens than those of its usual spelling, which "
            "are what servers forbid"
        )
    if exam.reference is None:
        return f"{word!r} is in the answer, and only the model can say in which tokens (--against)"
    return f"{word!r} is in the answer, and the model does not explain in which tokens"


def _word_of(exam: Examination, prompt: str, text: str) -> str:
    """Return a word of an answer, which has it in its usual tokens as far as the model tells."""
    words = [word for word in text.split(" ")[1:-1] if word.isalpha() and len(word) > 1]
    if exam.reference is not None:
        ask = exam.greedy(prompt)
        found = exam.walk(ask, exam.alone(ask))
        if exam.is_explained(found):
            words = [w for w in words if any(_has(found.ids, s) for s in _spellings(exam, w))]
    return words[0] if words else ""


def _shows(text: str, word: str) -> bool:
    return re.search(rf"(?<!\w){re.escape(word)}(?!\w)", text) is not None


def _has_usual_tokens(exam: Examination, ask: Ask, answer: Reply, word: str) -> bool | None:
    """Whether an answer has the tokens that are forbidden, as far as that can be known."""
    if tokens := _told(exam, ask, word):
        return _is_among(exam, tokens, word)
    if exam.reference is None:
        return None
    spellings = _spellings(exam, word)
    # What the model writes if they are forbidden may have the word as well, in other tokens.
    if exam.is_explained(exam.walk(ask, answer, adjust=_without(spellings))):
        return False
    found = exam.walk(ask, answer)
    if not exam.is_explained(found):
        return None
    return any(_has(found.ids, spelling) for spelling in spellings)


def _told(exam: Examination, ask: Ask, word: str) -> Sequence[Logprob]:
    """Return the tokens of the answer, if the server tells them with their log-probabilities."""
    try:
        exam.offer("logprobs", 1)
        answer = exam.try_ask(ask.with_options(logprobs=1))
    except (NotOffered, Broken, Refusal, Gone):
        return ()
    return answer.logprobs if answer.logprobs and _shows(answer.text, word) else ()


def _is_among(exam: Examination, tokens: Sequence[Logprob], word: str) -> bool | None:
    texts = [token.token.translate(_SPACES) for token in tokens]
    if exam.reference is None:
        # A word that is one token is spelled so wherever it stands.
        return True if word in map(str.strip, texts) else None
    spellings = _spellings(exam, word)
    if all(token.id >= 0 for token in tokens):
        ids = [token.id for token in tokens]
        return any(_has(ids, spelling) for spelling in spellings)
    decode = exam.reference.decode
    wanted = [[decode((), [token]).strip() for token in spelling] for spelling in spellings]
    return any(_has([text.strip() for text in texts], spelling) for spelling in wanted)


def _spellings(exam: Examination, word: str) -> list[list[int]]:
    encoded = (exam.model.encode(text, special=False) for text in (word, f" {word}"))
    return [spelling for spelling in encoded if spelling]


def _has(row: Sequence[Any], part: Sequence[Any]) -> bool:
    size = len(part)
    return any([*row[at : at + size]] == [*part] for at in range(len(row) - size + 1))


def _without(spellings: Sequence[Sequence[int]]) -> Any:
    """Return what forbidding them does to the scores: the last token of each may not come."""

    def adjust(scores: Any, answer: Sequence[int]) -> Any:
        changed = scores.copy()
        for *begin, last in spellings:
            if not begin or [*answer[-len(begin) :]] == begin:
                changed[last] = -float("inf")
        return changed

    return adjust


CHECKS = (
    Check(
        name="bad-words",
        severity="minor",
        promise="the usual tokens of a bad word are not in the answer",
        meaning="words that a user forbids are in the answer",
        run=_bad_words,
        quick=False,
    ),
)
