"""Whether an answer ends where it should, and says so."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llmserve.plugin import Check
from llmserve_certify.endpoint import Ask, Reply
from llmserve_certify.examination import Examination
from llmserve_certify.outcome import Broken, NotOffered, Undecided

_LIMITS = (1, 2, 5, 11)
_LONG = 16
_ENDING = 64
_STOPPED = ("stop", "stop_sequence", "eos", "end_turn")


def _max_tokens(exam: Examination) -> None:
    _needs_limit(exam)
    for prompt in exam.prompts[:3]:
        whole = exam.alone(exam.greedy(prompt, _LONG))
        for limit in _LIMITS:
            ask = exam.greedy(prompt, limit)
            answer = exam.alone(ask)
            _check_limit(exam, ask, answer, limit)
            if not whole.text.startswith(answer.text.rstrip("\ufffd")):
                exam.expect_each([ask], [whole], [answer], f"with max_tokens={limit}")


def _check_limit(exam: Examination, ask: Ask, answer: Reply, limit: int) -> None:
    if answer.output_tokens is not None and answer.output_tokens > limit:
        words = f"max_tokens={limit} gives {answer.output_tokens} tokens, by the server's own count"
        raise Broken(words, expected=limit, got=answer.output_tokens, ask=ask)
    if exam.reference is None:
        return
    found = exam.walk(ask, answer)
    # Told apart by whole tokens: the text of one may be empty.
    if found.is_complete and len(found.ids) > limit:
        words = f"max_tokens={limit} gives {len(found.ids)} tokens"
        raise Broken(words, expected=limit, got=answer.text, ask=ask)


def _length_used(exam: Examination) -> None:
    """An answer that is cut must have all the tokens that were asked for."""
    _needs_limit(exam)
    for prompt in exam.prompts[:3]:
        short, long = (exam.alone(exam.greedy(prompt, n)) for n in (5, _LONG))
        if len(long.text) <= len(short.text) and long.finish_reason == "length":
            raise Broken(
                f"max_tokens={_LONG} gives no more than max_tokens=5, and the reason is length",
                expected="a longer answer",
                got=long.text,
                ask=exam.greedy(prompt, _LONG),
            )
        ask = exam.greedy(prompt, 5)
        if exam.reference is not None and len(long.text) > len(short.text):
            found = exam.walk(ask, short)
            if found.is_complete and len(found.ids) < 5 and not short.text.endswith("\ufffd"):
                ids = exam.walk(exam.greedy(prompt, _LONG), long).ids
                # The tokens of the longer answer say how many the shorter one has.
                written = exam.reference.decode(exam.ids_of(ask), ids[: len(found.ids)])
                full = exam.reference.decode(exam.ids_of(ask), ids[:5])
                if written.strip() == short.text.strip() and len(full) > len(written):
                    words = f"max_tokens=5 gives only {len(found.ids)} tokens of a longer answer"
                    raise Broken(words, expected=full, got=short.text, ask=ask)


def _needs_limit(exam: Examination) -> None:
    if not exam.takes("max_tokens"):
        raise NotOffered("the model has no input max_tokens")


def _reasons(exam: Examination) -> None:
    ask = exam.greedy(exam.prompts[0], 4)
    short = exam.alone(ask)
    if short.finish_reason is None:
        raise NotOffered("the server gives no finish reason")
    _needs_limit(exam)
    for prompt in exam.prompts[:4]:
        ask = exam.greedy(prompt, 4)
        short, long = exam.alone(ask), exam.alone(exam.greedy(prompt, _LONG))
        is_cut = len(long.text) > len(short.text) and long.text.startswith(
            short.text.rstrip("\ufffd")
        )
        if is_cut and short.finish_reason != "length":
            words = f"an answer that max_tokens cuts ends with the reason {short.finish_reason!r}"
            raise Broken(words, expected="length", got=short.finish_reason, ask=ask)
    if found := _ends_itself(exam):
        ask, answer = found
        if answer.finish_reason == "length":
            words = "an answer that ends by itself has the reason 'length'"
            raise Broken(words, expected="stop", got=answer.finish_reason, ask=ask)


def _ends_itself(exam: Examination) -> tuple[Ask, Reply] | None:
    """Return an answer that the model ends before its limit, if there is one."""
    for prompt in exam.prompts:
        ask = exam.greedy(prompt, _ENDING)
        answer = exam.alone(ask)
        if answer.output_tokens is not None and answer.output_tokens >= _ENDING:
            # It was cut, where its text may end long before: special tokens have none.
            continue
        longer = exam.greedy(prompt, _ENDING + 16)
        if exam.reference is not None:
            found = exam.walk(ask, answer)
            if found.is_complete and len(found.ids) < _ENDING - 8 and found.ids:
                return ask, answer
        elif answer.text and exam.alone(longer).text == answer.text:
            return ask, answer
    return None


def _stop_words(exam: Examination) -> None:
    exam.offer("stop_words", ["\u00a7\u00a7"])
    for prompt in exam.prompts[:4]:
        text = exam.alone(exam.greedy(prompt, _LONG)).text
        for stop in _stops(text):
            for stream in (False, True):
                _check_stop(exam, prompt, text, stop, stream and exam.endpoint.streams)


def _stops(text: str) -> list[str]:
    """Return a word of a text, and a part of it that is not made of whole words."""
    words = text.split(" ")
    found = []
    if len(words) > 3 and len(words[2]) > 1:
        found.append(words[2])
    middle = len(text) // 2
    if len(text) > 8:
        found.append(text[middle - 2 : middle + 2])
    return [stop for stop in found if stop.strip() and text.find(stop) > 0]


def _check_stop(exam: Examination, prompt: str, text: str, stop: str, stream: bool) -> None:
    ask = exam.greedy(prompt, _LONG, stop_words=[stop])
    ask = Ask(ask.prompt, options=ask.options, stream=stream)
    answer = exam.ask(ask)
    expected = text[: text.index(stop)]
    if stop in answer.text:
        words = f"the stop word {stop!r} is in the answer"
        raise Broken(words, expected=expected, got=answer.text, ask=ask)
    if answer.text == expected:
        if answer.finish_reason not in (None, *_STOPPED):
            words = f"an answer that a stop word ends has the reason {answer.finish_reason!r}"
            raise Broken(words, expected="stop", got=answer.finish_reason, ask=ask)
        return
    if text.startswith(answer.text) or answer.text.startswith(expected):
        words = f"the stop word {stop!r} does not end the answer where it stands"
        raise Broken(words, expected=expected, got=answer.text, ask=ask)


def _ignore_eos(exam: Examination) -> None:
    exam.offer("ignore_eos", True)
    _continued(exam, "ignore_eos", lambda _: {"ignore_eos": True})


def _min_tokens(exam: Examination) -> None:
    exam.offer("min_tokens", 1)
    _continued(exam, "min_tokens", lambda tokens: {"min_tokens": tokens + 6})


def _continued(exam: Examination, option: str, options: Callable[[int], dict[str, Any]]) -> None:
    """Expect that an answer that would end goes on."""
    if not (found := _ends_itself(exam)):
        raise NotOffered("no prompt has an answer that ends by itself")
    ask, answer = found
    tokens = answer.output_tokens or len(exam.walk(ask, answer).ids if exam.reference else ())
    if not tokens:
        # A limit below the answer's length would cut it, which would look like an effect.
        raise Undecided("only the server's count or the model can say how long an answer is")
    longer = exam.greedy(ask.prompt, tokens + 8, **options(tokens))
    got = exam.ask(longer)
    counted = got.output_tokens
    if got.text == answer.text and (counted is None or counted <= tokens + 1):
        words = f"{option} is accepted and has no effect: the answer ends as without it"
        raise Broken(words, expected="a longer answer", got=got.text, ask=longer)


def _usage(exam: Examination) -> None:
    for number, prompt in enumerate(exam.prompts):
        ask = exam.greedy(prompt, 7)
        answer = exam.alone(ask)
        if answer.output_tokens is None and answer.input_tokens is None:
            raise NotOffered("the server counts no tokens")
        _check_counts(exam, ask, answer)
        if exam.endpoint.streams and number < 3:
            streamed = exam.ask(Ask(ask.prompt, options=ask.options, stream=True))
            if streamed.output_tokens is None and answer.output_tokens is not None:
                exam.note("in streams, it counts no tokens")
            if streamed.text == answer.text:
                _same_counts(ask, answer, streamed, "in a stream")
    asks = [exam.greedy(prompt, 7) for prompt in exam.prompts]
    for ask, answer in zip(asks, exam.together(asks), strict=True):
        alone = exam.alone(ask)
        if answer.text == alone.text:
            _same_counts(ask, alone, answer, "beside others")


def _check_counts(exam: Examination, ask: Ask, answer: Reply) -> None:
    if answer.finish_reason == "length" and answer.output_tokens not in (None, 7):
        words = f"an answer that max_tokens=7 cuts has {answer.output_tokens} tokens by its usage"
        raise Broken(words, expected=7, got=answer.output_tokens, ask=ask)
    if exam.reference is None:
        return
    prompt = len(exam.ids_of(ask))
    if answer.input_tokens not in (None, prompt):
        words = f"the prompt has {prompt} tokens, and by its usage {answer.input_tokens}"
        raise Broken(words, expected=prompt, got=answer.input_tokens, ask=ask)


def _same_counts(ask: Ask, one: Reply, other: Reply, where: str) -> None:
    counts = (one.input_tokens, one.output_tokens)
    got = (other.input_tokens, other.output_tokens)
    # Some servers count nothing in a stream, which is no wrong count.
    if None not in got and got != counts:
        words = f"{where}, the same answer has other counts"
        raise Broken(words, expected=counts, got=got, ask=ask)


CHECKS = (
    Check(
        name="max-tokens",
        severity="critical",
        promise="an answer has at most max_tokens tokens, and is the beginning of a longer one",
        meaning="answers cost more than was asked for, or are other ones",
        run=_max_tokens,
        follows=("repeatable", "begin-token"),
    ),
    Check(
        name="max-tokens-reached",
        severity="major",
        promise="an answer that does not end by itself has all of its max_tokens",
        meaning="answers end too early, for instance because the prompt is counted in",
        run=_length_used,
        follows=("repeatable", "begin-token", "greedy-is-the-models"),
    ),
    Check(
        name="finish-reason",
        severity="major",
        promise="the reason is 'length' where an answer is cut, and 'stop' where it ends",
        meaning="programs take half an answer for a whole one, or ask on for ever",
        run=_reasons,
        follows=("repeatable",),
    ),
    Check(
        name="stop-words",
        severity="major",
        promise="an answer ends before a stop word, also one that begins inside a token",
        meaning="agents and tools that rely on stop words read what they should not",
        run=_stop_words,
        follows=("repeatable", "stream-joins"),
    ),
    Check(
        name="usage",
        severity="major",
        promise="the tokens of prompt and answer are counted right, in streams and beside others",
        meaning="bills and limits are wrong",
        run=_usage,
        follows=("begin-token", "repeatable", "no-foreign-text", "own-answer"),
    ),
    Check(
        name="ignore-eos",
        severity="minor",
        promise="with ignore_eos an answer goes on after the token that ends it",
        meaning="measurements compare answers of different lengths",
        run=_ignore_eos,
        quick=False,
    ),
    Check(
        name="min-tokens",
        severity="minor",
        promise="with min_tokens an answer does not end earlier",
        meaning="answers are shorter than asked for",
        run=_min_tokens,
        quick=False,
    ),
)
