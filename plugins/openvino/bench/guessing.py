"""What guessing gains: prompt lookup and draft models, each against answers without.

    python plugins/openvino/bench/guessing.py [--rounds 5]

The model answers as the demo model does and costs what GPT-2 does: it is the demo model with every
width five times as large, all parts of which are copies, and with layers that add nothing. A draft
is the demo model with noise on its weights: the more there is, the fewer of its guesses are right.
Everything runs in this process, in turns, and has to give the same tokens.
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
from llmserve.demo import demo_model_path
from llmserve.runtime import Generation, Params
from llmserve_openvino.engine import OpenVinoGenerator

TOKENS = 96
COUNTS = (1, 8)
WIDER, LAYERS = 5, 12
GUESSES = 4
NOISE = (0.0, 0.4, 0.7)
"""In parts of the spread of each tensor's weights."""
SUBJECTS = (
    "Programming in Python is like", "The capital of France is", "Once upon a time",
    "A model server is", "The quick brown fox", "Tell me about Seoul.", "What is a batch?",
    "Programming in C++ is like",
)  # fmt: skip
WAYS: dict[str, dict[str, Any]] = {
    "by itself": {},
    "prompt_lookup=4": {"prompt_lookup": GUESSES},
    **{
        f"draft_model, noise {noise}": {"draft_model": str(noise), "draft_tokens": GUESSES}
        for noise in NOISE
    },
}


@dataclass
class Result:
    """What a way did with one kind of prompts and so many at a time."""

    rates: list[float] = field(default_factory=list)
    made: int = 0
    steps: int = 0


def widened(demo: GPT2LMHeadModel) -> GPT2LMHeadModel:
    """Return a model of GPT-2's cost whose logits are the demo model's."""
    config = demo.config.__class__(**{**demo.config.to_dict(), "n_layer": LAYERS})
    config.n_embd, config.n_head = WIDER * config.n_embd, WIDER * config.n_head
    wide = GPT2LMHeadModel(config)
    own = demo.state_dict()
    for name, target in wide.state_dict().items():
        layer = int(name.split(".")[2]) if name.startswith("transformer.h.") else 0
        if layer >= demo.config.n_layer:
            if "c_proj" in name:
                target.zero_()
            continue
        source = own[name]
        if "c_attn" in name:
            # Queries, keys and values lie beside one another.
            source = source.unflatten(-1, (3, -1))
        copies = [1] * source.dim()
        copies[-1] = WIDER
        if name.startswith("transformer.h.") and source.dim() > 1 and name.endswith("weight"):
            copies[0], source = WIDER, source / WIDER
        if ".ln_f." in name:
            # As many copies are summed for each logit.
            source = source / WIDER
        target.copy_(source.repeat(copies).view_as(target))
    return wide


def save(network: Any, folder: Path) -> str:
    network.save_pretrained(folder)
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
    begun = time.perf_counter()
    for generation in generations:
        engine.admit(generation)
    steps = 0
    while engine.busy:
        steps += sum(not generation.done for generation in generations)
        if failed := engine.step().failed:
            raise failed[0][1]
    made = sum(len(generation.token_ids) for generation in generations)
    result.rates.append(made / (time.perf_counter() - begun))
    result.made += made
    result.steps += steps
    return [generation.token_ids for generation in generations]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5)
    rounds = parser.parse_args().rounds
    torch.manual_seed(0)
    demo = AutoModelForCausalLM.from_pretrained(demo_model_path(), dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(demo_model_path())
    with tempfile.TemporaryDirectory() as home:
        folder = Path(home)
        with torch.inference_mode():
            model = save(widened(demo), folder / "wide")
            for noise in NOISE:
                draft = AutoModelForCausalLM.from_pretrained(demo_model_path(), dtype=torch.float32)
                for tensor in draft.parameters():
                    tensor += noise * tensor.std() * torch.randn_like(tensor)
                save(draft, folder / str(noise))
        engines = {}
        for number, (way, options) in enumerate(WAYS.items()):
            if draft := options.get("draft_model"):
                options = {**options, "draft_model": str(folder / draft)}
            built = llmserve.build(
                "openvino", model, output=folder / str(number), dtype="float32", **options
            )
            settings = built.manifest.components["generator"]["settings"]
            engines[way] = OpenVinoGenerator(settings, built.folder / "1").engine
        first = [tokenizer.encode(text) for text in SUBJECTS]
        told = answer(engines["by itself"], first, Result())
        # What an answer repeats stands in the prompt: the text so far, and its beginning again.
        again = [[*ids, *said, *ids] for ids, said in zip(first, told, strict=True)]
        kinds = {"new": first, "repeating": again}
        results = {
            way: {(kind, count): Result() for kind in kinds for count in COUNTS} for way in WAYS
        }
        for turn in range(rounds):
            for kind, prompts in kinds.items():
                for count in COUNTS:
                    right = None
                    for way in random.Random(turn).sample(list(engines), len(engines)):
                        result = results[way][kind, count]
                        found = answer(engines[way], prompts[:count], result)
                        if right not in (None, found):
                            raise SystemExit(f"{way} gave other tokens")
                        right = found
    columns = [f"{kind} text, {count}" for kind in kinds for count in COUNTS]
    table = Table("", *columns, title="tokens/s (range); tokens of a step; right guesses")
    for way in WAYS:
        table.add_row(way, *(_cell(result, way) for result in results[way].values()))
    Console(width=140).print(table)


def _cell(result: Result, way: str) -> str:
    rates, a_step = result.rates, result.made / result.steps
    text = f"{median(rates):.0f} ({min(rates):.0f} to {max(rates):.0f}); {a_step:.1f}"
    if way.startswith("draft"):
        text += f"; {(a_step - 1) / GUESSES:.0%}"
    return text


if __name__ == "__main__":
    main()
