"""Tokens a second through Triton, against OpenVINO GenAI in process.

    python plugins/openvino/bench/served.py [ROUNDS]

A GPT-2 of the small shape with random weights, requests of 64 tokens, 1, 8 and 32 at a time. The
ways take turns in one run, so that what else the machine does falls on all of them.
"""

from __future__ import annotations

import json
import random
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median
from typing import Any

import llmserve
from llmserve.demo import demo_model_path
from llmserve.testing import LiveTriton

TOKENS = 64
PROMPT = "Programming in C++ is like"
COUNTS = (1, 8, 32)
BUILDS: dict[str, dict[str, Any]] = {
    "float32": {"dtype": "float32"},
    "bfloat16": {"dtype": "bfloat16"},
    "int8 weights": {"dtype": "float32", "weight_format": "int8"},
}
Rate = Callable[[int], float]


def make_model(folder: Path) -> str:
    """Write a GPT-2 of the small shape with random weights and the demo model's tokenizer."""
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    config = GPT2Config(vocab_size=1024, n_positions=1024, bos_token_id=0, eos_token_id=0)
    GPT2LMHeadModel(config).save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(demo_model_path() / name, folder / name)
    return str(folder)


def in_process(folder: Path) -> Rate:
    """Return how fast the engine is by itself, on a model that a build converted."""
    import numpy as np

    from llmserve_openvino.engine import OpenVinoGenerator
    from llmserve_openvino.library import openvino, openvino_genai

    manifest = json.loads((folder / "llmserve.json").read_text(encoding="utf-8"))
    settings = manifest["components"]["generator"]["settings"]
    pipeline = OpenVinoGenerator(settings, folder / "1").engine.pipeline
    ids = openvino.Tensor(np.array([[40, 50, 60, 70, 80, 90, 100]], dtype=np.int64))

    def rate(count: int) -> float:
        config = openvino_genai.GenerationConfig()
        config.max_new_tokens, config.ignore_eos = TOKENS, True
        config.set_eos_token_id(0)
        began = time.perf_counter()
        found = pipeline.generate([ids] * count, [config] * count)
        seconds = time.perf_counter() - began
        return sum(len(result.m_generation_ids[0]) for result in found) / seconds

    return rate


def served(live: LiveTriton, model: str, *, streams: bool = False) -> Rate:
    """Return how fast a model answers so many clients at a time."""

    def ask(_: int) -> int:
        asked: dict[str, Any] = {"max_tokens": TOKENS, "ignore_eos": True, "timeout": 600}
        if streams:
            pieces = list(live.client.stream(model, PROMPT, **asked))
            return pieces[-1].output_tokens or 0
        return live.client.generate(model, PROMPT, **asked).output_tokens or 0

    def rate(count: int) -> float:
        with ThreadPoolExecutor(count) as pool:
            began = time.perf_counter()
            tokens = sum(pool.map(ask, range(count)))
        return tokens / (time.perf_counter() - began)

    return rate


def main(rounds: int) -> None:
    """Print tokens a second, and how they stand to the engine in process in the same round."""
    seen: dict[tuple[str, str, int], list[float]] = {}
    with (
        tempfile.TemporaryDirectory() as home,
        LiveTriton.start(Path(home) / "repository") as live,
    ):
        model = make_model(Path(home) / "model")
        for build, options in BUILDS.items():
            name = live.build("openvino", model, **options)
            ways = {
                "in process": in_process(live.repository / name),
                "whole": served(live, name),
                "streaming": served(live, name, streams=True),
            }
            for rate in ways.values():
                rate(2)
            for turn in range(rounds):
                for count in COUNTS:
                    for way in random.Random(turn).sample(list(ways), len(ways)):
                        seen.setdefault((build, way, count), []).append(ways[way](count))
    print(f"tokens/s, {TOKENS} each, llmserve {llmserve.__version__}: {COUNTS} at a time")
    for build, way in dict.fromkeys((build, way) for build, way, _ in seen):
        cells = []
        for count in COUNTS:
            own, engine = seen[build, way, count], seen[build, "in process", count]
            ratio = median(a / b for a, b in zip(own, engine, strict=True))
            cells.append(f"{median(own):7.0f} ({ratio:.2f})")
        print(f"{build:<14}{way:<12}" + "  ".join(cells))


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 3)
