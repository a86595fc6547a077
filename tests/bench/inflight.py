"""Ways of serving a GPT-2 of 86 M parameters through Triton, in turns, in one run."""

from __future__ import annotations

import random
import shutil
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from statistics import median

from rich.table import Table

from llmserve.demo import demo_model_path
from llmserve.testing import LiveTriton

TOKENS = 64
ROUNDS = 3
PROMPT = "Programming in C++ is like"
WAYS: dict[str, tuple[str, dict[str, object]]] = {
    f"{plugin}, {dtype}": (plugin, {"max_batch_size": 32, "dtype": dtype})
    for dtype in ("float32", "bfloat16")
    for plugin in ("hf", "iterative")
}


def make_model(folder: Path) -> Path:
    """Write a GPT-2 of the small size with random weights and the demo model's tokenizer."""
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    config = GPT2Config(vocab_size=1024, n_positions=1024, bos_token_id=0, eos_token_id=0)
    GPT2LMHeadModel(config).save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(demo_model_path() / name, folder / name)
    return folder


@contextmanager
def serving() -> Iterator[tuple[LiveTriton, dict[str, str]]]:
    """Serve every way, one model each."""
    with tempfile.TemporaryDirectory() as folder:
        model = make_model(Path(folder) / "model")
        with LiveTriton.start(Path(folder) / "repository") as live:
            names = {
                way: live.build(plugin, str(model), **options)
                for way, (plugin, options) in WAYS.items()
            }
            yield live, names


def rate(live: LiveTriton, model: str, streams: int) -> float:
    """Return tokens a second over so many requests at the same time."""

    def ask(_: int) -> int:
        answer = live.client.generate(
            model, PROMPT, max_tokens=TOKENS, ignore_eos=True, timeout=600
        )
        return answer.output_tokens or 0

    with ThreadPoolExecutor(streams) as pool:
        began = time.perf_counter()
        tokens = sum(pool.map(ask, range(streams)))
    return tokens / (time.perf_counter() - began)


def table() -> Table:
    """Compare the ways at 1, 8 and 32 requests at a time."""
    counts = (1, 8, 32)
    found = Table(title=f"tokens/s through Triton, {TOKENS} each, GPT-2 shape of 86 M parameters")
    for column in ("way", *map(str, counts), *(f"against hf: {n}" for n in counts)):
        found.add_column(column)
    with serving() as (live, names):
        seen: dict[tuple[str, int], list[float]] = {}
        for name in names.values():
            rate(live, name, 2)
        for turn in range(ROUNDS):
            for streams in counts:
                for way in random.Random(turn).sample(list(names), len(names)):
                    seen.setdefault((way, streams), []).append(rate(live, names[way], streams))
    middle = {key: median(values) for key, values in seen.items()}
    for way in names:
        base = way.replace("iterative", "hf")
        rates = [f"{middle[way, n]:.0f}" for n in counts]
        ratios = [f"{middle[way, n] / middle[base, n]:.2f} x" for n in counts]
        found.add_row(way, *rates, *ratios)
    return found
