"""What the kept cache and the sequence batcher bring, through Triton, all in one run.

    python plugins/gpt2/bench/table.py [ROUNDS]

A GPT-2 of the small size with random weights and a small vocabulary, in float32. What is
compared is measured in turns; the table shows medians.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console
from rich.table import Table

from llmserve.demo import demo_model_path
from llmserve.measure.published import fetch
from llmserve.measure.standins import lines, told_on
from llmserve.testing import LiveTriton

PROMPT = "I have lived in London"
FORMATS = ("onnx", "torchscript")
TOKENS, LONG, STEP = 64, 256, 16


def make_model(folder: Path) -> Path:
    """Write the model, with the demo model's tokenizer."""
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    config = GPT2Config(vocab_size=1024, n_positions=1024, bos_token_id=0, eos_token_id=0)
    GPT2LMHeadModel(config).save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(demo_model_path() / name, folder / name)
    return folder


class Bench:
    """Everything that is measured, on one server."""

    def __init__(self, live: LiveTriton, model: Path) -> None:
        self._live = live
        self._path = model
        self._models = {form: live.build(f"gpt2-{form}", str(model)) for form in FORMATS}
        self._eager: Any = None
        self.rows: dict[tuple[str, int], float] = {}
        """How many sequences shared a step, in the latest of each kind of run."""

    def at_context(self, form: str, context: int) -> float:
        """Return milliseconds a token once a sequence has so many."""
        with self._live.client.sequence(self._models[form]) as steps:
            piece = steps.send("so " * (context - 8), ignore_eos=True, max_tokens=200)
            missing = context - (piece.input_tokens or 0) - 1
            if missing > 0:
                self._advance(steps, missing)
            began = time.perf_counter()
            self._advance(steps, 3 * STEP)
            return (time.perf_counter() - began) / (3 * STEP) * 1000

    @staticmethod
    def _advance(steps: Any, tokens: int) -> None:
        while tokens > 0:
            steps.send(step_tokens=min(tokens, STEP))
            tokens -= STEP

    def together(self, form: str, count: int) -> float:
        """Return tokens a second of so many sequences at a time."""

        def ask(at: int) -> int:
            answer = self._live.client.generate(
                self._models[form], f"{PROMPT} {at}", max_tokens=TOKENS, ignore_eos=True
            )
            return answer.output_tokens or 0

        generator = f"{self._models[form]}_generator"
        rows, batches = self._live.requests(generator), self._live.executions(generator)
        began = time.perf_counter()
        with ThreadPoolExecutor(count) as pool:
            tokens = sum(pool.map(ask, range(count)))
        seconds = time.perf_counter() - began
        batches = self._live.executions(generator) - batches
        self.rows[form, count] = (self._live.requests(generator) - rows) / batches
        return tokens / seconds

    def kept(self, form: str) -> float:
        """Return tokens a second over a long answer, with the cache."""
        began = time.perf_counter()
        self._live.client.generate(
            self._models[form], PROMPT, max_tokens=LONG, ignore_eos=True, timeout=600
        )
        return LONG / (time.perf_counter() - began)

    def resent(self, form: str) -> float:
        """Return the same where every token's request brings the whole text, as in the seed."""
        text = PROMPT
        began = time.perf_counter()
        for _ in range(LONG):
            answer = self._live.client.generate(
                self._models[form], text, max_tokens=1, ignore_eos=True
            )
            # What has no text of its own still has to make the text longer by a token.
            text += answer.text or " a"
        return LONG / (time.perf_counter() - began)

    def eager(self) -> float:
        """Return tokens a second of generate() in this process."""
        import torch
        from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

        if self._eager is None:
            model = AutoModelForCausalLM.from_pretrained(self._path, dtype=torch.float32).eval()
            model.generation_config = GenerationConfig(pad_token_id=0)
            self._eager = model, AutoTokenizer.from_pretrained(self._path)
        model, tokenizer = self._eager
        ids = tokenizer(PROMPT, return_tensors="pt").input_ids
        began = time.perf_counter()
        with torch.inference_mode():
            answer = model.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=TOKENS, do_sample=False
            )
        return int(answer.shape[1] - ids.shape[1]) / (time.perf_counter() - began)


def measure(bench: Bench, rounds: int) -> dict[str, float]:
    """Measure everything in turns."""
    jobs: dict[str, Callable[[], float]] = {"eager": bench.eager}
    for form in FORMATS:
        for context in (32, 512):
            jobs[f"{form} at {context}"] = partial(bench.at_context, form, context)
        for count in (1, 4):
            jobs[f"{form} x {count}"] = partial(bench.together, form, count)
    seen: dict[str, list[float]] = {}
    for turn in range(rounds + 1):
        for name, job in jobs.items():
            value = job()
            # The first round warms up.
            if turn:
                seen.setdefault(name, []).append(value)
    seen |= {"kept": [bench.kept("onnx")], "resent": [bench.resent("onnx")]}
    return {name: median(values) for name, values in seen.items()}


def main() -> None:
    """Print the table."""
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 3
    with tempfile.TemporaryDirectory() as folder:
        model = make_model(Path(folder) / "model")
        with LiveTriton.start(Path(folder) / "repository") as live:
            bench = Bench(live, model)
            found = measure(bench, rounds)
            instead = lines(told_on(fetch(live.server.metrics_url) or ""))
    table = Table("what", *FORMATS, title="GPT-2 shape of 86 M parameters, float32, through Triton")
    rows: dict[str, Callable[[str], str]] = {
        "ms a token at context 32": lambda f: f"{found[f'{f} at 32']:.1f}",
        "ms a token at context 512": lambda f: f"{found[f'{f} at 512']:.1f}",
        "512 against 32": lambda f: f"{found[f'{f} at 512'] / found[f'{f} at 32']:.2f} x",
        "tokens/s, one sequence": lambda f: f"{found[f'{f} x 1']:.0f}",
        "against generate() in process": lambda f: f"{found[f'{f} x 1'] / found['eager']:.2f} x",
        "tokens/s, four sequences": lambda f: f"{found[f'{f} x 4']:.0f}",
        "sequences in a step, of four": lambda f: f"{bench.rows[f, 4]:.1f}",
        "four against one": lambda f: f"{found[f'{f} x 4'] / found[f'{f} x 1']:.2f} x",
    }
    for name, row in rows.items():
        table.add_row(name, *(row(form) for form in FORMATS))
    kept, resent = found["kept"], found["resent"]
    table.add_row(f"tokens/s over {LONG} tokens, cache kept", f"{kept:.0f}", "")
    table.add_row("the same, whole text with every step", f"{resent:.1f}", "")
    table.add_row("cache kept against whole text", f"{kept / resent:.1f} x", "")
    Console().print(table)
    Console().print(f"generate() in process: {found['eager']:.0f} tokens/s")
    # What answers here is not the backend that the models ask for.
    for line in instead:
        Console().print(line)


if __name__ == "__main__":
    main()
