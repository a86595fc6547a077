"""Measures what guessing gains: prompt lookup and draft models, compared with no guessing.

    python plugins/openvino/bench/guessing.py [--rounds 5] [--model FOLDER]

The model answers like the demo model and costs as much as GPT-2: it is the demo model with every
width five times as large, filled with copies, and with layers that add nothing. A draft is the demo
model with noise on its weights: the more noise, the fewer of its guesses are right. Everything runs
in this process, in alternation, and must generate the same tokens. Of a real model in a folder,
prompt lookup alone is measured.
"""

from __future__ import annotations

import argparse
import random
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from transformers import AutoModelForCausalLM, AutoTokenizer, GPT2LMHeadModel

import llmserve
from llmserve.plugin import demo_model_path
from llmserve.runtime import Generation, Params
from llmserve.testing import ByteTokenizer
from llmserve_openvino.engine import OpenVinoGenerator

TOKENS = 96
COUNTS = (1, 8, 32)
FACTOR, LAYERS = 5, 12
GUESSES = 4
NOISE = (0.0, 0.4, 0.7)
"""Relative to the standard deviation of each tensor's weights."""
SUBJECTS = (
    "Programming in Python is like", "The capital of France is", "Once upon a time",
    "A model server is", "The quick brown fox", "Tell me about Seoul.", "What is a batch?",
    "Programming in C++ is like", "A long journey begins with", "Water boils at", "The sun is",
    "My favourite book is", "Dogs and cats are", "To bake bread, one needs", "The oldest city is",
    "Music is", "A good friend", "In the year 2000", "Mathematics is", "The ocean", "Why is it",
    "Trees in autumn", "The first computer", "Tea and coffee", "A bicycle has", "Snow falls when",
    "The capital of Japan is", "Birds fly because", "A river begins", "How does a clock",
    "The desert at night", "Old maps show", "Learning to swim", "The moon moves", "A cup of tea",
)  # fmt: skip
VARIANTS: dict[str, dict[str, Any]] = {
    "no guessing": {},
    "prompt_lookup=4": {"prompt_lookup": GUESSES},
    **{
        f"draft_model, noise {noise}": {"draft_model": str(noise), "draft_tokens": GUESSES}
        for noise in NOISE
    },
}


@dataclass
class Result:
    """The measurements of a variant with one kind and number of prompts."""

    rates: list[float] = field(default_factory=list)
    tokens: int = 0
    steps: int = 0


def widen(demo: GPT2LMHeadModel) -> GPT2LMHeadModel:
    """Return a model of GPT-2's cost whose logits are the demo model's."""
    config = demo.config.__class__(**{**demo.config.to_dict(), "n_layer": LAYERS})
    config.n_embd, config.n_head = FACTOR * config.n_embd, FACTOR * config.n_head
    wide = GPT2LMHeadModel(config)
    weights = demo.state_dict()
    for name, target in wide.state_dict().items():
        layer = int(name.split(".")[2]) if name.startswith("transformer.h.") else 0
        if layer >= demo.config.n_layer:
            if "c_proj" in name:
                target.zero_()
            continue
        source = weights[name]
        if "c_attn" in name:
            # Queries, keys and values are stored next to each other.
            source = source.unflatten(-1, (3, -1))
        copies = [1] * source.dim()
        copies[-1] = FACTOR
        if name.startswith("transformer.h.") and source.dim() > 1 and name.endswith("weight"):
            copies[0], source = FACTOR, source / FACTOR
        if ".ln_f." in name:
            # Each logit is the sum of this many copies.
            source = source / FACTOR
        target.copy_(source.repeat(copies).view_as(target))
    return wide


def save(model: Any, folder: Path) -> str:
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(demo_model_path()).save_pretrained(folder)
    return str(folder)


def answer(engine: Any, prompts: Sequence[list[int]], result: Result) -> list[list[int]]:
    generations = [
        Generation(
            ids, Params(ignore_eos=True), max_tokens=TOKENS, eos_ids=frozenset({0}),
            decode=lambda ids: " " * len(ids),
        )
        for ids in prompts
    ]  # fmt: skip
    started = time.perf_counter()
    for generation in generations:
        engine.admit(generation)
    steps = 0
    while engine.busy:
        steps += sum(not generation.done for generation in generations)
        if failed := engine.step().failed:
            raise failed[0][1]
    tokens = sum(len(generation.token_ids) for generation in generations)
    result.rates.append(tokens / (time.perf_counter() - started))
    result.tokens += tokens
    result.steps += steps
    return [generation.token_ids for generation in generations]


def save_models(folder: Path) -> str:
    """Write the wide demo model and its drafts."""
    demo = AutoModelForCausalLM.from_pretrained(demo_model_path(), dtype=torch.float32).eval()
    with torch.inference_mode():
        for noise in NOISE:
            draft = AutoModelForCausalLM.from_pretrained(demo_model_path(), dtype=torch.float32)
            for tensor in draft.parameters():
                tensor += noise * tensor.std() * torch.randn_like(tensor)
            save(draft, folder / str(noise))
        return save(widen(demo), folder / "wide")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--model", help="A folder with a real model, instead of the demo model's copy."
    )
    args = parser.parse_args()
    rounds = args.rounds
    torch.manual_seed(0)
    variants = {
        variant: options
        for variant, options in VARIANTS.items()
        if not (args.model and "draft_model" in options)
    }
    with tempfile.TemporaryDirectory() as home:
        folder = Path(home)
        model = args.model or save_models(folder)
        tokenizer = AutoTokenizer.from_pretrained(model)
        engines = {}
        for number, (variant, options) in enumerate(variants.items()):
            if draft := options.get("draft_model"):
                options = {**options, "draft_model": str(folder / draft)}
            built = llmserve.build(
                "openvino", model, output=folder / str(number), dtype="float32", **options
            )
            settings = built.manifest.components["generator"]["settings"]
            engines[variant] = OpenVinoGenerator(settings, built.folder / "1").stepper(
                ByteTokenizer()
            )
        new = [tokenizer.encode(text) for text in SUBJECTS]
        answers = answer(engines["no guessing"], new, Result())
        # The prompt contains what its answer repeats: a prompt, its answer, and the prompt again.
        repeating = [[*ids, *tokens, *ids] for ids, tokens in zip(new, answers, strict=True)]
        kinds = {"new": new, "repeating": repeating}
        results = {
            variant: {(kind, count): Result() for kind in kinds for count in COUNTS}
            for variant in variants
        }
        for seed in range(rounds):
            for kind, prompts in kinds.items():
                for count in COUNTS:
                    expected = None
                    for variant in random.Random(seed).sample(list(engines), len(engines)):
                        result = results[variant][kind, count]
                        answers = answer(engines[variant], prompts[:count], result)
                        if expected not in (None, answers):
                            raise SystemExit(f"{variant} generated different tokens")
                        expected = answers
    columns = [f"{kind} text, {count}" for kind in kinds for count in COUNTS]
    table = Table("", *columns, title="tokens/s (range); tokens per step; correct guesses")
    for variant in variants:
        table.add_row(variant, *(_cell(result, variant) for result in results[variant].values()))
    Console(width=140).print(table)


def _cell(result: Result, variant: str) -> str:
    rates, per_step = result.rates, result.tokens / result.steps
    text = f"{median(rates):.0f} ({min(rates):.0f} to {max(rates):.0f}); {per_step:.1f}"
    if variant.startswith("draft"):
        text += f"; {(per_step - 1) / GUESSES:.0%}"
    return text


if __name__ == "__main__":
    main()
