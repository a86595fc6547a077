"""Whether answers are the model's: greedy, one at a time."""

from __future__ import annotations

from llmserve.plugin import Check
from llmserve_certify.endpoint import Ask, Reply
from llmserve_certify.examination import Examination, after_echo
from llmserve_certify.outcome import Broken, NotOffered, Undecided
from llmserve_certify.reference import greedy, walk

LONG = 16
_SEVERAL = 8
"""So many tokens are hardly ever all special, spaces, or parts of characters."""
_UNUSUAL = (
    "Zażółć gęślą jaźń — naïve café: ",
    "日本語のテキストは",
    "👩‍👩‍👧‍👦 and 🏳️‍🌈 are",
    "e\u0301 is not é, and n\u0303 is",
    "مرحبا بالعالم",
    "two  spaces,\ttabs\n\nand lines ",
)


def _echoed(exam: Examination) -> list[tuple[Ask, Reply]]:
    """Return answers that begin with their prompts, if all do: one word may do so by chance."""
    asks = [exam.greedy(prompt) for prompt in exam.prompts[:3]]
    pairs = [(ask, exam.alone(ask)) for ask in asks]
    return pairs if all(after_echo(ask, answer) != answer.text for ask, answer in pairs) else []


def _echo(exam: Examination) -> None:
    if pairs := exam.kept.get("echoed") or _echoed(exam):
        ask, answer = pairs[0]
        if exam.echoes:
            exam.note("the prompts before the answers are left out of what is compared")
        raise Broken(
            "answers begin with their prompts",
            expected=after_echo(ask, answer),
            got=answer.text,
            ask=ask,
        )


def find_echo(exam: Examination) -> None:
    """Let the other checks look at answers without the prompts that a server puts before them."""
    exam.kept["echoed"] = _echoed(exam)
    exam.echoes = bool(exam.kept["echoed"])
    if exam.echoes:
        exam.forget_answers()


def find_refused(exam: Examination) -> None:
    """Let the other checks ask only with prompts that are answered, if any are."""
    refused: list[tuple[Ask, Broken]] = []
    accepted = []
    for prompt in exam.prompts:
        ask = exam.greedy(prompt)
        try:
            exam.alone(ask)
        except Broken as error:
            refused.append((ask, error))
        else:
            accepted.append(prompt)
    exam.kept["refused"] = refused
    if refused and accepted:
        count = len(exam.prompts)
        exam.prompts = (accepted * count)[:count]


def _answered(exam: Examination) -> None:
    refused: list[tuple[Ask, Broken]] = exam.kept.get("refused") or []
    if not refused:
        return
    ask, error = refused[0]
    raise Broken(
        f"{len(refused)} of {len(exam.prompts)} ordinary prompts have no answer, as "
        f"{ask.prompt[:40]!r}: {error.words}",
        expected="an answer",
        got=error.got,
        ask=ask,
    )


def _begin_token(exam: Examination) -> None:
    model = exam.model
    if model.begin is None:
        raise NotOffered("the model's prompts begin with no special token")
    asks = [exam.greedy(prompt) for prompt in exam.prompts[:5]]
    answers = [exam.alone(ask) for ask in asks]
    right = [exam.ids_of(ask) for ask in asks]
    others = {
        "the token that begins a prompt stands twice": [[model.begin, *ids] for ids in right],
        "the token that begins a prompt is left out": [ids[1:] for ids in right],
    }
    shift = _count_shift(answers, right)
    fits = _fits(exam, asks, answers, right)
    for words, prompts in others.items():
        counted = shift == len(prompts[0]) - len(right[0])
        if (not fits and _fits(exam, asks, answers, prompts)) or (counted and shift):
            raise Broken(
                f"{words}: that explains the {'counts' if counted else 'answers'}",
                expected=f"{len(right[0])} tokens: {model.decode([], right[0])!r}",
                got=f"{answers[0].input_tokens} tokens, and the answer {answers[0].text!r}",
                ask=asks[0],
            )


def _count_shift(answers: list[Reply], right: list[list[int]]) -> int | None:
    """Return by how much the counts of all prompts differ from the model's, if all do alike."""
    pairs = zip(answers, right, strict=True)
    shifts = {None if a.input_tokens is None else a.input_tokens - len(ids) for a, ids in pairs}
    return shifts.pop() if len(shifts) == 1 else None


def _fits(
    exam: Examination, asks: list[Ask], answers: list[Reply], prompts: list[list[int]]
) -> bool:
    triples = zip(asks, answers, prompts, strict=True)
    return all(exam.is_explained(exam.walk(ask, a, ids=ids)) for ask, a, ids in triples if ids)


