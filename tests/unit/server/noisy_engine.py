"""An engine of nothing but scores, which change a little from one request to the next."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from types import SimpleNamespace
from typing import Any

from llmserve.client import EXPLAINED, Logprob
from llmserve.contract.live_answer import LiveAnswer
from llmserve.server.keep.known_answers import LENGTH, PROMPTS, TOP, KnownAnswer, KnownAnswers

NOISE = {"float32": 1e-3, "bfloat16": 0.1, "int8": 0.2}
"""By how much a logit changes from one request to the next, at most."""
WORDS = [f"w{number}" for number in range(12)]
_INPUTS = {
    "adapter", "input_ids", "logprobs", "max_tokens", "prompt_logprobs", "prompt_only"
}  # fmt: skip


@lru_cache(maxsize=100_000)
def logits(weights: int, before: tuple[str, ...]) -> tuple[float, ...]:
    """Return scores in steps of a half, so that the two likeliest are often equal."""
    chance = random.Random(f"{weights} {before}")
    return tuple(round(chance.gauss(0, 1.5) * 2) / 2 for _ in WORDS)


@lru_cache(maxsize=100_000)
def adapted(weights: int, adapter: int, before: tuple[str, ...]) -> tuple[float, ...]:
    """Return the same with what an adapter adds, in steps of a half as well."""
    chance = random.Random(f"{adapter} {before}")
    return tuple(
        each + chance.choice((-1.0, -0.5, 0.0, 0.5, 1.0)) for each in logits(weights, before)
    )


@dataclass
class Engine:
    """Computes answers from scores that change a little each time."""

    noise: float
    weights: int = 1
    adapters: dict[str, int] = field(default_factory=dict)
    """Its adapters by name, and which weights each has."""
    chance: random.Random = field(default_factory=lambda: random.Random(0))

    def answer(self, prompt: str) -> KnownAnswer:
        """Return the likeliest answer."""
        return KnownAnswer(prompt, False, tuple(map(ord, prompt)), self.tokens(prompt))

    def tokens(
        self, prompt: str, adapter: str = "", *, temperature: float = 0.0, count: int = LENGTH
    ) -> tuple[Logprob, ...]:
        """Return the tokens of an answer, each chosen after the ones before."""
        before: tuple[str, ...] = (prompt,)
        tokens: list[Logprob] = []
        for _ in range(count):
            token = self.next(before, adapter, temperature)
            tokens.append(token)
            before = (*before, token.token)
        return tuple(tokens)

    def next(self, before: tuple[str, ...], adapter: str = "", temperature: float = 0.0) -> Logprob:
        """Return the token that follows, with the likeliest ones."""
        scores = self._scores(before, adapter)
        ranked = sorted(range(len(WORDS)), key=lambda at: -scores[at])
        top = tuple(Logprob(at, WORDS[at], scores[at]) for at in ranked[:TOP])
        chosen = ranked[0]
        if temperature:
            likely = [math.exp(scores[at] / temperature) for at in ranked]
            (chosen,) = self.chance.choices(ranked, likely)
        return Logprob(chosen, WORDS[chosen], scores[chosen], top=top)

    def read(self, prompt: str, ids: Sequence[int], adapter: str = "") -> list[Logprob]:
        """Return how likely it finds the tokens of an answer that it is given."""
        found: list[Logprob] = []
        before: tuple[str, ...] = (prompt,)
        for each in ids:
            scores = self._scores(before, adapter)
            first = max(range(len(WORDS)), key=lambda at: scores[at])
            likeliest = Logprob(first, WORDS[first], scores[first])
            found.append(Logprob(each, WORDS[each], scores[each], top=(likeliest,)))
            before = (*before, WORDS[each])
        return found

    def live(self, prompt: str, adapter: str = "", temperature: float = 0.0) -> LiveAnswer:
        """Return an answer to a user, as the gateway hands it over."""
        tokens = self.tokens(prompt, adapter, temperature=temperature)
        asked = {"prompt": prompt, **({"adapter": adapter} if adapter else {})}
        return LiveAnswer.of("m", asked, tokens, len(prompt))

    def _scores(self, before: tuple[str, ...], adapter: str) -> list[float]:
        """Return the log-probabilities of all words."""
        exact = logits(self.weights, before)
        if adapter:
            exact = adapted(self.weights, self.adapters[adapter], before)
        scores = [each + self.chance.uniform(-self.noise, self.noise) for each in exact]
        level = math.log(sum(math.exp(each) for each in scores))
        return [each - level for each in scores]


def known_of(engine: Engine, precision: str) -> KnownAnswers:
    answers = tuple(map(engine.answer, PROMPTS))
    return KnownAnswers("fp", EXPLAINED[precision], "", answers)


class EngineClient:
    """Asks such an engine as Triton's client does, by what the judging of answers needs."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine

    async def model(self, name: str) -> Any:
        return SimpleNamespace(
            inputs=_INPUTS, made_by_llmserve="1", input_of=lambda name: name in _INPUTS or None
        )

    async def generate(self, name: str, prompt: str = "", **options: Any) -> Any:
        ids: list[int] = options.get("input_ids") or [*map(ord, prompt)]
        adapter = options.get("adapter", "")
        if options.get("prompt_only"):
            return SimpleNamespace(text=json.dumps({"ids": ids, "context_length": 4096}))
        # The words have the small ids, and no prompt has a character of them.
        read = next((at for at, each in enumerate(ids) if each < len(WORDS)), len(ids))
        text = "".join(map(chr, ids[:read]))
        if "prompt_logprobs" in options:
            entries = [{"id": each, "token": "", "logprob": -1.0} for each in ids[:read]]
            scored = self.engine.read(text, ids[read:], adapter)
            entries += [{**_entry(each), "top": [*map(_entry, each.top)]} for each in scored]
            return SimpleNamespace(extra={"prompt_logprobs": json.dumps(entries)}, logprobs=())
        tokens = self.engine.tokens(text, adapter, count=options["max_tokens"])
        return SimpleNamespace(extra={}, logprobs=tokens)


def _entry(token: Logprob) -> dict[str, Any]:
    return {"id": token.id, "token": token.token, "logprob": token.logprob}
