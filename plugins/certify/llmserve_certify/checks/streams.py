"""Whether a stream is the same answer in pieces."""

from __future__ import annotations

from llmserve.plugin import Check
from llmserve_certify.endpoint import Ask
from llmserve_certify.examination import Examination
from llmserve_certify.outcome import Broken

_UNUSUAL = ("👩‍👩‍👧‍👦 and 🏳️‍🌈 are", "日本語のテキストは")


def _joins(exam: Examination) -> None:
    asks = [exam.greedy(prompt) for prompt in (*exam.prompts, *_UNUSUAL)]
    wholes = [exam.alone(ask) for ask in asks]
    streamed = [Ask(ask.prompt, options=ask.options, stream=True) for ask in asks]
    streams = exam.together(streamed, most=exam.at_once)
    for ask, whole, stream in zip(asks, wholes, streams, strict=True):
        if stream.text != whole.text and "".join(stream.text.split()) == "".join(
            whole.text.split()
        ):
            words = "the pieces of a stream lose spaces, or have others"
            raise Broken(words, expected=whole.text, got=stream.text, ask=ask)
        if "\ufffd" in stream.text and "\ufffd" not in whole.text:
            words = "a stream cuts characters in two"
            raise Broken(words, expected=whole.text, got=stream.text, ask=ask)
    exam.expect_each(asks, wholes, streams, "when it is streamed")
    for ask, whole, stream in zip(asks, wholes, streams, strict=True):
        if stream.text == whole.text and stream.finish_reason != whole.finish_reason:
            raise Broken(
                f"a stream ends with the reason {stream.finish_reason!r}",
                expected=whole.finish_reason,
                got=stream.finish_reason,
                ask=Ask(ask.prompt, options=ask.options, stream=True),
            )


def _in_parts(exam: Examination) -> None:
    ask = exam.greedy(exam.prompts[0])
    answer = exam.ask(Ask(ask.prompt, options=ask.options, stream=True))
    exam.figures["pieces"] = len(answer.pieces)
    if len(answer.pieces) < 2 and len(answer.text.split()) > 4:
        words = "a stream is one piece: nothing arrives before the end"
        raise Broken(words, expected="pieces", got=answer.text, ask=ask)


CHECKS = (
    Check(
        name="stream-joins",
        severity="major",
        promise="the pieces of a stream join to the whole answer",
        meaning="users of a chat see words run together, or broken characters",
        run=_joins,
        needs=("stream",),
        follows=("repeatable",),
    ),
    Check(
        name="stream-has-pieces",
        severity="minor",
        promise="a stream arrives in pieces",
        meaning="users wait for the whole answer before they see a word",
        run=_in_parts,
        needs=("stream",),
    ),
)
