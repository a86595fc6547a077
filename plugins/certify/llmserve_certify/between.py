"""Two servers side by side: where their answers part, and how sure each was of its own.

Neither is right here: what is a tie between them is said by :class:`llmserve.client.Parting`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial

from llmserve.client import EXPLAINED, Parting
from llmserve_certify.at_once import at_once
from llmserve_certify.endpoint import Ask, Gone, Message, Refusal, Reply
from llmserve_certify.examination import Examination
from llmserve_certify.outcome import NotOffered, OutOfBudget

_TOP = 5


@dataclass(frozen=True)
class Question:
    """What both are asked: a text, or a chat whose last message that text is."""

    text: str
    messages: tuple[Message, ...] = ()

    @property
    def shown(self) -> str:
        before = len(self.messages) - 1
        return f"[{before} messages before] {self.text}" if before > 0 else self.text


@dataclass(frozen=True)
class Side:
    """What one of the servers answered from where they part."""

    text: str = ""
    error: str = ""
    """Why there is no answer."""
    margin: float | None = None
    """How much likelier it finds its own next token than the other's, as a difference of
    log-probabilities; None if it does not say."""
    is_least: bool = False
    """Whether the margin is more than that: the other's token is not among its likeliest."""


@dataclass(frozen=True)
class Pair:
    """The answers of both to one prompt."""

    prompt: str
    common: str
    """How both answers begin."""
    one: Side
    other: Side
    verdict: str
    """``equal``, ``tie``, ``differs``, ``unexplained`` if no server says how sure it was, or
    ``unanswered``."""


@dataclass
class Comparison:
    """What the answers of two servers have in common."""

    one: str
    other: str
    precision: str
    pairs: list[Pair] = field(default_factory=list)
    tokens: int = 0
    """The tokens that both wrote, after the same text."""
    largest: float = 0.0
    """The largest difference of the log-probabilities of one of these."""
    ended: str = ""
    """Why not all prompts were asked."""
    _sum: float = 0.0

    @property
    def mean(self) -> float:
        """The mean difference of the log-probabilities of the tokens that both wrote."""
        return self._sum / self.tokens if self.tokens else 0.0

    def count(self, verdict: str) -> int:
        return sum(pair.verdict == verdict for pair in self.pairs)

    @property
    def differs(self) -> bool:
        """Whether anything differs that rounding does not explain, or was not asked."""
        return bool(self.ended) or any(pair.verdict not in ("equal", "tie") for pair in self.pairs)

    def content(self) -> dict[str, object]:
        """Return it as a report in JSON has it."""
        return {
            "one": self.one,
            "other": self.other,
            "precision": self.precision,
            "ended": self.ended,
            "tokens": self.tokens,
            "largest_difference": self.largest,
            "mean_difference": self.mean,
            "pairs": [asdict(pair) for pair in self.pairs],
        }

    def add(self, prompt: str, one: Reply | str, other: Reply | str) -> Pair:
        """Add the answers to a prompt, or why there is none."""
        if isinstance(one, str) or isinstance(other, str):
            pair = Pair(prompt, "", _unanswered(one), _unanswered(other), "unanswered")
        else:
            self._measure(one, other)
            pair = _pair(prompt, one, other, EXPLAINED[self.precision])
        self.pairs.append(pair)
        return pair

    def _measure(self, one: Reply, other: Reply) -> None:
        for ours, theirs in zip(one.logprobs or (), other.logprobs or (), strict=False):
            if ours.token != theirs.token:
                return
            found = abs(ours.logprob - theirs.logprob)
            if math.isfinite(found):
                self.tokens += 1
                self._sum += found
                self.largest = max(self.largest, found)


