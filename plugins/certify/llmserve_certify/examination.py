"""The examination of one server: what checks ask with, and how they compare answers."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import count
from typing import TYPE_CHECKING, Any, TypeVar

from llmserve.client import EXPLAINED
from llmserve.runtime.contract import GENERATE
from llmserve_certify.at_once import Late, at_once
from llmserve_certify.endpoint import Ask, Gone, Hostile, Malformed, Refusal, Reply, Subject
from llmserve_certify.outcome import Broken, NotOffered, OutOfBudget, Undecided
from llmserve_certify.reference import Adjust, Noise, Reference, Walk, walk

if TYPE_CHECKING:
    from llmserve_certify.encoder import Encoder, Vector

A = TypeVar("A")
PROMPTS = (
    "Programming in C++ is like",
    "The capital of France is",
    "Once upon a time",
    "Hello",
    "The weather in Seoul is cold, and the people who live there wear long coats, thick scarves "
    "and gloves. In the evening they meet in small restaurants, drink hot tea and talk about",
    "A",
    "Where is the nearest",
    "I am going to the market because there is nothing left to eat at home, and",
)
LENGTH = 16
"""The tokens of most answers."""
ASSUMED_SHARE: Mapping[str, float] = {
    "float32": 1e-4, "float16": 3e-3, "bfloat16": 0.03, "int8": 0.1, "int4": 0.3
}  # fmt: skip
"""What a precision may explain of values: the length of a difference, as a share of a vector's
length."""
_ROUNDING_SHARE = 1e-5
_ROUNDING = 1e-3
_TIMES = 2.0
"""How many times the largest change that was measured is still explained by it."""
_BEFORE_ECHO = 16
"""The characters that may stand before a prompt that an answer repeats."""
_EARLY = 3
_EARLY_SHARE = 0.25
_EARLY_LEAST = 3


@dataclass
class Budget:
    """What an examination may take: requests, and seconds."""

    requests: int = 1500
    seconds: float = 1200.0


@dataclass
class Examination:
    """Asks one endpoint, and compares its answers with one another and with the model's.

    ``exact`` refuses every difference, also one that rounding explains.
    """

    endpoint: Subject
    reference: Reference | None = None
    precision: str = ""
    budget: Budget = field(default_factory=Budget)
    prompts: Sequence[str] = PROMPTS
    concurrency: int = 64
    at_once: int = 1
    """How many requests run at once where that is not what a check is about."""
    exact: bool = False
    greedy_options: Mapping[str, Any] | None = None
    """What makes an answer one without chance; by default a temperature of 0, if there is one."""
    quick: bool = False
    encoder: Encoder | None = None
    """The model, of an endpoint that answers with values."""

    def __post_init__(self) -> None:
        self.asked = 0
        self.notes: list[str] = []
        self.figures: dict[str, Any] = {}
        self._lock = threading.Lock()
        self._end = time.monotonic() + self.budget.seconds
        self._alone: dict[tuple[Any, ...], Reply] = {}
        self._walks: dict[tuple[Any, ...], Walk] = {}
        self._offered: dict[tuple[str, str], str | None] = {}
        self._noise: Noise | None = None
        self._share: float | None = None
        self.kept: dict[Any, Any] = {}
        """What several checks look at, asked for only once."""
        self.echoes = False
        self.lost = False
        """Whether a request has had no answer."""
        if not self.precision:
            known = self.reference or self.encoder
            self.precision = known.precision if known else "bfloat16"

    @property
    def model(self) -> Reference:
        """The model to compare with; a check without one is left out."""
        if self.reference is None:
            raise NotOffered("it needs the model: --against")
        return self.reference

    # Requests

    def takes(self, option: str) -> bool:
        """Whether the endpoint may have an option: one that does not list its options may."""
        return self.endpoint.takes is None or option in self.endpoint.takes

    def greedy(self, prompt: str, tokens: int = LENGTH, **options: Any) -> Ask:
        """Return a request whose answer does not depend on chance."""
        return Ask(prompt, options={**self.limit(tokens), **self._no_chance(), **options})

    def chat(self, *messages: Mapping[str, Any], tokens: int = LENGTH, **options: Any) -> Ask:
        content = {**self.limit(tokens), **self._no_chance(), **options}
        return Ask(messages=messages, options=content)

    def limit(self, tokens: int) -> dict[str, Any]:
        return {"max_tokens": tokens} if self.takes("max_tokens") else {}

    def _no_chance(self) -> Mapping[str, Any]:
        if self.greedy_options is not None:
            return self.greedy_options
        return {"temperature": 0.0} if self.takes("temperature") else {}

    def ask(self, ask: Ask) -> Reply:
        """Return the answer to a request that must be answered."""
        try:
            return self.try_ask(ask)
        except Refusal as error:
            raise _refused(ask, error) from None
        except Gone as error:
            raise _no_answer(ask, error) from None

    def try_ask(self, ask: Ask) -> Reply:
        self.count()
        try:
            answer = self.in_time(partial(self.endpoint.ask, ask))
        except (Refusal, Gone) as error:
            error.ask = ask
            raise
        return replace(answer, text=after_echo(ask, answer)) if self.echoes else answer

    def send(self, hostile: Hostile) -> Reply | None:
        """Send a request that may be refused; raise :class:`Refusal` or :class:`Gone`."""
        self.count()
        return self.in_time(partial(self.endpoint.send, hostile))

    def count(self, requests: int = 1) -> None:
        """Count requests against the budget."""
        with self._lock:
            if self.asked + requests > self.budget.requests:
                raise OutOfBudget(f"the budget of {self.budget.requests} requests is used up")
            self.check_time()
            self.asked += requests

    @property
    def seconds_left(self) -> float:
        return max(0.0, self._end - time.monotonic())

    def check_time(self) -> None:
        if not self.seconds_left:
            raise self._late()

    def _late(self) -> OutOfBudget:
        return OutOfBudget(f"the budget of {self.budget.seconds:g} seconds is used up")

    def in_time(self, call: Callable[[], A]) -> A:
        """Return the result of a call, for which no longer is waited than the budget allows."""
        try:
            return at_once([call], 1, self.seconds_left)[0]
        except Late:
            raise self._late() from None
        except Malformed:
            raise
        except (Gone, Refusal) as error:
            if isinstance(error, Gone) or error.is_about_server:
                self.lost = True
            raise

    def pause(self, seconds: float) -> None:
        """Wait, but no longer than the budget allows."""
        time.sleep(min(seconds, self.seconds_left))
        self.check_time()

    def alone(self, ask: Ask) -> Reply:
        """Return the answer to a request while no other runs, asked only once."""
        key = _key(ask)
        if key not in self._alone:
            self._alone[key] = self.ask(ask)
        return self._alone[key]

    def try_values(self, texts: Sequence[str]) -> list[Vector]:
        self.count()
        vectors = self.in_time(partial(self.endpoint.values, texts))
        if len(vectors) != len(texts):
            words = f"{len(texts)} texts have {len(vectors)} values"
            raise Malformed(words, got=f"{len(vectors)} values")
        return vectors

    def values(self, texts: Sequence[str]) -> list[Vector]:
        """Return the values of texts that must have some."""
        curl = self.endpoint.values_curl(texts)
        try:
            return self.try_values(texts)
        except Refusal as error:
            words = f"valid texts are refused ({error.status}): {error.words}"
            raise Broken(words, expected="values", got=error.words).with_curl(curl) from None
        except Gone as error:
            broken = Broken(error.problem, expected="values", got=error.got)
            raise broken.with_curl(curl) from None

    def values_together(self, requests: Sequence[Sequence[str]]) -> list[list[Vector]]:
        """Return the values of the texts of several requests that run at once."""
        return at_once([partial(self.values, texts) for texts in requests], self.concurrency)

    def forget_answers(self) -> None:
        self._alone.clear()

    def together(
        self, asks: Sequence[Ask], *, delay: float = 0.0, most: int | None = None
    ) -> list[Reply]:
        """Return the answers to requests that run at once, or start one after another."""
        numbers = count()

        def job(ask: Ask) -> Reply:
            if delay:
                time.sleep(delay * next(numbers))
            return self.ask(ask)

        return at_once([partial(job, ask) for ask in asks], most or self.concurrency)

    def gather(self, asks: Sequence[Ask]) -> list[Reply | Refusal]:
        """Return the answers to requests that run at once, of which some may be refused."""

        def job(ask: Ask) -> Reply | Refusal:
            try:
                return self.try_ask(ask)
            except Refusal as error:
                return error
            except Gone as error:
                raise _no_answer(ask, error) from None

        return at_once([partial(job, ask) for ask in asks], self.concurrency)

    def is_refused(self, ask: Ask) -> bool:
        try:
            self.try_ask(ask)
        except Refusal:
            return True
        return False

    def offer(self, option: str, value: Any, **others: Any) -> None:
        """Raise :class:`NotOffered` if the endpoint refuses an option with this value."""
        if not self.takes(option):
            raise NotOffered(f"the model has no input {option}")
        key = option, repr(value)
        if key not in self._offered:
            ask = self.greedy(self.prompts[0], 2, **others, **{option: value})
            try:
                self.try_ask(ask)
            except Refusal as error:
                if error.is_about_server:
                    raise _refused(ask, error) from None
                self._offered[key] = f"{option} is refused: {error.words}"
            except Gone as error:
                problem = f"{option} gets no answer: {error.problem}"
                raise Broken(problem, expected="an answer", got=error.got, ask=ask) from None
            else:
                self._offered[key] = None
        if (words := self._offered[key]) is not None:
            raise NotOffered(words)

    # Comparisons

    def note(self, words: str) -> None:
        if words not in self.notes:
            self.notes.append(words)

    def noise(self) -> Noise:
        """Return what the precision changes, measured on the model along its own answers."""
        if self._noise is None:
            sequences = []
            for prompt in self.prompts[:6]:
                ids = self.model.encode(prompt)
                with suppress(Broken):
                    answer = self.alone(self.greedy(prompt))
                    ids += walk(self.model, ids, answer.text, most=32).ids
                sequences.append(ids)
            self._noise = self.model.noise(self.precision, sequences)
        return self._noise

    @property
    def margin(self) -> float:
        """The difference in logits that the precision explains."""
        if self.reference is None:
            return EXPLAINED.get(self.precision, EXPLAINED["bfloat16"])
        return _TIMES * self.noise().gap + _ROUNDING

    @property
    def value_margin(self) -> float:
        """The difference of values that the precision explains, as a share of their length."""
        if self.encoder is None:
            return ASSUMED_SHARE.get(self.precision, ASSUMED_SHARE["bfloat16"])
        if self._share is None:
            self._share = self.encoder.noise(self.precision, self.prompts[:5])
        return _TIMES * self._share + _ROUNDING_SHARE

    @property
    def known_margin(self) -> float | None:
        """The margin of either kind, as far as it is known without asking and computing more."""
        if self.endpoint.task == GENERATE:
            return self.margin if self.reference is None or self._noise is not None else None
        return self.value_margin if self.encoder is None or self._share is not None else None

    def ids_of(self, ask: Ask) -> list[int]:
        if ask.messages:
            text = self.model.render(ask.messages)
            return self.model.encode(text, special=False)
        return self.model.encode(ask.prompt)

    def walk(
        self,
        ask: Ask,
        answer: Reply,
        *,
        ids: Sequence[int] | None = None,
        adjust: Adjust | None = None,
    ) -> Walk:
        """Lead the model along an answer."""
        prompt = tuple(self.ids_of(ask) if ids is None else ids)
        limit = int(ask.options.get("max_tokens") or 0)
        is_ended = answer.finish_reason == "stop" and not ask.options.get("stop_words")
        # An answer that is cut in the middle of a character has more tokens than its text shows.
        below = limit if is_ended and not answer.text.endswith("\ufffd") else 0
        key = (prompt, answer.text, below)
        if adjust is None and key in self._walks:
            return self._walks[key]
        self.check_time()
        text = answer.text
        if text and not text[:1].isspace():
            text = self._with_first_space(prompt, text)
        most = (limit or 256) + 8
        found = walk(self.model, prompt, text, ended_below=below, most=most, adjust=adjust)
        if adjust is None:
            self._walks[key] = found
        return found

    def _with_first_space(self, prompt: Sequence[int], text: str) -> str:
        """Return the text with the space that a server may leave out at its beginning."""
        import numpy as np

        first = int(np.argmax(self.model.scores(prompt)))
        written = self.model.decode(prompt, [first])
        if written.startswith(" ") and len(written) > 1 and text.startswith(written[1:]):
            self.note("the server leaves out the space at the beginning of an answer")
            return f" {text}"
        return text

    def is_explained(self, found: Walk, margin: float | None = None) -> bool:
        worst = found.worst
        allowed = self.margin if margin is None else margin
        return found.is_complete and (worst is None or worst.gap <= allowed)

    def is_tie(self, ask: Ask, answer: Reply) -> bool:
        """Whether the model, if it is there, could answer so as well but for rounding."""
        return self.reference is not None and self.is_explained(self.walk(ask, answer))

    def expect_model(self, ask: Ask, answer: Reply, doing: str) -> Walk:
        """Expect that the model, led along an answer, takes no other token."""
        found = self.walk(ask, answer)
        if found.worst is None:
            return found
        if self.is_explained(found):
            self._note_tie(found, doing)
            return found
        fork = next(f for f in found.forks if f.gap > self.margin or not found.is_complete)
        ids, ended = list(found.ids[: fork.position]), found.is_complete
        before = self.model.decode(self.ids_of(ask), ids)
        size = f"{fork.gap:.3g}" if ended or fork is not found.forks[-1] else f"over {fork.gap:.3g}"
        raise Broken(
            f"{doing}, token {fork.position + 1} is {fork.taken!r}, where the model prefers "
            f"{fork.preferred!r} by {size}; {self.precision} explains {self.margin:.2g}",
            expected=before + fork.preferred,
            got=answer.text,
            ask=ask,
        )

    def _note_tie(self, found: Walk, doing: str) -> None:
        worst = found.worst
        if worst is None:
            return
        self.figures["ties"] = self.figures.get("ties", 0) + len(found.forks)
        self.figures["largest tie"] = max(self.figures.get("largest tie", 0.0), round(worst.gap, 4))
        self.note(
            f"{doing}, {worst.taken!r} instead of {worst.preferred!r} is a tie: the model's "
            f"difference is {worst.gap:.2g}, and {self.precision} explains {self.margin:.2g}"
        )

    def expect_each(
        self, asks: Sequence[Ask], expected: Sequence[Reply], got: Sequence[Reply], doing: str
    ) -> None:
        """Expect the same texts; a difference that rounding explains is noted."""
        open_pairs = []
        for ask, want, answer in zip(asks, expected, got, strict=True):
            if self.exact and _exactly(want) != _exactly(answer):
                raise _differs(ask, want, answer, doing)
            if want.text == answer.text:
                continue
            if self.reference is not None and self._is_comparable(ask):
                self.expect_model(ask, answer, doing)
            else:
                open_pairs.append((ask, want, answer))
        if open_pairs:
            self._without_model(open_pairs, len(asks), doing)

    @staticmethod
    def _is_comparable(ask: Ask) -> bool:
        return not ask.options.get("temperature")

    def _without_model(
        self, pairs: Sequence[tuple[Ask, Reply, Reply]], asked: int, doing: str
    ) -> None:
        """Decide what can be decided of differences where no model is there to ask."""
        early = [pair for pair in pairs if _common_words(pair[1].text, pair[2].text) < _EARLY]
        if len(early) >= max(_EARLY_LEAST, _EARLY_SHARE * asked):
            ask, want, answer = early[0]
            words = f"{len(early)} of {asked} answers differ within three words {doing}"
            raise Broken(words, expected=want.text, got=answer.text, ask=ask)
        ask, want, answer = pairs[0]
        raise Undecided(
            f"{len(pairs)} of {asked} answers differ {doing}, as {answer.text[:60]!r} instead of "
            f"{want.text[:60]!r}: only the model can say whether that is rounding (--against)"
        )


def _refused(ask: Ask, error: Refusal) -> Broken:
    words = f"a valid request is refused ({error.status}): {error.words}"
    return Broken(words, expected="an answer", got=error.words, ask=ask)


def _no_answer(ask: Ask, error: Gone) -> Broken:
    return Broken(error.problem, expected="an answer", got=error.got, ask=ask)


def after_echo(ask: Ask, answer: Reply) -> str:
    """Return what comes after a prompt that an answer begins with, or special tokens and it."""
    text, prompt = answer.text, ask.prompt
    at = text.find(prompt, 0, len(prompt) + _BEFORE_ECHO) if prompt else -1
    return text[at + len(prompt) :] if at >= 0 else text


def _exactly(answer: Reply) -> tuple[str, str | None, int | None]:
    return answer.text, answer.finish_reason, answer.output_tokens


def _differs(ask: Ask, want: Reply, answer: Reply, doing: str) -> Broken:
    words = f"the answer to {ask.prompt!r} differs {doing}"
    return Broken(words, expected=_exactly(want), got=_exactly(answer), ask=ask)


def _common_words(one: str, other: str) -> int:
    pairs = zip(one.split(" "), other.split(" "), strict=False)
    return next((n for n, (a, b) in enumerate(pairs) if a != b), _EARLY)


def _key(ask: Ask) -> tuple[Any, ...]:
    options = tuple(sorted((name, repr(value)) for name, value in ask.options.items()))
    return ask.prompt, repr(ask.messages), options, ask.stream, ask.images


@contextmanager
def timed() -> Iterator[Callable[[], float]]:
    began = time.monotonic()
    yield lambda: time.monotonic() - began
