"""What compressed weights cost: perplexity, and how long greedy answers stay those of float32.

    python plugins/openvino/bench/loss.py CHECKPOINT [FORMAT:GROUP …]

CHECKPOINT is a chat model's folder, FORMAT a ``weight_format``, GROUP a ``dynamic_quantization``.
The text is part of the language reference that the standard library contains.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import numpy as np
import openvino
from transformers import AutoTokenizer

import llmserve
from llmserve.runtime import Engine, Generation, Params, run_batch
from llmserve.testing import ByteTokenizer
from llmserve_openvino.runner import make_runner

_CHUNK, _CHUNKS, _TOKENS = 256, 12, 32
_TOPICS = ("assignment", "booleans", "class", "exceptions", "execmodel", "import", "with")
PROMPTS = (
    "Name three fruits.",
    "What is the capital of Japan?",
    "Write a sentence about the sea.",
    "Explain what a compiler does.",
    "Give me a recipe for pancakes.",
    "Why is the sky blue?",
    "Translate 'good morning' into French.",
    "List the planets of the solar system.",
    "Write a haiku about autumn.",
    "What is 12 plus 30?",
    "Who wrote Romeo and Juliet?",
    "How do I boil an egg?",
    "What is the difference between a list and a tuple in Python?",
    "Describe a cat to someone who has never seen one.",
    "Summarize the plot of Cinderella.",
    "What are the benefits of exercise?",
    "Write an email that declines an invitation.",
    "What causes the tides?",
    "Suggest a name for a bakery.",
    "How does a bicycle stay upright?",
)


def perplexity(folder: Path, properties: dict[str, Any], ids: Sequence[int]) -> float:
    """Return the perplexity of a text in chunks, each without what is before it."""
    compiled = openvino.Core().compile_model(folder / "openvino_model.xml", "CPU", properties)
    losses = []
    for chunk in np.array(ids[: _CHUNK * _CHUNKS]).reshape(-1, _CHUNK):
        request = compiled.create_infer_request()
        request.infer(
            {
                "input_ids": chunk[None],
                "attention_mask": np.ones((1, _CHUNK), np.int64),
                "position_ids": np.arange(_CHUNK)[None],
                "beam_idx": np.zeros(1, np.int32),
            }
        )
        logits = request.get_tensor("logits").data[0, :-1].astype(np.float64)
        logits -= logits.max(-1, keepdims=True)
        chosen = logits[np.arange(_CHUNK - 1), chunk[1:]]
        losses.append(np.log(np.exp(logits).sum(-1)) - chosen)
    return float(np.exp(np.concatenate(losses).mean()))


def answers(
    folder: Path, properties: dict[str, Any], prompts: Sequence[Sequence[int]]
) -> tuple[list[list[int]], float]:
    """Return greedy answers, one prompt at a time, and tokens per second."""
    runner = make_runner(folder / "openvino_model.xml", properties, cache_tokens=4096)
    engine = Engine(runner, ByteTokenizer(), max_sequences=1)
    texts: list[list[int]] = []
    began = time.perf_counter()
    for ids in prompts:
        answer = Generation(
            ids, Params(), max_tokens=_TOKENS, eos_ids=frozenset(), decode=lambda _: ""
        )
        run_batch(engine, [answer])
        texts.append(answer.token_ids)
    return texts, sum(map(len, texts)) / (time.perf_counter() - began)


def agreement(text: Sequence[int], expected: Sequence[int]) -> float:
    """Return the share of the answer before the first token that differs."""
    same = [one == other for one, other in zip(text, expected, strict=True)]
    return (same.index(False) if False in same else len(same)) / len(same)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("variants", nargs="*", default=["int8:0", "int8:32", "int8:128"])
    parser.add_argument("--precision", default="f32", choices=("f32", "bf16"))
    options = parser.parse_args()
    tokenizer = AutoTokenizer.from_pretrained(options.checkpoint, local_files_only=True)
    ids = tokenizer("\n".join(topics[name] for name in _TOPICS)).input_ids
    prompts = []
    for text in PROMPTS:
        messages = [{"role": "user", "content": text}]
        chat = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        prompts.append(tokenizer(chat, add_special_tokens=False).input_ids)
    expected: list[list[int]] = []
    with tempfile.TemporaryDirectory() as scratch:
        for variant in ("fp32:0", *options.variants):
            weights, _, group = variant.partition(":")
            target = Path(scratch, weights)
            if not target.exists():
                llmserve.build(
                    "openvino", str(options.checkpoint), output=target, name="m",
                    weight_format=weights,
                )  # fmt: skip
            folder = target / "m" / "1" / "openvino"
            precision = "f32" if variant == "fp32:0" else options.precision
            properties = {
                "INFERENCE_PRECISION_HINT": precision,
                "KV_CACHE_PRECISION": precision,
                "DYNAMIC_QUANTIZATION_GROUP_SIZE": int(group),
            }
            texts, rate = answers(folder, properties, prompts)
            expected = expected or texts
            shares = [agreement(*pair) for pair in zip(texts, expected, strict=True)]
            size = (folder / "openvino_model.bin").stat().st_size / 1e6
            surprise = perplexity(folder, properties, ids)
            print(
                f"{variant:<10} {size:6.0f} MB  perplexity {surprise:.3f}"
                f"  agreement {np.mean(shares):.2f}  identical {shares.count(1.0)}/{len(shares)}"
                f"  {rate:.0f} tokens/s",
                flush=True,
            )


if __name__ == "__main__":
    main()