def compare_servers(
    one: Examination,
    other: Examination,
    names: tuple[str, str],
    *,
    tokens: int,
    chat: bool = False,
    questions: Sequence[Question] = (),
    tell: Callable[[int], None] = lambda _: None,
) -> Comparison:
    """Ask two servers the same, both at once: by default the prompts of the first examination."""
    found = Comparison(*names, precision=one.precision)
    tops = [_offered(exam) for exam in (one, other)]
    questions = questions or [*map(Question, one.prompts)]
    for number, question in enumerate(questions):
        calls = [
            partial(_answer, exam, question, tokens, top, chat=chat)
            for exam, top in zip((one, other), tops, strict=True)
        ]
        try:
            found.add(question.shown, *at_once(calls, 2))
        except OutOfBudget as error:
            found.ended = str(error)
            break
        tell(number + 1)
    return found


def _offered(exam: Examination) -> int:
    """Return how many likely tokens a server tells with each of its own; 0 if none."""
    try:
        exam.offer("logprobs", _TOP)
    except NotOffered:
        return 0
    return _TOP


def _answer(
    exam: Examination, question: Question, tokens: int, top: int, *, chat: bool
) -> Reply | str:
    options = {"logprobs": top} if top else {}
    ask: Ask = exam.greedy(question.text, tokens, **options)
    if chat or question.messages:
        messages = question.messages or ({"role": "user", "content": question.text},)
        ask = exam.chat(*messages, tokens=tokens, **options)
    try:
        return exam.try_ask(ask)
    except (Refusal, Gone) as error:
        return error.problem


def _pair(prompt: str, one: Reply, other: Reply, explained: float) -> Pair:
    if one.text == other.text:
        return Pair(prompt, one.text, Side(), Side(), "equal")
    common = _common(one.text, other.text)
    parting = Parting.find(one.logprobs or (), other.logprobs or ())
    if parting is None:
        ours, theirs = (Side(reply.text[len(common) :]) for reply in (one, other))
        return Pair(prompt, common, ours, theirs, "unexplained")
    # The text before a token, so that what follows begins with whole tokens.
    before = "".join(entry.token for entry in (one.logprobs or ())[: parting.at])
    if one.text.startswith(before) and other.text.startswith(before):
        common = before
    texts = one.text[len(common) :], other.text[len(common) :]
    ours = Side(texts[0], margin=parting.one.margin, is_least=parting.one.is_least)
    theirs = Side(texts[1], margin=parting.other.margin, is_least=parting.other.is_least)
    verdict = parting.verdict(explained)
    return Pair(prompt, common, ours, theirs, verdict)


def _unanswered(reply: Reply | str) -> Side:
    return Side(error=reply) if isinstance(reply, str) else Side(reply.text)


def _common(one: str, other: str) -> str:
    """Return how two texts both begin."""
    pairs = enumerate(zip(one, other, strict=False))
    return one[: next((at for at, (ours, theirs) in pairs if ours != theirs), len(other))]


def lines(found: Comparison, most: int = 10) -> Iterator[str]:
    """Yield a comparison in words: the counts, and pairs that rounding does not explain."""
    total = len(found.pairs)
    words = {
        "equal": "equal",
        "tie": f"differ by what {found.precision} explains",
        "differs": "differ by more",
        "unexplained": "differ, and it is not said how sure the servers were",
        "unanswered": "have not both an answer",
    }
    for verdict, said in words.items():
        if number := found.count(verdict):
            yield f"{number} of {total} {said}"
    if found.tokens:
        yield (
            f"of {found.tokens} tokens that both wrote, the log-probabilities differ by "
            f"{found.mean:.2g} on average, {found.largest:.2g} at most"
        )
    shown = [pair for pair in found.pairs if pair.verdict not in ("equal", "tie")]
    for pair in shown[:most]:
        yield ""
        yield f"{pair.prompt!r} {pair.common!r}"
        for name, side in ((found.one, pair.one), (found.other, pair.other)):
            yield f"  {name}: {side.error or repr(side.text)}{_sure(side)}"
    if shown[most:]:
        yield f"and {len(shown) - most} more: --json has all"
    if found.ended:
        yield f"not all prompts were asked: {found.ended}"


def _sure(side: Side) -> str:
    if side.margin is None:
        return ""
    times = math.exp(min(side.margin, 50.0))
    more = "over " if side.is_least else ""
    return f" ({more}{times:.3g} times as likely to it as the other's token)"
