"""How often greedy text in half precision is that of ``generate()``, and what parts them if not.

    python bench/same_text.py [--model gpt2 llama demo] [--dtype bfloat16] [--prompts 24]

``gpt2`` and ``llama`` are shapes of 12 layers of width 768 with random weights. Where two texts
part, it is a tie if the logits that ``generate()`` has for both tokens are within one unit of the
last place.
"""

from __future__ import annotations

import argparse
import math
import random
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from llmserve.runtime.generation import Generation
from llmserve.runtime.params import Params
from llmserve.testing import ByteTokenizer
from llmserve_iterative.engine import Engine

LENGTH = 20
Texts = list[list[int]]


def make_model(name: str, dtype: torch.dtype) -> Any:
    """Return the model of a name, the same one each time."""
    from transformers import AutoModelForCausalLM, GenerationConfig, GPT2Config, LlamaConfig

    from llmserve.demo import demo_model_path

    torch.manual_seed(0)
    sizes = {"vocab_size": 8000, "bos_token_id": 0, "eos_token_id": 0}
    if name == "demo":
        model = AutoModelForCausalLM.from_pretrained(demo_model_path())
    elif name == "gpt2":
        config = GPT2Config(n_positions=1024, n_embd=768, n_layer=12, n_head=12, **sizes)
        model = AutoModelForCausalLM.from_config(config)
    else:
        config = LlamaConfig(
            hidden_size=768, intermediate_size=2048, num_hidden_layers=12,
            num_attention_heads=12, num_key_value_heads=4, **sizes,
        )  # fmt: skip
        model = AutoModelForCausalLM.from_config(config)
    model.generation_config = GenerationConfig(pad_token_id=0)
    return model.to(dtype).eval()


@torch.inference_mode()
def generate(model: Any, prompts: Texts, tokens: int) -> tuple[Texts, Any]:
    """Return what ``generate()`` makes of a batch, and the logits that it had."""
    ids = torch.tensor(prompts)
    made = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=tokens,
        min_new_tokens=tokens,
        do_sample=False,
        output_logits=True,
        return_dict_in_generate=True,
    )
    return made.sequences[:, ids.shape[1] :].tolist(), made.logits


def answer(engine: Engine, prompts: Texts, tokens: int) -> Texts:
    """Return what the engine makes of prompts that are all under way at once."""
    wanted = Params(ignore_eos=True)
    several = [
        Generation(p, wanted, max_tokens=tokens, eos_ids=frozenset(), decode=lambda _: "")
        for p in prompts
    ]
    for one in several:
        engine.admit(one)
    while engine.busy:
        engine.step()
    return [one.token_ids for one in several]


def compare(texts: Texts, alone: list[tuple[list[int], Any]], digits: int) -> list[str]:
    """Return how many are the same, where the others part, and how many of those are ties."""
    parted, ties = [], 0
    for text, (expected, logits) in zip(texts, alone, strict=True):
        if text == expected:
            continue
        at = next(i for i, pair in enumerate(zip(text, expected, strict=True)) if len({*pair}) > 1)
        theirs, ours = (float(logits[at][0][token]) for token in (expected[at], text[at]))
        ties += theirs - ours <= 2.0 ** (math.floor(math.log2(abs(theirs))) - digits)
        parted.append(at)
    first = f"{min(parted)} to {max(parted)}" if parted else ""
    return [f"{len(texts) - len(parted)} of {len(texts)}", first, f"{ties} of {len(parted)}"]


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", nargs="+", default=["gpt2", "llama", "demo"])
    parser.add_argument("--dtype", choices=["bfloat16", "float16"], default="bfloat16")
    parser.add_argument("--prompts", type=int, default=24)
    parser.add_argument("--tokens", type=int, default=128)
    args = parser.parse_args()
    dtype = getattr(torch, args.dtype)
    digits = 7 if dtype == torch.bfloat16 else 10
    title = f"{args.dtype}, {args.tokens} tokens after {LENGTH}, against generate() alone"
    table = Table("", "same text", "the others part at", "of those ties", title=title)
    for name in args.model:
        model = make_model(name, dtype)
        chance = random.Random(1)
        size = model.config.vocab_size
        prompts = [[chance.randrange(1, size) for _ in range(LENGTH)] for _ in range(args.prompts)]
        alone = []
        for prompt in prompts:
            (text,), logits = generate(model, [prompt], args.tokens)
            alone.append((text, logits))
        batch, _ = generate(model, prompts, args.tokens)
        engine = Engine(model, ByteTokenizer(), max_sequences=len(prompts), cache_tokens=8192)
        one_by_one = [answer(engine, [prompt], args.tokens)[0] for prompt in prompts]
        together = answer(engine, prompts, args.tokens)
        ways = {"generate(), one batch": batch, "engine, alone": one_by_one}
        for way, texts in {**ways, "engine, in flight": together}.items():
            table.add_row(f"{name}: {way}", *compare(texts, alone, digits))
    Console().print(table)


if __name__ == "__main__":
    main()
