"""A generator, an embedder and a reranker in one Triton, under mixed load for some minutes.

    python -m tests.reliability.three_models [--seconds 600]

Every answer is checked: a vector against the one that its text had at first, a ranking against its
first order, a greedy text against its first words. It prints how long each model's requests took,
the embedder's also while nothing else ran, and exits with 1 if any request failed or differed.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from llmserve.errors import LLMServeError
from llmserve.testing import LiveTriton
from llmserve.testing.tiny_encoders import save_classifier
from tests.real.model import converted_model, real_encoder

ALONE_SECONDS = 10.0
WRITERS, EMBEDDERS, RANKERS = 4, 4, 2
SENTENCES = [
    "The cat sleeps on the sofa all day.",
    "Mix flour, water, salt and yeast, and bake the dough.",
    "Peace was signed in the spring of 1945.",
    "A river runs through the old town, under seven bridges. " * 6,
    "It rains.",
]

Ask = Callable[[random.Random], None]


@dataclass
class Kind:
    """The requests to one model."""

    ask: Ask
    clients: int
    seconds: list[float] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    def run(self, until: float, seed: int) -> None:
        draw = random.Random(seed)
        while (start := time.monotonic()) < until:
            try:
                self.ask(draw)
            except (LLMServeError, AssertionError) as error:
                self.problems.append(str(error).strip().splitlines()[0])
            self.seconds.append(time.monotonic() - start)

    def line(self, name: str) -> str:
        if not self.seconds:
            return f"{name}: no request was answered"
        half, most, longest = (np.quantile(self.seconds, share) * 1e3 for share in (0.5, 0.95, 1))
        return (
            f"{name}: {len(self.seconds)} requests, {half:.0f} ms at the median, "
            f"{most:.0f} at the 95th percentile, {longest:.0f} at most, {len(self.problems)} failed"
        )


def load(kinds: dict[str, Kind], seconds: float) -> None:
    until = time.monotonic() + seconds
    threads = [
        threading.Thread(target=kind.run, args=(until, seed))
        for kind in kinds.values()
        for seed in range(kind.clients)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def embedding(live: LiveTriton, model: str) -> Kind:
    texts = [" ".join(SENTENCES[at:] + SENTENCES[:at])[: 40 * (at + 1)] for at in range(5)]
    texts += SENTENCES
    first = live.client.embed(model, texts)

    def ask(draw: random.Random) -> None:
        some = draw.sample(range(len(texts)), draw.randint(1, len(texts)))
        found = live.client.embed(model, [texts[at] for at in some])
        np.testing.assert_allclose(found, first[some], atol=1e-5)

    return Kind(ask, EMBEDDERS)


def ranking(live: LiveTriton, model: str) -> Kind:
    def order(count: int) -> list[int]:
        ranked = live.client.rerank(model, "Where do cats sleep?", SENTENCES[:count], truncate=True)
        return [document.index for document in ranked]

    first = {count: order(count) for count in range(2, len(SENTENCES) + 1)}

    def ask(draw: random.Random) -> None:
        count = draw.choice([*first])
        found = order(count)
        assert found == first[count], f"{found} instead of {first[count]}"

    return Kind(ask, RANKERS)


def writing(live: LiveTriton, model: str) -> Kind:
    def answer(prompt: str) -> str:
        return live.client.generate(model, prompt, max_tokens=8).text

    first = {prompt: answer(prompt) for prompt in SENTENCES}

    def ask(draw: random.Random) -> None:
        prompt = draw.choice([*first])
        length = draw.randint(8, 96)
        text = live.client.generate(model, prompt, max_tokens=length, ignore_eos=True).text
        # Beside others, products are summed in another order: the first words are the same.
        assert text.startswith(first[prompt][:8]), f"{text[:60]!r} after {prompt[:30]!r}"

    return Kind(ask, WRITERS)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=600)
    seconds: float = parser.parse_args().seconds
    with tempfile.TemporaryDirectory() as home, LiveTriton.start(Path(home) / "models") as live:
        ranker = save_classifier(Path(home) / "ranker", num_labels=1)
        embed = embedding(live, live.build("embed", str(real_encoder())))
        rank = ranking(live, live.build("rerank", str(ranker)))
        # In bfloat16, some first words are ties that rounding decides: it depends on the batch.
        exact = {"dtype": "float32", "cache_tokens": 8192}
        write = writing(live, live.build("iterative", str(converted_model()), **exact))
        alone = Kind(embed.ask, EMBEDDERS)
        load({"embedder": alone}, ALONE_SECONDS)
        print(alone.line("embedder, alone"), flush=True)
        kinds = {"embedder": embed, "reranker": rank, "generator": write}
        load(kinds, seconds)
        for name, kind in kinds.items():
            print(kind.line(name))
            for problem in sorted({*kind.problems})[:5]:
                print(f"  {problem}")
        return int(any(kind.problems or not kind.seconds for kind in (alone, *kinds.values())))


if __name__ == "__main__":
    sys.exit(main())
