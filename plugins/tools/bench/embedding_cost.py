"""The processor time of embeddings against that of the library that most people use for them.

    python -m plugins.tools.bench.embedding_cost [--rounds 3] [--texts 1000] [--only openvino]

Everything computes with one thread, in this process, and processor time is counted instead of
seconds: so the ratios hold on a machine that has other work too. On one side is `encode()` as in
`plugins.tools.bench.embeddings`, on the other a model's own runtime: reading a request, tokenizing,
computing and formatting, without Triton and the network.
"""

from __future__ import annotations

import argparse
import os
import random
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

import llmserve
from llmserve.runtime import BatchDriver, contract
from llmserve.testing import FakeRequest, make_parts
from tests.real.model import real_encoder

from .embeddings import SIZES, VARIANTS, encoder, make_texts
from .gateway import cell

SHARES = (256, 32, 1)
"""How many texts a request has."""


class Served:
    """A built model, asked as Triton asks it."""

    def __init__(self, folder: Path, home: Path, options: dict[str, Any]) -> None:
        one = {"threads": 1, "streams": 1} if "openvino" in options["generator"] else {}
        made = {**one, **options}
        name = f"m{len(list(home.glob('*')))}"
        result = llmserve.build("embed", str(folder), name=name, output=home, **made)
        tokenizer, generator, formatter = (
            resolve_name(part["runtime"])(part["settings"], result.folder / "1")
            for part in map(result.manifest.components.get, ("tokenizer", "generator", "formatter"))
            if part is not None
        )
        parts = make_parts(
            generator,
            tokenizer=tokenizer,
            formatter=formatter,
            answers="vector",
            inputs=["truncate"],
            outputs=[contract.EMBEDDING, contract.INPUT_TOKENS],
        )
        self._driver = BatchDriver({}, Path())
        self._driver.start(parts)

    def embed(self, texts: Sequence[str], share: int) -> Any:
        vectors = []
        for first in range(0, len(texts), share):
            request = FakeRequest({"text_input": [*texts[first : first + share]]}, truncate=True)
            self._driver.execute([request])
            (response,) = request.responses
            vectors.append(response.tensors[contract.EMBEDDING.name])
        return np.concatenate(vectors)


def processor_time(call: Callable[[], Any]) -> tuple[float, Any]:
    before = time.process_time()
    found = call()
    return time.process_time() - before, found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--texts", type=int, default=1000)
    parser.add_argument("--only", nargs="*", choices=VARIANTS, default=[*VARIANTS])
    args = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)
    folder = real_encoder()
    texts = make_texts(folder, args.texts)
    reference, encode = encoder(folder)
    rates: dict[tuple[str, int], list[float]] = {}
    apart: dict[tuple[str, int], float] = {}
    with tempfile.TemporaryDirectory() as home:
        served = {name: Served(folder, Path(home), VARIANTS[name]) for name in args.only}
        calls = [(name, share) for name in served for share in SHARES]
        # What is done once, and is no part of a text's cost.
        for warm in (encode, *(each.embed for each in served.values())):
            warm(texts[:16], SIZES[0])
        for turn in range(args.rounds):
            timed = [processor_time(partial(encode, texts, size)) for size in SIZES]
            spent, expected = min(timed, key=lambda each: each[0])
            for name, share in random.Random(turn).sample(calls, len(calls)):
                own, vectors = processor_time(partial(served[name].embed, texts, share))
                rates.setdefault((name, share), []).append(spent / own)
                apart[name, share] = float(np.abs(vectors - np.stack(expected)).max())
    title = f"Work for a second of a processor, {reference}'s encode() = 1; median (range)"
    table = Table("", "texts a request", "of that", "largest difference", title=title)
    for (name, share), found in sorted(rates.items(), key=lambda item: (item[0][0], -item[0][1])):
        table.add_row(name, str(share), cell(found, 2), f"{apart[name, share]:.1e}")
    Console(width=110).print(table)


if __name__ == "__main__":
    main()