def _greedy(exam: Examination) -> None:
    asks = [exam.greedy(prompt, 2 * LONG) for prompt in exam.prompts]
    tokens = forks = 0
    for ask in asks:
        answer = exam.alone(ask)
        _expect_text(exam, ask, answer)
        found = exam.expect_model(ask, answer, f"after {ask.prompt[:30]!r}")
        tokens, forks = tokens + len(found.ids), forks + len(found.forks)
    exam.figures |= {"tokens": tokens, "agreement": round(1 - forks / max(tokens, 1), 4)}


def _expect_text(exam: Examination, ask: Ask, answer: Reply) -> None:
    """Expect text where the model writes some: an empty answer has no token to compare."""
    ids = exam.ids_of(ask)
    if answer.text or exam.is_explained(walk(exam.model, ids, "", ended_below=1)):
        return
    tokens, _ = greedy(exam.model, ids, _SEVERAL)
    expected = exam.model.decode(ids, tokens)
    if expected.strip(" \n\ufffd"):
        raise Broken("the answer is empty", expected=expected, got=answer.text, ask=ask)


def _unusual(exam: Examination) -> None:
    model = exam.reference
    unread = ""
    for prompt in _UNUSUAL:
        ask = exam.greedy(prompt, 8)
        answer = exam.alone(ask)
        if model is not None:
            ids = exam.ids_of(ask)
            if answer.input_tokens is not None and answer.input_tokens != len(ids):
                raise Broken(
                    f"the prompt {prompt!r} has {answer.input_tokens} tokens there and "
                    f"{len(ids)} for the model: its text arrives changed",
                    expected=len(ids),
                    got=answer.input_tokens,
                    ask=ask,
                )
            exam.expect_model(ask, answer, f"after {prompt!r}")
        elif "\ufffd" in answer.text.rstrip("\ufffd"):
            # A model of random or few weights may write them itself.
            unread = unread or answer.text
    if unread:
        raise Undecided(
            f"the answer {unread[:40]!r} has characters that are no text: only the model can say "
            "whether it writes them (--against)"
        )


def _specials(exam: Examination) -> None:
    model = exam.model
    for prompt in exam.prompts:
        ask = exam.greedy(prompt, 2 * LONG)
        answer = exam.alone(ask)
        if found := [text for text in model.special_texts if text in answer.text]:
            words = f"the answer has the special token {found[0]!r} as text"
            raise Broken(words, expected=f"no {found[0]!r}", got=answer.text, ask=ask)


def _repeatable(exam: Examination) -> None:
    asks = [exam.greedy(prompt) for prompt in exam.prompts[:4]]
    alone = [exam.alone(ask) for ask in asks]
    again = [exam.ask(ask) for ask in asks]
    exam.expect_each(asks, alone, again, "when the same is asked again")


CHECKS = (
    Check(
        name="prompts-are-answered",
        severity="major",
        promise="prompts of a few words and of a paragraph are answered",
        meaning="some users get errors for nothing that they did",
        run=_answered,
    ),
    Check(
        name="no-echo",
        severity="minor",
        promise="an answer is the answer alone, without its prompt",
        meaning="every client has to cut the prompt off, and texts from two servers differ",
        run=_echo,
    ),
    Check(
        name="begin-token",
        severity="critical",
        promise="a prompt begins with the model's special token once",
        meaning="the model reads a prompt that it was not trained on, and answers worse",
        run=_begin_token,
        needs=("reference",),
    ),
    Check(
        name="special-tokens",
        severity="major",
        promise="no special token is part of an answer's text",
        meaning="users see texts such as <|endoftext|>",
        run=_specials,
        needs=("reference",),
    ),
    Check(
        name="repeatable",
        severity="major",
        promise="the same request without chance has the same answer",
        meaning="nothing that is found out today can be repeated tomorrow",
        run=_repeatable,
    ),
    Check(
        name="greedy-is-the-models",
        severity="critical",
        promise="an answer without chance is the one of the model's own generate()",
        meaning="the server does not compute the model: answers are other ones, usually worse",
        run=_greedy,
        needs=("reference",),
        follows=("begin-token", "special-tokens", "repeatable", "max-tokens", "seed"),
    ),
    Check(
        name="unusual-text",
        severity="major",
        promise="prompts in any script, with emoji and spaces, arrive as they were sent",
        meaning="users of other languages get answers to a damaged question",
        run=_unusual,
        follows=("begin-token", "special-tokens", "greedy-is-the-models"),
    ),
)
