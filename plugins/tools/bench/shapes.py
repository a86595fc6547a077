"""Models for the benchmarks: known shapes, random weights, and a word for every token."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count, islice
from pathlib import Path
from typing import Any

PROMPT_TOKENS = 20
VOCABULARY = 8000
SMALL = "2m"
"""For checking that something runs at all."""
# The hidden size, that of the products between, layers, heads, and heads of keys and values.
_LLAMA = {
    SMALL: (64, 128, 2, 4, 2),
    "1b": (2048, 8192, 16, 32, 8),
    "7b": (4096, 11008, 32, 32, 32),
}
_HYBRIDS = {"hybrid-2m": (64, 128, 4, 2, 1), "hybrid": (1024, 3584, 24, 8, 2)}
"""Three of four layers keep a state, as in Qwen3.5 0.8B, of which the large one is all but the
table: 0.5 B parameters."""
_EXPERTS = {"experts-2m": (64, 32, 2, 4, 2), "experts": (1024, 320, 12, 16, 4)}
"""A token is sent to 8 of 64 experts; the large one has 0.8 B parameters, of which 0.15 B compute
a token."""
SHAPES = ("92m", "1b", "7b", *_HYBRIDS, *_EXPERTS)
_PAD = 0


def make_config(shape: str, context: int = 0) -> Any:
    """Return the configuration of a shape: ``92m`` is GPT-2, ``1b`` and ``7b`` are Llama."""
    from transformers import GPT2Config, LlamaConfig, Qwen3_5TextConfig, Qwen3MoeConfig

    ends = {"bos_token_id": _PAD, "eos_token_id": _PAD, "pad_token_id": _PAD}
    if shape == "92m":
        return GPT2Config(
            vocab_size=VOCABULARY,
            n_positions=context or 1024,
            n_embd=768,
            n_layer=12,
            n_head=12,
            **ends,
        )
    sizes = {**_LLAMA, **_HYBRIDS, **_EXPERTS}[shape]
    hidden, inner, layers, heads, shared = sizes
    common = {
        "vocab_size": VOCABULARY,
        "max_position_embeddings": context or 4096,
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": shared,
        **ends,
    }
    if shape in _HYBRIDS:
        linear = {f"linear_num_{kind}_heads": 2 * heads for kind in ("key", "value")}
        return Qwen3_5TextConfig(**common, **linear, tie_word_embeddings=False)
    if shape in _EXPERTS:
        experts = {"num_experts": 64, "num_experts_per_tok": 8, "moe_intermediate_size": inner}
        return Qwen3MoeConfig(**common, **experts, head_dim=hidden // heads)
    return LlamaConfig(**common)


def make_model(shape: str, dtype: str, device: str = "cpu", *, context: int = 0) -> Any:
    """Return a model with random weights that are the same each time."""
    import torch
    from transformers import AutoModelForCausalLM, GenerationConfig

    torch.manual_seed(0)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(
            make_config(shape, context), dtype=getattr(torch, dtype)
        )
    model.generation_config = GenerationConfig(
        bos_token_id=_PAD, eos_token_id=_PAD, pad_token_id=_PAD
    )
    return model.eval()


def save(shape: str, device: str, folder: Path) -> Path:
    """Write the model and a tokenizer with a word for every token."""
    dtype = "float32" if device == "cpu" else "bfloat16"
    make_model(shape, dtype, device).save_pretrained(folder)
    save_tokenizer(folder, VOCABULARY)
    return folder


def save_tokenizer(folder: Path, size: int) -> None:
    """Write a tokenizer with a word for every token."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import WhitespaceSplit
    from transformers import PreTrainedTokenizerFast

    words = {_word(token): token for token in range(size)}
    tokenizer = Tokenizer(WordLevel(words, unk_token=_word(_PAD)))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    ends = dict.fromkeys(("bos_token", "eos_token", "unk_token"), _word(_PAD))
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **ends).save_pretrained(folder)


class Prompts:
    """Prompts that are never repeated, because a cache would make repeated ones faster."""

    def __init__(self) -> None:
        self._rows = count()

    def ids(self, rows: int) -> list[list[int]]:
        """Return this many new prompts."""
        return [prompt_ids(row) for row in islice(self._rows, rows)]

    @staticmethod
    def text(ids: Sequence[int]) -> str:
        """Return the text that the tokenizer turns into these ids."""
        return " ".join(_word(token) for token in ids)


def prompt_ids(row: int, length: int = PROMPT_TOKENS) -> list[int]:
    """Return a prompt that shares no prefix with those of other rows."""
    return [(row * 131 + 17 * i) % (VOCABULARY - 1) + 1 for i in range(length)]


def _word(token: int) -> str:
    return f"w{token}"
