"""Embeddings through Triton against the library that most people compute them with, in turns.

    python -m plugins.tools.bench.embeddings [--rounds 3] [--texts 1000] [--gateway] [--vllm]

A real encoder (`make real-model`) embeds texts of random lengths. What is measured against is
`encode()` of sentence-transformers in a process of its own, with sorted batches and no server, at
the better of two batch sizes; without that package, the same done with transformers. Ratios are of
one round each, so that drift of the machine affects both sides alike. `--vllm` measures vLLM's own
server too, in the environment of `make test-vllm`.
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import replace
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from llmserve.testing import LiveTriton
from llmserve_bench.figures import figures_of
from llmserve_bench.measure import Plan, bench
from llmserve_bench.prompts import Prompts
from llmserve_bench.results import Load
from llmserve_bench.targets import Target
from tests.real.model import real_encoder

from .gateway import cell, gateway
from .peers import MODEL, vllm

MOST = 256
SIZES = (32, 64)
LOADS = ((1, 1), (32, 1), (256, 1), (1, 16), (32, 16))
"""How many texts a request has, and how many clients send some."""
VARIANTS: dict[str, dict[str, Any]] = {
    "transformers": {"generator": "encoder"},
    "openvino": {"generator": "encoder-openvino"},
    "openvino bf16": {"generator": "encoder-openvino", "dtype": "bfloat16"},
    "openvino int8": {"generator": "encoder-openvino", "weight_format": "int8"},
}
Encode = Callable[[Sequence[str], int], Any]


def make_texts(folder: Path, count: int) -> list[str]:
    """Return texts of words of the vocabulary; most are short, and some are too long."""
    draw = random.Random(0)
    lines = (folder / "vocab.txt").read_text(encoding="utf-8").splitlines()
    words = [word for word in lines if word.isalpha() and word.isascii() and len(word) > 3]
    lengths = [1 + int(draw.expovariate(1 / 40)) for _ in range(count)]
    return [" ".join(draw.choices(words, k=min(length, 200))) for length in lengths]


def encoder(folder: Path) -> tuple[str, Encode]:
    """Return what is measured against, and its name."""
    if find_spec("sentence_transformers"):
        library: Any = import_module("sentence_transformers")
        model = library.SentenceTransformer(str(folder), device="cpu")
        name = f"sentence-transformers {library.__version__}"
        return name, lambda texts, size: model.encode(list(texts), batch_size=size)
    return "transformers", _by_transformers(folder)


def _by_transformers(folder: Path) -> Encode:
    from transformers import AutoModel, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModel.from_pretrained(folder, dtype=torch.float32).eval()

    def encode(texts: Sequence[str], size: int) -> Any:
        rows: dict[int, Any] = {}
        order = sorted(range(len(texts)), key=lambda at: -len(texts[at]))
        for first in range(0, len(texts), size):
            some = order[first : first + size]
            tokens = tokenizer(
                [texts[at] for at in some], padding=True, truncation=True, max_length=MOST,
                return_tensors="pt",
            )  # fmt: skip
            with torch.inference_mode():
                states = model(**tokens).last_hidden_state
            mask = tokens["attention_mask"].unsqueeze(-1)
            means = (states * mask).sum(1) / mask.sum(1)
            rows |= dict(zip(some, torch.nn.functional.normalize(means).numpy(), strict=True))
        return [rows[at] for at in range(len(texts))]

    return encode


def rate_of(encode: Encode, texts: Sequence[str]) -> float:
    """Return texts per second of the better size of batches."""
    rates = []
    for size in SIZES:
        start = time.perf_counter()
        encode(texts, size)
        rates.append(len(texts) / (time.perf_counter() - start))
    return max(rates)


def served_rate(target: Target, load: tuple[int, int], texts: Path, count: int) -> float:
    """Return texts per second through the server; one text at a time is measured with fewer."""
    each, clients = load
    requests = max(4, (count if each > 1 or clients > 1 else count // 5) // each)
    cut = {"truncate_prompt_tokens": MOST} if target.model == MODEL else {"truncate": True}
    wanted = Load(concurrency=clients, requests=requests, warmup=clients, options=cut)
    run = bench(target, wanted, Plan(Prompts(dataset=texts), texts=each)).runs[0]
    if len(run.good) != requests:
        raise RuntimeError(next(r.message for r in run.records if r.error) or "it failed")
    return figures_of(run, wanted)["texts_per_second"]


def differences(
    live: LiveTriton, targets: dict[str, Target], texts: list[str], expected: Any
) -> str:
    """Return by how much the served vectors differ from those that are measured against."""
    found = {}
    for name, target in targets.items():
        if target.api == "triton":
            vectors = live.client.embed(target.model, texts, truncate=True)
            found[name] = float(np.abs(vectors - np.stack(expected)).max())
    return ", ".join(f"{name} {difference:.1e}" for name, difference in found.items())


def rows(
    measured: dict[str, dict[tuple[int, int], list[float]]], reference: list[float]
) -> Iterator[list[str]]:
    for name, by_load in measured.items():
        for (each, clients), rates in by_load.items():
            ratio = median(rate / best for rate, best in zip(rates, reference, strict=True))
            yield [name, str(each), str(clients), cell(rates, 0), f"{ratio:.2f}"]


def build(live: LiveTriton, folder: Path, names: Sequence[str]) -> dict[str, Target]:
    """Build and load the variants."""
    return {
        name: Target(
            live.build("embed", str(folder), **VARIANTS[name]),
            live.server.grpc_url,
            repository=live.repository,
        )
        for name in names
    }


def measure(
    targets: dict[str, Target], encode: Encode, texts: Path, rounds: int, console: Console
) -> tuple[dict[str, dict[tuple[int, int], list[float]]], list[float]]:
    """Return texts per second of each target under each load, and those of what is compared."""
    listed: list[str] = json.loads(texts.read_text(encoding="utf-8"))
    measured: dict[str, dict[tuple[int, int], list[float]]] = {name: {} for name in targets}
    best = []
    for turn in range(rounds):
        best.append(rate_of(encode, listed))
        console.print(f"round {turn + 1} of {rounds}: {best[-1]:.0f} texts/s", style="dim")
        for name in random.Random(turn).sample(list(targets), len(targets)):
            for load in LOADS:
                rate = served_rate(targets[name], load, texts, len(listed))
                measured[name].setdefault(load, []).append(rate)
                line = f"{name}, {load[0]} texts, {load[1]} clients: {rate:.0f}"
                console.print(line, style="dim")
    return measured, best


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--texts", type=int, default=1000)
    parser.add_argument("--only", nargs="*", choices=VARIANTS, default=[*VARIANTS])
    parser.add_argument("--gateway", action="store_true", help="also through the gateway")
    parser.add_argument("--vllm", action="store_true", help="also vLLM's own server")
    args = parser.parse_args()
    folder, console = real_encoder(), Console(stderr=True)
    texts = make_texts(folder, args.texts)
    reference, encode = encoder(folder)
    peer = vllm(folder, "float32", "--runner", "pooling") if args.vllm else nullcontext("")
    with (
        tempfile.TemporaryDirectory() as home,
        LiveTriton.start(Path(home) / "models") as live,
        peer as peer_address,
    ):
        file = Path(home) / "texts.json"
        file.write_text(json.dumps(texts), encoding="utf-8")
        targets = build(live, folder, args.only)
        last = targets[args.only[-1]]
        with gateway(last.url) if args.gateway else nullcontext(("", 0)) as (address, _):
            if address:
                through = replace(last, url=address, api="embeddings")
                targets[f"{args.only[-1]}, gateway"] = through
            if peer_address:
                targets["vLLM"] = Target(MODEL, peer_address, api="embeddings")
            measured, best = measure(targets, encode, file, args.rounds, console)
            apart = differences(live, targets, texts, encode(texts, SIZES[0]))
    title = f"{reference} encodes {cell(best, 0)} texts/s; {args.rounds} rounds, median (range)"
    table = Table("", "texts a request", "clients", "texts/s", "of that", title=title)
    for row in rows(measured, best):
        table.add_row(*row)
    Console(width=110).print(table)
    print(f"Largest difference of a number of {args.texts} vectors: {apart}")


if __name__ == "__main__":
    main()
