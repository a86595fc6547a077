"""Whether an answer is by the images that its own request shows."""

from __future__ import annotations

import base64
import struct
import zlib
from collections.abc import Sequence
from dataclasses import replace
from math import inf

from llmserve.plugin import Check
from llmserve.runtime.contract import CACHE_SALT, IMAGE_URL
from llmserve_certify.checks.hostile import goes_on
from llmserve_certify.endpoint import Ask, Gone, Refusal, Reply
from llmserve_certify.examination import Examination
from llmserve_certify.outcome import Broken, NotOffered, Undecided

Colour = tuple[int, int, int]
_SIDE = 96
_TOKENS = 4
_TOP = 4
_SAME = 1e-4
"""A difference of log-probabilities that no other image makes."""


def picture(*colours: Colour) -> str:
    """Return the data URL of a square with a stripe of each colour."""
    rows = (colours[row * len(colours) // _SIDE] for row in range(_SIDE))
    data = b"".join(b"\0" + bytes(colour) * _SIDE for colour in rows)
    header = struct.pack(">IIBBBBB", _SIDE, _SIDE, 8, 2, 0, 0, 0)
    parts = (b"IHDR", header), (b"IDAT", zlib.compress(data)), (b"IEND", b"")
    return _url(b"\x89PNG\r\n\x1a\n" + b"".join(_chunk(*part) for part in parts))


def _chunk(name: bytes, content: bytes) -> bytes:
    end = struct.pack(">I", zlib.crc32(name + content))
    return struct.pack(">I", len(content)) + name + content + end


def _url(content: bytes) -> str:
    return f"data:image/png;base64,{base64.b64encode(content).decode()}"


def _cut_off(url: str) -> str:
    content = base64.b64decode(url.partition(",")[2])
    return _url(content[: len(content) // 2])


ONE = picture((220, 20, 20), (250, 250, 250))
OTHER = picture((10, 10, 10), (20, 60, 220), (30, 200, 60))
_BAD = {
    "an image that is cut off": _cut_off(ONE),
    "a text instead of an image": _url(b"no image" * 20),
    "an image that is no base64": "data:image/png;base64,$$$",
    "an address at which nothing is": "http://127.0.0.1:9/image.png",
}


def _seen(exam: Examination) -> None:
    _offer(exam)
    text, one, other = (_ask(exam, *images) for images in ((), (ONE,), (OTHER,)))
    _expect_apart(exam, one, other, "two different images have the same answer")
    _expect_apart(exam, one, text, "a request with an image has the answer of one without")
    counts = [exam.alone(ask).input_tokens for ask in (text, one)]
    if None not in counts and counts[0] == counts[1]:
        words = "the prompt with an image has as many tokens as that without"
        raise Broken(words, expected=f"more than {counts[0]}", got=counts[1], ask=one)


def _order(exam: Examination) -> None:
    _offer(exam)
    if not _takes_two(exam):
        raise NotOffered("two images in a request are refused")
    both, turned, twice = (
        _ask(exam, *images) for images in ((ONE, OTHER), (OTHER, ONE), (ONE, ONE))
    )
    _expect_apart(exam, both, turned, "two images have the same answer in either order")
    _expect_apart(exam, both, twice, "an image beside its like has the answer of another pair")
    counts = [exam.alone(ask).input_tokens for ask in (_ask(exam, ONE), twice)]
    if None not in counts and counts[0] == counts[1]:
        words = "an image that is shown twice has as many tokens as once"
        raise Broken(words, expected=f"more than {counts[0]}", got=counts[1], ask=twice)


def _not_confused(exam: Examination) -> None:
    """Ask the same of several images, in an order in which what is kept of one may be taken."""
    _offer(exam)
    shown: list[tuple[str, ...]] = [(ONE,), (OTHER,), ()]
    if _takes_two(exam):
        shown += [(ONE, OTHER), (OTHER, ONE), (OTHER, OTHER)]
    asks = [_ask(exam, *images, question="Name all colours that you see.") for images in shown]
    first = [exam.ask(ask) for ask in asks]
    again = [exam.ask(ask) for ask in reversed(asks)][::-1]
    _expect_own(exam, asks, first, again, "when it is asked again")
    for _ in range(2):
        _expect_own(exam, asks, first, exam.together(asks), "beside those with other images")
    if exam.endpoint.takes is not None:
        # Of such a request, nothing that is kept of others is found.
        fresh = [ask.with_options(**{CACHE_SALT: f"images {n}"}) for n, ask in enumerate(asks)]
        found = [exam.ask(ask) for ask in fresh]
        _expect_own(exam, asks, found, first, "than if nothing of others is kept")
    texts = [exam.greedy(prompt) for prompt in exam.prompts[: len(asks)]]
    alone = [exam.alone(ask) for ask in texts]
    mixed = [ask for pair in zip(texts, asks, strict=False) for ask in pair]
    exam.expect_each(texts, alone, exam.together(mixed)[::2], "beside requests with images")


def _bad(exam: Examination) -> None:
    _offer(exam)
    for name, url in _BAD.items():
        ask = _ask(exam, url)
        try:
            answer = exam.try_ask(ask)
        except Refusal as error:
            if not error.is_orderly or len(error.words.splitlines()) > 1:
                words = f"{name} is no orderly refusal ({error.status})"
                expected = "a status of 400 to 499, and one line"
                raise Broken(words, expected=expected, got=error.words, ask=ask) from None
        except Gone as error:
            words = f"{name} gets no answer: {error.problem}"
            raise Broken(words, expected="a refusal", got=error.got, ask=ask) from None
        else:
            raise Broken(f"{name} is accepted", expected="a refusal", got=answer.text, ask=ask)
        goes_on(exam, name)


def _offer(exam: Examination) -> None:
    """Raise :class:`NotOffered` of a model that reads no images."""
    if not exam.takes(IMAGE_URL.name):
        raise NotOffered("the model reads only text")
    try:
        exam.try_ask(_ask(exam, ONE))
    except Refusal as error:
        if error.is_orderly and not error.is_about_server and exam.endpoint.takes is None:
            raise NotOffered(f"images are refused: {error.words}") from None
        words = f"a valid image is refused ({error.status}): {error.words}"
        raise Broken(words, expected="an answer", got=error.words, ask=error.ask) from None


def _takes_two(exam: Examination) -> bool:
    return not exam.is_refused(_ask(exam, ONE, OTHER))


def _ask(exam: Examination, *images: str, question: str = "Which colours are these?") -> Ask:
    try:
        exam.offer("logprobs", _TOP)
        scores = {"logprobs": _TOP}
    except NotOffered:
        scores = {}
    message = {"role": "user", "content": question}
    return replace(exam.chat(message, tokens=_TOKENS, **scores), images=images)


def _apart(one: Reply, other: Reply) -> float:
    """Return how far apart the scores of two first tokens are; of texts only whether they are."""
    if not one.logprobs or not other.logprobs:
        return 0.0 if one.text == other.text else inf
    firsts = one.logprobs[0], other.logprobs[0]
    scores, others = ({top.token: top.logprob for top in first.top} for first in firsts)
    both = scores.keys() & others.keys()
    return max((abs(scores[token] - others[token]) for token in both), default=inf)


def _expect_apart(exam: Examination, ask: Ask, other: Ask, words: str) -> None:
    answers = exam.alone(ask), exam.alone(other)
    apart = _apart(*answers)
    if apart > exam.margin:
        return
    if not answers[0].logprobs:
        raise Undecided(f"{words}, and the server does not tell its scores")
    if apart > _SAME:
        raise Undecided(f"{words} but for {apart:.2g}, which {exam.precision} may explain")
    raise Broken(words, expected="another answer", got=answers[0].text, ask=ask)


def _expect_own(
    exam: Examination, asks: Sequence[Ask], want: Sequence[Reply], got: Sequence[Reply], doing: str
) -> None:
    """Expect the same scores, or without any the same texts."""
    for ask, first, answer in zip(asks, want, got, strict=True):
        apart = _apart(first, answer)
        if apart <= 2 * exam.margin:
            continue
        others = [other for other in want if other is not first]
        if first.logprobs or any(other.text == answer.text for other in others):
            size = "" if apart == inf else f" by {apart:.2g}"
            words = f"the answer about an image is another one{size} {doing}"
            raise Broken(words, expected=first.text, got=answer.text, ask=ask)
        raise Undecided(f"an answer about an image differs {doing}: its scores are not known")


_FOLLOWS = ("no-foreign-text", "own-answer", "own-length", "same-in-a-batch", "repeatable")

CHECKS = (
    Check(
        name="images-are-seen",
        severity="critical",
        promise="the answer depends on the image that is shown",
        meaning="the model answers blindly, and sounds as if it saw",
        run=_seen,
        needs=("chat",),
        follows=("repeatable",),
    ),
    Check(
        name="order-of-images",
        severity="critical",
        promise="images are seen in their order, and each as often as it is shown",
        meaning="of several images, the wrong one is described",
        run=_order,
        needs=("chat",),
        follows=("images-are-seen", "repeatable"),
        quick=False,
    ),
    Check(
        name="own-images",
        severity="critical",
        promise="the answer is by the request's own images, whatever came before or is beside it",
        meaning="a user reads what is on the image of someone else",
        run=_not_confused,
        needs=("chat",),
        follows=("images-are-seen", "order-of-images", *_FOLLOWS),
    ),
    Check(
        name="bad-images",
        severity="major",
        promise="an image that cannot be read is refused in one line, and the server goes on",
        meaning="the model describes what it has not seen, or one image takes the server down",
        run=_bad,
        needs=("chat",),
        follows=("images-are-seen",),
        quick=False,
    ),
)
