"""What the kept cache and the sequence batcher bring, through Triton, all in one run.

    python plugins/gpt2/bench/table.py [ROUNDS]

A GPT-2 of the small size with random weights and a small vocabulary, in float32. What is
compared is measured in turns; the table shows medians, and says what answered.
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

from llmserve.demo import demo_model_path
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
    """Return how long a token takes once a sequence has so many."""

    def advance(steps: Any, tokens: int) -> None:
        while tokens > 0:
            steps.send(step_tokens=min(tokens, STEP))
            tokens -= STEP

    with live.client.sequence(model) as steps:
        piece = steps.send("so " * (context - 8), ignore_eos=True, max_tokens=200)
        advance(steps, context - (piece.input_tokens or 0) - 1)
        began = time.perf_counter()
        advance(steps, 3 * STEP)
        return (time.perf_counter() - began) / (3 * STEP) * 1000


def rate(live: LiveTriton, model: str, count: int, tokens: int = TOKENS) -> float:
    """Return tokens a second of so many sequences at a time."""

    def ask(at: int) -> int:
        asked: dict[str, Any] = {"max_tokens": tokens, "ignore_eos": True, "timeout": 600}
        return live.client.generate(model, f"{PROMPT} {at}", **asked).output_tokens or 0

    began = time.perf_counter()
    with ThreadPoolExecutor(count) as pool:
        made = sum(pool.map(ask, range(count)))
    return made / (time.perf_counter() - began)


def resent(live: LiveTriton, model: str) -> float:
    """Return tokens a second where every token's request brings the whole text."""
    text, began = PROMPT, time.perf_counter()
    for _ in range(LONG):
        answer = live.client.generate(model, text, max_tokens=1, ignore_eos=True)
        # What has no text of its own still has to make the text longer by a token.
        text += answer.text or " a"
    return LONG / (time.perf_counter() - began)


def main(rounds: int) -> None:
    seen: dict[tuple[str, str], list[float]] = {}
    with (
        tempfile.TemporaryDirectory() as folder,
        LiveTriton.start(Path(folder) / "repository") as live,
    ):
        path = make_model(Path(folder) / "model")
        models = {form: live.build(f"gpt2-{form}", path) for form in FORMATS}
        for turn in range(rounds + 1):
            for form, model in models.items():
                found = {
                    "ms a token at context 32": milliseconds_at(live, model, 32),
                    "ms a token at context 512": milliseconds_at(live, model, 512),
                    "tokens/s, one sequence": rate(live, model, 1),
                    "tokens/s, four sequences": rate(live, model, 4),
                    f"tokens/s over {LONG} tokens, cache kept": rate(live, model, 1, LONG),
                }
                for what, value in found.items():
                    # The first round warms up.
                    seen.setdefault((what, form), []).extend([value] if turn else [])
        what = "tokens/s, whole text with every step"
        for form, model in models.items():
            seen[what, form] = [resent(live, model)]
        backends = live.server.stand_ins()
    table = Table("what", *FORMATS, title="GPT-2 shape of 86 M parameters, float32, through Triton")
    for what in dict.fromkeys(what for what, _ in seen):
        table.add_row(what, *(f"{median(seen[what, form]):.1f}" for form in FORMATS))
    Console().print(table)
    for model, instead in backends.items():
        Console().print(f"{model}: answered by a stand-in for {instead}")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 3)
