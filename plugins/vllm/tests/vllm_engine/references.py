"""A tiny Llama that vLLM can load, and what transformers' ``generate()`` makes of a prompt."""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import PreTrainedTokenizerFast

from llmserve.testing.tiny_models import CONTEXT, VOCAB, make_model

# vLLM's attention on CPUs takes heads of 32 numbers or more.
SHAPE: dict[str, Any] = {"hidden_size": 128, "head_dim": 32}
OPTIONS: dict[str, Any] = {"enforce_eager": True, "dtype": "float32"}
"""Without these, each load compiles for half a minute, and answers are those of bfloat16."""
MAX_TOKENS = 40

_chance = random.Random(3)
# Only a few prompts, because the output of generate() is computed once for each; some begin alike,
# so that prefixes are shared.
PROMPTS = [
    *(
        tuple(_chance.randrange(3, VOCAB) for _ in range(_chance.randrange(1, 40)))
        for _ in "a" * 12
    ),
    *(tuple(3 + (3 * i) % (VOCAB - 3) for i in range(length)) for length in (17, 18, 33, 50, 60)),
]
assert max(map(len, PROMPTS)) + MAX_TOKENS <= CONTEXT


def save_tiny_llama(folder: Path) -> Path:
    """Write the model and a tokenizer with a word for every token, so that texts show tokens."""
    tiny_llama().save_pretrained(folder)
    words = {f"w{token}": token for token in range(VOCAB)}
    tokenizer = Tokenizer(WordLevel(words, unk_token="w0"))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    ends = dict.fromkeys(("bos_token", "eos_token", "unk_token"), "w0")
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **ends).save_pretrained(folder)
    return folder


def text_of(tokens: Sequence[int]) -> str:
    """Return the text of tokens; the first is the tokenizer's special one, which has none."""
    return " ".join(f"w{token}" for token in tokens if token)


@cache
def expected(prompt: tuple[int, ...]) -> list[int]:
    """Return the ``MAX_TOKENS`` greedy tokens of ``generate()`` for a prompt alone."""
    ids = torch.tensor([prompt])
    with torch.inference_mode():
        output = tiny_llama().generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=MAX_TOKENS, do_sample=False
        )
    return [int(token) for token in output[0, len(prompt) :]]


@cache
def tiny_llama() -> Any:
    model = make_model("llama", **SHAPE)
    # Without an end token, all answers have the same length.
    model.generation_config = transformers.GenerationConfig(pad_token_id=0)
    return model
