"""Whether requests that share a server leave one another alone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import closing
from functools import partial
from typing import NamedTuple

from llmserve.plugin import Check
from llmserve_certify.at_once import at_once
from llmserve_certify.endpoint import Ask, Gone, Refusal, Reply
from llmserve_certify.examination import Examination, timed
from llmserve_certify.outcome import Broken, NotOffered, Undecided

_MARKS = "KQXZVJWY"
_ENDINGS = ("a", "the", "seven", "not", "our", "music", "never", "red")
_CROWD = 64
_ROUNDS = 4
_SHORT = 8
_LONGEST = 256
_LEAVING = 16
_SEEN = 12
"""The characters that an answer has to share with another's before that is no chance."""


def marked(prompts: Sequence[str], number: int) -> list[str]:
    """Return prompts that go on differently, each with a mark that no other has."""
    count = len(prompts)
    return [
        f"{_mark(n)}: {prompts[n % count]} {_ENDINGS[n // count % len(_ENDINGS)]}"
        for n in range(number)
    ]


def _mark(number: int) -> str:
    digits = (number // 64 % 8, number // 8 % 8, number % 8)
    return "".join(_MARKS[d] for d in digits) + str(11 + number)


def _batch(exam: Examination) -> None:
    asks = [exam.greedy(prompt) for prompt in exam.prompts]
    alone = [exam.alone(ask) for ask in asks]
    for _ in range(2):
        exam.expect_each(asks, alone, exam.together(asks), "when others run beside it")


def _staggered(exam: Examination) -> None:
    lengths = (32, 4, 16, 8, 24, 12, 2, 20)
    asks = [exam.greedy(p, lengths[n % 8]) for n, p in enumerate(exam.prompts)]
    with timed() as seconds:
        alone = [exam.alone(ask) for ask in asks]
        took = seconds()
    together = exam.together(asks, delay=min(0.05, took / (4 * len(asks))))
    exam.expect_each(asks, alone, together, "when others come and go meanwhile")


def _lengths(exam: Examination) -> None:
    if not exam.takes("max_tokens"):
        raise NotOffered("the model has no input max_tokens")
    lengths = (3, 16, 1, 9, 5, 12, 2, 7)
    asks = [exam.greedy(p, lengths[n % 8]) for n, p in enumerate(exam.prompts)]
    alone = [exam.alone(ask) for ask in asks]
    for _ in range(2):
        for ask, want, got in zip(asks, alone, exam.together(asks), strict=True):
            if want.text == got.text or not want.text or not got.text:
                continue
            # Another text is for other checks; the same text of another length is this one's.
            if want.text.startswith(got.text) or got.text.startswith(want.text):
                raise Broken(
                    f"beside requests with other max_tokens, an answer with "
                    f"max_tokens={ask.options['max_tokens']} has another length than alone",
                    expected=want.text,
                    got=got.text,
                    ask=ask,
                )


class Crowd(NamedTuple):
    """Requests that ran at once, by number, and their answers in each round."""

    numbers: list[int]
    asks: list[Ask]
    answered: list[list[Reply]]

    def is_like(self, one: int, other: int, prompts: int) -> bool:
        """Whether two of them begin with the same words after their marks."""
        return (self.numbers[one] - self.numbers[other]) % prompts == 0


def _crowd(exam: Examination) -> Crowd:
    if "crowd" not in exam.kept:
        exam.kept["crowd"] = _ask_crowd(exam)
    crowd: Crowd = exam.kept["crowd"]
    return crowd


def _ask_crowd(exam: Examination) -> Crowd:
    rounds, size = (1, _CROWD // 2) if exam.quick else (_ROUNDS, _CROWD)
    asks = [exam.greedy(prompt, _SHORT) for prompt in marked(exam.prompts, size)]
    numbers = [*range(size)]
    answered = [exam.gather(asks) for _ in range(rounds)]
    if any(isinstance(answer, Refusal) for row in answered for answer in row):
        # What is refused alone as well may fail what is beside it, which is for another check.
        numbers = [number for number in numbers if not exam.is_refused(asks[number])]
        if not numbers:
            raise NotOffered("the marked prompts are refused")
        asks = [asks[number] for number in numbers]
        answered = [exam.gather(asks) for _ in range(rounds)]
    return Crowd(numbers, asks, [_all_answered(asks, row) for row in answered])


def _all_answered(asks: Sequence[Ask], answers: Sequence[Reply | Refusal]) -> list[Reply]:
    found = []
    for ask, answer in zip(asks, answers, strict=True):
        if isinstance(answer, Refusal):
            words = f"a request is refused beside others ({answer.status}): {answer.words}"
            raise Broken(words, expected="an answer, as alone", got=answer.words, ask=ask)
        found.append(answer)
    return found


def _usual(
    exam: Examination, asks: Sequence[Ask], answered: Sequence[Sequence[Reply]]
) -> list[str]:
    """Return the answer that each request has most often, or that it has alone."""
    if len(answered) == 1:
        return [exam.alone(ask).text for ask in asks]
    columns = zip(*answered, strict=True)
    return [Counter(a.text for a in column).most_common(1)[0][0] for column in columns]


def _own_answer(exam: Examination) -> None:
    crowd = _crowd(exam)
    _, asks, answered = crowd
    rounds, size = len(answered), len(asks)
    usual = _usual(exam, asks, answered)
    distinct = {t: n for n, t in enumerate(usual) if usual.count(t) == 1 and len(t) >= _SEEN}
    for row in answered:
        for at, (ask, answer) in enumerate(zip(asks, row, strict=True)):
            other = distinct.get(answer.text, at)
            if other == at or answer.text == exam.alone(ask).text:
                continue
            if _is_strange(exam, crowd, at, other, answer) and _is_answer(
                exam, asks[other], answer
            ):
                raise Broken(
                    f"the answer is that to another request, {asks[other].prompt!r}",
                    expected=exam.alone(ask).text,
                    got=answer.text,
                    ask=ask,
                )
    share = len(distinct) / size * (1.0 if exam.reference else 1 - 1 / len(exam.prompts))
    seen = 1 - (1 - 0.02 * share) ** (rounds * size)
    exam.note(
        f"{rounds * size} answers, {size} at a time, {len(distinct)} of {size} prompts with an "
        f"answer of their own: a fault of one answer in fifty is seen with probability {seen:.1%}"
    )


def _is_strange(exam: Examination, crowd: Crowd, at: int, other: int, answer: Reply) -> bool:
    """Whether an answer with another's text is none that rounding makes of the own one."""
    if exam.reference is not None:
        return not exam.is_tie(crowd.asks[at], answer)
    # After the same words, two prompts may have answers that are a tie of both.
    return not crowd.is_like(at, other, len(exam.prompts))


def _is_answer(exam: Examination, ask: Ask, answer: Reply) -> bool:
    """Whether this is surely the answer to a request: a wrong one may be anybody's by chance."""
    return exam.alone(ask).text == answer.text or exam.is_tie(ask, answer)


def _foreign(exam: Examination) -> None:
    crowd = _crowd(exam)
    numbers, asks, answered = crowd
    rounds, size = len(answered), len(asks)
    usual = _usual(exam, asks, answered)
    for row in answered:
        for at, (ask, answer) in enumerate(zip(asks, row, strict=True)):
            for other in range(size):
                found = _text_of(numbers[other], usual[other], answer.text)
                if other == at or not found or found in exam.alone(ask).text:
                    continue
                if _is_strange(exam, crowd, at, other, answer):
                    raise Broken(
                        f"the answer has text of another request: {found[:60]!r}",
                        expected=exam.alone(ask).text,
                        got=answer.text,
                        ask=ask,
                    )
    exam.note(f"{size * rounds} marked prompts, {size} at a time")


def _text_of(number: int, usual: str, text: str) -> str:
    """Return what a text has of a request: its mark, or the whole of its answer and more."""
    if f"{_mark(number)}:" in text:
        return _mark(number)
    return usual if len(usual) >= _SEEN and usual != text and usual in text else ""


def _bad_neighbour(exam: Examination) -> None:
    asks = [exam.greedy(prompt) for prompt in exam.prompts]
    alone = [exam.alone(ask) for ask in asks]
    bad = exam.endpoint.hostile()

    def disturb(number: int) -> None:
        try:
            exam.send(bad[number % len(bad)])
        except (Refusal, Gone):
            return

    good: list[Callable[[], Reply | None]] = [partial(exam.ask, ask) for ask in asks]
    others: list[Callable[[], None]] = [partial(disturb, number) for number in range(len(asks))]
    # In turns, so that they come into the same batches.
    calls = [call for pair in zip(good, others, strict=True) for call in pair]
    found = at_once(calls, 2 * len(asks))
    answers = [answer for answer in found if answer is not None]
    exam.expect_each(asks, alone, answers, "when requests beside it are refused")


def _leaving(exam: Examination) -> None:
    """A short answer must not wait for long ones that nobody reads any more."""
    if not (exam.endpoint.streams and exam.takes("max_tokens")):
        raise NotOffered("the model does not stream, so a client cannot leave an answer")
    short = exam.greedy(exam.prompts[0], 2)
    usual = sorted(_seconds(exam, short) for _ in range(3))[1]
    options = {"ignore_eos": True} if exam.takes("ignore_eos") else {}
    asks = [exam.greedy(p, _LONGEST, **options) for p in marked(exam.prompts, _LEAVING)]
    whole = _whole(exam, asks[0])
    if whole < 1.0 or whole < 4 * usual:
        raise Undecided(f"a long answer takes only {whole:.1f} s: too little to tell")
    waits = []
    for _ in range(2):
        at_once([partial(_leave, exam, ask) for ask in asks], _LEAVING)
        waits.append(_seconds(exam, short))
        if waits[-1] <= 3 * usual + 0.4 * whole:
            exam.figures |= {
                "seconds after they left": round(waits[-1], 2),
                "usual": round(usual, 2),
            }
            return
        exam.pause(whole)
    raise Broken(
        f"after {_LEAVING} clients left their long answers, a short one takes {min(waits):.1f} s",
        expected=f"about {usual:.2f} s, as usual; a long answer takes {whole:.1f} s",
        got=f"{min(waits):.1f} s",
        ask=short,
    )


def _seconds(exam: Examination, ask: Ask) -> float:
    with timed() as seconds:
        exam.ask(ask)
        return seconds()


def _whole(exam: Examination, ask: Ask) -> float:
    try:
        return _seconds(exam, ask)
    except Broken:
        raise NotOffered("answers of this length are refused") from None


def _leave(exam: Examination, ask: Ask) -> None:
    def leave() -> None:
        with closing(exam.endpoint.pieces(ask)) as pieces:
            next(pieces, None)

    exam.count()
    try:
        exam.in_time(leave)
    except Refusal as error:
        words = f"a stream is refused ({error.status}): {error.words}"
        raise Broken(words, expected="a stream", got=error.words, ask=ask) from None
    except Gone as error:
        words = f"a stream does not begin: {error.problem}"
        raise Broken(words, expected="a stream", got=error.got, ask=ask) from None


CHECKS = (
    Check(
        name="own-answer",
        severity="critical",
        promise="every request gets the answer to its own prompt",
        meaning="a user reads what someone else asked for",
        run=_own_answer,
        follows=("no-foreign-text",),
    ),
    Check(
        name="no-foreign-text",
        severity="critical",
        promise="no text of one request is in another's answer",
        meaning="private text of one user reaches another",
        run=_foreign,
    ),
    Check(
        name="own-length",
        severity="critical",
        promise="an answer has the length that its own request asks for, whatever runs beside it",
        meaning="answers are cut short, or cost more, because of a stranger's request",
        run=_lengths,
        follows=("no-foreign-text", "own-answer"),
    ),
    Check(
        name="same-in-a-batch",
        severity="critical",
        promise="an answer is the same alone and beside others",
        meaning="the quality of an answer depends on who else is asking",
        run=_batch,
        follows=("no-foreign-text", "own-answer", "own-length", "repeatable"),
    ),
    Check(
        name="same-when-others-come-and-go",
        severity="critical",
        promise="an answer is the same while others start and end",
        meaning="answers are damaged when the server is busy, and nowhere else",
        run=_staggered,
        follows=("no-foreign-text", "own-answer", "own-length", "same-in-a-batch", "repeatable"),
        quick=False,
    ),
    Check(
        name="refusals-hurt-nobody",
        severity="critical",
        promise="a request that is refused does not change or fail those beside it",
        meaning="one wrong request fails the answers of strangers",
        run=_bad_neighbour,
        follows=("no-foreign-text", "own-answer", "own-length", "same-in-a-batch", "repeatable"),
    ),
    Check(
        name="leaving-frees-the-place",
        severity="major",
        promise="a client that leaves frees its place",
        meaning="the server works for nobody, and the others wait",
        run=_leaving,
        needs=("stream",),
        quick=False,
    ),
)
