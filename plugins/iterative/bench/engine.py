"""The engine against transformers' ``generate()``: same model, same prompts, same process.

    python bench/engine.py [--rounds 5] [--dtype bfloat16 float32] [--batch 1 8 32]

Other work on the machine disturbs both sides, so they take turns, and the table has the
median of the ratios of neighbouring turns beside the best figures of each.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Sequence
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from transformers import GenerationConfig, GPT2Config, GPT2LMHeadModel

from llmserve.runtime.generation import Generation
from llmserve.runtime.params import Params
from llmserve_iterative.engine import Engine

NEW = 64
PROMPT = 20


def make_model(dtype: torch.dtype) -> Any:
    """Return a GPT-2 of 92 million random parameters."""
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=8000, n_positions=1024, n_embd=768, n_layer=12, n_head=12)
    model = GPT2LMHeadModel(config).to(dtype).eval()
    model.generation_config = GenerationConfig(pad_token_id=0)
    return model


class Silent:
    """A tokenizer that nobody listens to."""

    eos_ids: frozenset[int] = frozenset()

    def encode(self, text: str, *, special: bool = True) -> list[int]:
        """Return no ids."""
        del text, special
        return []

    def encode_chat(self, messages: Any) -> list[int]:
        """Return no ids."""
        del messages
        return []

    def decode(self, ids: Sequence[int]) -> str:
        """Return one letter per id."""
        return "x" * len(ids)


def make_prompts(rows: int, length: int = PROMPT) -> list[list[int]]:
    """Return prompts that share no beginning."""
    return [[(row * 131 + 17 * i) % 7900 + 1 for i in range(length)] for row in range(rows)]


def time_generate(model: Any, prompts: list[list[int]]) -> float:
    """Return the seconds that ``generate()`` takes."""
    ids = torch.tensor(prompts)
    begun = time.perf_counter()
    with torch.inference_mode():
        model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=NEW,
            min_new_tokens=NEW,
            do_sample=False,
        )
    return time.perf_counter() - begun


def time_engine(engine: Engine, prompts: list[list[int]]) -> float:
    """Return the seconds that the engine takes."""
    for prompt in prompts:
        engine.admit(_generation(prompt, NEW))
    begun = time.perf_counter()
    while engine.busy:
        engine.step()
    return time.perf_counter() - begun


def time_steps(engine: Engine, length: int, count: int = 24) -> float:
    """Return the seconds of the fastest step of one sequence at a context length."""
    generation = _generation(make_prompts(1, length)[0], count)
    engine.admit(generation)
    while not generation.token_ids:
        engine.step()
    times = []
    while engine.busy:
        begun = time.perf_counter()
        engine.step()
        times.append(time.perf_counter() - begun)
    return min(times)


def time_reading(gigabytes: float = 0.5) -> float:
    """Return the bytes a second at which all cores read memory, at best."""
    buffer = torch.ones(int(gigabytes * 2**30) // 4)
    times = []
    for _ in range(6):
        begun = time.perf_counter()
        buffer.sum()
        times.append(time.perf_counter() - begun)
    return buffer.numel() * 4 / min(times)


def _generation(prompt: list[int], tokens: int) -> Generation:
    return Generation(
        prompt,
        Params(ignore_eos=True),
        max_tokens=tokens,
        eos_ids=frozenset(),
        decode=Silent().decode,
    )


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--dtype", nargs="+", default=["bfloat16", "float32"])
    parser.add_argument("--batch", nargs="+", type=int, default=[1, 8, 32])
    args = parser.parse_args()
    table = Table(title=f"{NEW} new tokens after {PROMPT}, GPT-2 of 92 M random parameters, greedy")
    for column in ("", "generate() tokens/s", "engine tokens/s", "ratio (median)", "range"):
        table.add_column(column, justify="right")
    steps = Table(title="One step of one sequence, at best")
    for column in ("", "at 60", "at 900", "900 / 60", "at 60 / (weights / bandwidth)"):
        steps.add_column(column, justify="right")
    for name in args.dtype:
        dtype = getattr(torch, name)
        model = make_model(dtype)
        weights = sum(p.numel() * p.element_size() for p in model.transformer.h.parameters())
        weights += model.lm_head.weight.numel() * model.lm_head.weight.element_size()
        engine = Engine(make_model(dtype), Silent(), max_sequences=64, cache_tokens=8192)
        for rows in args.batch:
            prompts = make_prompts(rows)
            time_generate(model, prompts)
            time_engine(engine, prompts)
            pairs = [
                (time_generate(model, prompts), time_engine(engine, prompts))
                for _ in range(args.rounds)
            ]
            ratios = sorted(theirs / ours for theirs, ours in pairs)
            theirs, ours = (rows * NEW / min(times) for times in zip(*pairs, strict=True))
            table.add_row(
                f"{name}, batch {rows}",
                f"{theirs:.0f}",
                f"{ours:.0f}",
                f"{statistics.median(ratios):.2f}",
                f"{ratios[0]:.2f} to {ratios[-1]:.2f}",
            )
        near, far, reading = time_steps(engine, 60), time_steps(engine, 900), time_reading()
        near = min(near, time_steps(engine, 60))
        steps.add_row(
            name,
            f"{near * 1e3:.1f} ms",
            f"{far * 1e3:.1f} ms",
            f"{far / near:.2f}",
            f"{near / (weights / reading):.2f} ({reading / 1e9:.0f} GB/s)",
        )
    console = Console()
    console.print(table)
    console.print(steps)


if __name__ == "__main__":
    main()
