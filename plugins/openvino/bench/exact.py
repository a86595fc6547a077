"""Measures what ``exact_batches`` costs: tokens a second with it and without, in turns.

    python plugins/openvino/bench/exact.py MODEL [--formats int8,int4,bf16] [--rounds 5]

MODEL is a checkpoint's folder. Every format is built once; the answers of all sequences have
``TOKENS`` tokens after a prompt of ``PROMPT``. Everything runs in this process.
"""

from __future__ import annotations

import argparse
import random
import tempfile
import time
from pathlib import Path
from statistics import median

import llmserve
from llmserve.runtime import Engine, Generation, Params
from llmserve.testing import ByteTokenizer
from llmserve_openvino.engine import OpenVinoGenerator

COUNTS = (1, 8, 32)
PROMPT, TOKENS = 64, 64


def rates(engine: Engine, count: int, rng: random.Random) -> tuple[float, float]:
    """Return tokens a second of prompts, and of answers of so many sequences."""
    requests = [
        Generation(
            [rng.randrange(10, 1000) for _ in range(PROMPT)], Params(), max_tokens=TOKENS,
            eos_ids=frozenset(), decode=lambda _: "",
        )
        for _ in range(count)
    ]  # fmt: skip
    for request in requests:
        engine.admit(request)
    began = time.perf_counter()
    while not all(request.token_ids for request in requests):
        engine.step()
    read, before = time.perf_counter(), sum(len(request.token_ids) for request in requests)
    while engine.busy:
        engine.step()
    return count * PROMPT / (read - began), (count * TOKENS - before) / (time.perf_counter() - read)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("--formats", default="int8,int4,bf16")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    print("format, sequences: tokens/s without (range), with (range), ratio; of the prompts, ratio")
    for weights in options.formats.split(","):
        with tempfile.TemporaryDirectory() as scratch:
            built = llmserve.build(
                "openvino", options.model, output=Path(scratch), name="m", weight_format=weights
            )
            settings = built.manifest.components["generator"]["settings"]
            engines = {
                exact: OpenVinoGenerator(
                    {**settings, "exact_batches": exact, "prefix_cache": False}, built.folder / "1"
                ).stepper(ByteTokenizer())
                for exact in (False, True)
            }
            for count in COUNTS:
                found: dict[bool, list[tuple[float, float]]] = {False: [], True: []}
                for turn in range(options.rounds + 1):
                    for exact, engine in engines.items():
                        each = rates(engine, count, random.Random(turn))
                        # The first round is for what is made on first use.
                        found[exact] += [each] if turn else []
                read, made = (
                    {exact: [each[kind] for each in rows] for exact, rows in found.items()}
                    for kind in (0, 1)
                )
                words = [
                    f"{median(row):.0f} ({min(row):.0f} to {max(row):.0f})" for row in made.values()
                ]
                ratios = [
                    median(b / a for a, b in zip(row[False], row[True], strict=True))
                    for row in (made, read)
                ]
                print(
                    f"{weights}, {count}: {', '.join(words)}, {ratios[0]:.2f}; {ratios[1]:.2f}",
                    flush=True,
                )


if __name__ == "__main__":
    main()
