"""What the model itself says: the other side of a comparison."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Scores = NDArray[np.float32]
    """A logit for each token of the vocabulary."""

Adjust = Callable[[Any, Sequence[int]], Any]
"""Changes the scores of the next token, given the ids of the answer so far."""
CANDIDATES = 200
"""How many of the likeliest tokens may explain the next part of an answer."""


class Noise(NamedTuple):
    """How far rounding to a precision moves what the model says.

    ``gap`` is the largest change of the difference between two of a position's likeliest tokens,
    ``logprob`` that of a log-probability, at ``positions`` positions.
    """

    gap: float
    logprob: float
    positions: int


class Reference(Protocol):
    """A model that this machine can run, one sequence at a time."""

    name: str
    precision: str
    """The type of its weights as they are stored, such as ``bfloat16``."""
    context: int | None
    begin: int | None
    """The token that begins every prompt, if there is one."""
    ends: frozenset[int]
    special_texts: tuple[str, ...]
    chats: bool

    def describe(self) -> dict[str, str]: ...

    def encode(self, text: str, *, special: bool = True) -> list[int]:
        """Return the ids of a prompt, with or without those that begin or end every prompt."""
        ...

    def decode(self, prompt: Sequence[int], answer: Sequence[int]) -> str:
        """Return the text of an answer after its prompt, without special tokens."""
        ...

    def render(self, messages: Sequence[Mapping[str, Any]], *, opened: bool = True) -> str:
        """Return a chat as its template writes it; raise ValueError if it cannot."""
        ...

    def scores(self, ids: Sequence[int]) -> Scores:
        """Return the logits of the token after these."""
        ...

    def noise(self, precision: str, sequences: Sequence[Sequence[int]]) -> Noise:
        """Measure what rounding the weights and results to a precision changes."""
        ...


@dataclass(frozen=True)
class Fork:
    """A place where an answer takes another token than the model's likeliest."""

    position: int
    gap: float
    """By how much the model prefers its own token, in logits."""
    preferred: str
    taken: str


@dataclass(frozen=True)
class Walk:
    """A model's view of an answer that it is led along, token by token."""

    ids: tuple[int, ...]
    forks: tuple[Fork, ...]
    logprobs: tuple[float, ...]
    tops: tuple[tuple[float, ...], ...] = field(repr=False, default=())
    is_complete: bool = True
    """Whether the likeliest tokens explain all of the text."""

    @property
    def worst(self) -> Fork | None:
        return max(self.forks, key=lambda fork: fork.gap, default=None)


def walk(
    model: Reference,
    prompt: Sequence[int],
    text: str,
    *,
    ended_below: int = 0,
    most: int = 256,
    adjust: Adjust | None = None,
) -> Walk:
    """Lead a model along an answer: at each step it takes the likeliest token that fits the text.

    An answer of fewer tokens than ``ended_below`` must end where the model ends it.
    """
    way = (model, prompt, text, ended_below, most, adjust)
    found = _walk(*way, strict=False)
    if not found.forks or "\ufffd" in text.rstrip("\ufffd"):
        return found
    # A token with a part of a character fits any text so far: it may have led the wrong way.
    other = _walk(*way, strict=True)
    return min(found, other, key=lambda w: (not w.is_complete, w.worst.gap if w.worst else 0.0))


