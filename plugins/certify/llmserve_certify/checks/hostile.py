"""Whether a server refuses what is wrong, and goes on."""

from __future__ import annotations

from llmserve.plugin import Check
from llmserve_certify.endpoint import Ask, Gone, Refusal
from llmserve_certify.examination import Examination
from llmserve_certify.outcome import Broken, NotOffered, Undecided

_NUL = "before\u0000after"
_WORDS = 200_000
"""A prompt of so many words is longer than any context."""


def goes_on(exam: Examination, after: str) -> None:
    """Expect an answer after a request that may have hurt the server."""
    ask = exam.greedy(exam.prompts[0], 4)
    try:
        exam.try_ask(ask)
    except (Refusal, Gone) as error:
        words = f"after {after}, the server no longer answers: {error.problem}"
        got = error.words if isinstance(error, Refusal) else error.got
        raise Broken(words, expected="an answer", got=got, ask=ask) from None


def _wrong(exam: Examination) -> None:
    accepted, crashed = [], []
    for hostile in exam.endpoint.hostile():
        try:
            answer = exam.send(hostile)
        except Refusal as error:
            if not error.is_orderly:
                crashed.append((hostile, f"{error.status}: {error.words}"))
        except Gone as error:
            crashed.append((hostile, error.got))
        else:
            if hostile.must_refuse:
                accepted.append((hostile, "an answer" if answer is None else repr(answer.text)))
        goes_on(exam, hostile.name)
    problems = [*crashed, *accepted]
    if problems:
        hostile, got = problems[0]
        names = ", ".join(h.name for h, _ in problems)
        kind = "an error of the server" if crashed else "no error"
        raise Broken(
            f"{kind} for {names}",
            expected="a refusal with a status of 400 to 499",
            got=got,
            ask=hostile.ask,
        ).with_curl(exam.endpoint.hostile_curl(hostile))


def _nul(exam: Examination) -> None:
    ask = exam.greedy(_NUL, 4)
    try:
        answer = exam.try_ask(ask)
    except Refusal as error:
        if not error.is_orderly:
            words = f"a NUL in the prompt is an error of the server: {error.words}"
            raise Broken(
                words, expected="an answer or a refusal", got=error.words, ask=ask
            ) from None
        exam.note(f"a prompt with a NUL is refused: {error.words[:80]}")
        return
    except Gone as error:
        words = f"a NUL in the prompt gets no answer: {error.problem}"
        raise Broken(words, expected="an answer or a refusal", got=error.got, ask=ask) from None
    if exam.reference is not None:
        ids = exam.ids_of(ask)
        if answer.input_tokens not in (None, len(ids)):
            words = f"a prompt with a NUL has {answer.input_tokens} tokens there, not {len(ids)}"
            raise Broken(words, expected=len(ids), got=answer.input_tokens, ask=ask)
        exam.expect_model(ask, answer, "after a prompt with a NUL")
    goes_on(exam, "a NUL")


def _empty(exam: Examination) -> None:
    ask = exam.greedy("", 4)
    try:
        exam.try_ask(ask)
    except Refusal as error:
        if not error.is_orderly:
            words = f"an empty prompt is an error of the server: {error.words}"
            raise Broken(words, expected="a refusal", got=error.words, ask=ask) from None
    except Gone as error:
        words = f"an empty prompt gets no answer: {error.problem}"
        raise Broken(words, expected="a refusal", got=error.got, ask=ask) from None
    goes_on(exam, "an empty prompt")


def _over_context(exam: Examination) -> None:
    context = exam.reference.context if exam.reference else None
    words = min(_WORDS, 2 * context if context else _WORDS)
    ask = exam.greedy("so " * words, 4)
    shortened = Ask(f"so so so … ({words} words)", options=ask.options)
    try:
        answer = exam.try_ask(ask)
    except Refusal as error:
        if not error.is_orderly:
            problem = f"a prompt over the context is an error of the server ({error.status})"
            raise Broken(problem, expected="a refusal", got=error.words, ask=shortened) from None
        goes_on(exam, "a prompt over the context")
        return
    except Gone as error:
        problem = f"a prompt over the context gets no answer: {error.problem}"
        raise Broken(problem, expected="a refusal", got=error.got, ask=shortened) from None
    goes_on(exam, "a huge prompt")
    if context is None:
        raise Undecided(f"a prompt of {words} words is answered; the context is not known")
    if exam.reference is not None and len(exam.reference.encode(ask.prompt)) > context:
        problem = f"a prompt of more than the {context} tokens of the context is answered"
        raise Broken(problem, expected="a refusal", got=answer.text, ask=shortened)
    raise NotOffered("the tokenizer makes few tokens of this prompt")


CHECKS = (
    Check(
        name="wrong-requests",
        severity="major",
        promise="a request that is wrong is refused, and the server goes on",
        meaning="mistakes of one program are silent, or take the server down",
        run=_wrong,
    ),
    Check(
        name="nul-in-a-prompt",
        severity="minor",
        promise="a NUL in a prompt is read or refused",
        meaning="text after it is lost, or the request fails in the dark",
        run=_nul,
        follows=("begin-token", "greedy-is-the-models", "special-tokens", "unusual-text"),
    ),
    Check(
        name="empty-prompt",
        severity="minor",
        promise="an empty prompt is answered or refused, and the server goes on",
        meaning="one careless request is an error of the server",
        run=_empty,
    ),
    Check(
        name="over-the-context",
        severity="major",
        promise="a prompt longer than the context is refused, and the server goes on",
        meaning="the beginning or the end of a question is lost without a word",
        run=_over_context,
        quick=False,
    ),
)
