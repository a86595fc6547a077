"""Measures what ``exact_batches`` costs: tokens a second with it and without, in turns.

    python plugins/openvino/bench/exact.py MODEL [--formats int8,int4,bf16] [--rounds 5] [--warm]

MODEL is a checkpoint's folder. Every format is built once; the answers of all sequences have
``TOKENS`` tokens after a prompt of ``PROMPT``. Everything runs in this process. ``--warm`` measures
instead what it costs that full pages are written to disk, of prompts as the answers begin and of
answers, as with ``serve --warm``.
"""

from __future__ import annotations

import argparse
import os
import random
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any
from unittest import mock

import llmserve
from llmserve.plugin import contract
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


def engine_of(folder: Path, settings: dict[str, Any], pages: Path | None = None) -> Engine:
    """Return an engine of a model, which keeps its pages in a folder if there is one."""
    with mock.patch.dict(os.environ, {contract.WARM: str(pages or "")}):
        return OpenVinoGenerator(settings, folder).stepper(ByteTokenizer())


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--warm", action="store_true")
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
            version, pages = built.folder / "1", Path(scratch, "pages")
            if options.warm:
                engines = {
                    kept: engine_of(version, settings, pages if kept else None)
                    for kept in (False, True)
                }
            else:
                engines = {
                    exact: engine_of(
                        version, {**settings, "exact_batches": exact, "prefix_cache": False}
                    )
                    for exact in (False, True)
                }
            for count in COUNTS:
                found: dict[bool, list[tuple[float, float]]] = {False: [], True: []}
                for turn in range(options.rounds + 1):
                    # No prompt is one of an earlier round, and neither is always the second.
                    for exact, engine in sorted(engines.items(), reverse=bool(turn % 2)):
                        each = rates(engine, count, random.Random(1000 * count + turn))
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
            for engine in engines.values():
                engine.close()
            if options.warm:
                files = [path.stat().st_size for path in pages.iterdir()]
                print(f"{len(files)} files, {sum(files) / 1e6:.0f} MB")


if __name__ == "__main__":
    main()