def _walk(
    model: Reference,
    prompt: Sequence[int],
    text: str,
    ended_below: int,
    most: int,
    adjust: Adjust | None,
    *,
    strict: bool,
) -> Walk:
    """Lead a model along an answer; if ``strict``, only by parts of characters that stand there."""
    import numpy as np

    answer: list[int] = []
    forks: list[Fork] = []
    logprobs: list[float] = []
    tops: list[tuple[float, ...]] = []
    # An answer that was cut in the middle of a character may show its beginning as this.
    wanted = text.rstrip("\ufffd")
    written = ""
    complete = True
    while len(answer) < most:
        done = written.rstrip("\ufffd") == wanted and len(written) >= len(wanted)
        if done and len(answer) >= ended_below:
            break
        raw = np.asarray(model.scores([*prompt, *answer]), dtype=np.float64)
        scores = adjust(raw, answer) if adjust else raw
        order = np.argsort(-scores, kind="stable")[:CANDIDATES]
        best = int(order[0])
        if done:
            end = max(model.ends, key=lambda token: scores[token], default=None)
            if end is not None and best not in model.ends:
                gap = float(scores[best] - scores[end])
                preferred = _shown(model, prompt, answer, best, written)
                forks.append(Fork(len(answer), gap, preferred, "(the end)"))
            break
        token = _next(model, prompt, answer, order, written, wanted, strict)
        likeliest = _shown(model, prompt, answer, best, written)
        if token is None:
            taken = wanted[len(written.rstrip("\ufffd")) :][:20]
            gap = float(scores[best] - scores[order[-1]])
            forks.append(Fork(len(answer), gap, likeliest, taken))
            complete = False
            break
        if token != best:
            gap = float(scores[best] - scores[token])
            taken = _shown(model, prompt, answer, token, written)
            forks.append(Fork(len(answer), gap, likeliest, taken))
        level = _log_sum(raw)
        logprobs.append(float(raw[token]) - level)
        tops.append(tuple(float(raw[other]) - level for other in np.argsort(-raw)[:20]))
        answer.append(token)
        written = model.decode(prompt, answer)
    return Walk(tuple(answer), tuple(forks), tuple(logprobs), tuple(tops), complete)


def greedy(
    model: Reference, prompt: Sequence[int], count: int, *, adjust: Adjust | None = None
) -> tuple[list[int], bool]:
    """Return the likeliest answer of at most ``count`` tokens, and whether it ended by itself."""
    import numpy as np

    answer: list[int] = []
    for _ in range(count):
        scores = np.asarray(model.scores([*prompt, *answer]), dtype=np.float64)
        token = int(np.argmax(adjust(scores, answer) if adjust else scores))
        if token in model.ends:
            return answer, True
        answer.append(token)
    return answer, False


def _next(
    model: Reference,
    prompt: Sequence[int],
    answer: Sequence[int],
    order: Any,
    written: str,
    wanted: str,
    strict: bool,
) -> int | None:
    """Return the likeliest token that continues the text, or None."""
    for token in map(int, order):
        if token in model.ends:
            continue
        text = model.decode(prompt, [*answer, token])
        stable = text.rstrip("\ufffd")
        is_part = len(text) > len(stable)
        grows = len(stable) > len(written.rstrip("\ufffd")) or is_part
        if not grows or not wanted.startswith(stable):
            continue
        if not (strict and is_part) or _completes(model, prompt, [*answer, token], stable, wanted):
            return token
    return None


def _completes(
    model: Reference, prompt: Sequence[int], answer: list[int], stable: str, wanted: str
) -> bool:
    """Whether the tokens of the next character complete the part of it that is there."""
    character = wanted[len(stable) : len(stable) + 1]
    # Half of a surrogate pair, which a server may send, has no tokens: nothing can encode it.
    is_whole = character and not "\ud800" <= character <= "\udfff"
    rest = model.encode(character, special=False) if is_whole else []
    texts = (model.decode(prompt, [*answer, *rest[at:]]) for at in range(1, len(rest)))
    return any(wanted.startswith(text) and len(text) > len(stable) for text in texts)


def _shown(
    model: Reference, prompt: Sequence[int], answer: Sequence[int], token: int, written: str
) -> str:
    if token in model.ends:
        return "(the end)"
    return model.decode(prompt, [*answer, token])[len(written.rstrip("\ufffd")) :] or f"#{token}"


def _log_sum(scores: Any) -> float:
    import numpy as np

    top = scores.max()
    return float(top + np.log(np.exp(scores - top).sum()))
