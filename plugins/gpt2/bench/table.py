"""Measures the benefit of keeping the cache and of the sequence batcher, through Triton.

    python plugins/gpt2/bench/table.py [ROUNDS]

The model is a GPT-2 of the small size with random weights and a small vocabulary, in float32. The
formats are measured alternately; the table shows medians, and which backend answered.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console
from rich.table import Table

from llmserve.plugin import demo_model_path
from llmserve.testing import LiveTriton

PROMPT = "I have lived in London"
FORMATS = ("onnx", "torchscript")
TOKENS, LONG, STEP = 64, 256, 16


def make_model(folder: Path) -> str:
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    config = GPT2Config(vocab_size=1024, n_positions=1024, bos_token_id=0, eos_token_id=0)
    GPT2LMHeadModel(config).save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(demo_model_path() / name, folder / name)
    return str(folder)


def milliseconds_at(live: LiveTriton, model: str, context: int) -> float:
    """Return the milliseconds per token once a sequence has ``context`` tokens."""

    def advance(steps: Any, tokens: int) -> None:
        while tokens > 0:
            steps.send(step_tokens=min(tokens, STEP))
            tokens -= STEP

    with live.client.sequence(model) as steps:
        piece = steps.send("so " * (context - 8), ignore_eos=True, max_tokens=200)
        advance(steps, context - (piece.input_tokens or 0) - 1)
        start = time.perf_counter()
        advance(steps, 3 * STEP)
        return (time.perf_counter() - start) / (3 * STEP) * 1000


def rate(live: LiveTriton, model: str, count: int, tokens: int = TOKENS) -> float:
    """Return the tokens per second of ``count`` concurrent sequences."""

    def ask(index: int) -> int:
        options: dict[str, Any] = {"max_tokens": tokens, "ignore_eos": True, "timeout": 600}
        return live.client.generate(model, f"{PROMPT} {index}", **options).output_tokens or 0

    start = time.perf_counter()
    with ThreadPoolExecutor(count) as pool:
        generated = sum(pool.map(ask, range(count)))
    return generated / (time.perf_counter() - start)


def rate_with_resent_text(live: LiveTriton, model: str) -> float:
    """Return the tokens per second if every token's request sends the whole text."""
    text, start = PROMPT, time.perf_counter()
    for _ in range(LONG):
        answer = live.client.generate(model, text, max_tokens=1, ignore_eos=True)
        # A token without text must still make the text a token longer.
        text += answer.text or " a"
    return LONG / (time.perf_counter() - start)


def main(rounds: int) -> None:
    measured: dict[tuple[str, str], list[float]] = {}
    with (
        tempfile.TemporaryDirectory() as folder,
        LiveTriton.start(Path(folder) / "repository") as live,
    ):
        path = make_model(Path(folder) / "model")
        models = {form: live.build(f"gpt2-{form}", path) for form in FORMATS}
        for round_number in range(rounds + 1):
            for form, model in models.items():
                results = {
                    "ms a token at context 32": milliseconds_at(live, model, 32),
                    "ms a token at context 512": milliseconds_at(live, model, 512),
                    "tokens/s, one sequence": rate(live, model, 1),
                    "tokens/s, four sequences": rate(live, model, 4),
                    f"tokens/s over {LONG} tokens, cache kept": rate(live, model, 1, LONG),
                }
                for label, value in results.items():
                    # The first round warms up.
                    measured.setdefault((label, form), []).extend([value] if round_number else [])
        label = "tokens/s, whole text with every step"
        for form, model in models.items():
            measured[label, form] = [rate_with_resent_text(live, model)]
        stand_ins = live.server.stand_ins()
    title = "GPT-2 shape of 86 M parameters, float32, through Triton"
    table = Table("measurement", *FORMATS, title=title)
    for label in dict.fromkeys(label for label, _ in measured):
        table.add_row(label, *(f"{median(measured[label, form]):.1f}" for form in FORMATS))
    Console().print(table)
    for model, backend in stand_ins.items():
        Console().print(f"{model}: answered by a stand-in for {backend}")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 3)
