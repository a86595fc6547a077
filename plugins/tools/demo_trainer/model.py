"""The demo model's tokenizer and network: how they are created, saved and queried."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from plugins.tools.demo_trainer.grammar import END, PROMPT_END, TEMPLATE

VOCABULARY = 1024
POSITIONS = 512


def train_tokenizer(texts: Iterable[str]) -> Any:
    """Return a ``tokenizers.Tokenizer`` whose merges are learned from the ASCII part of ``texts``.

    Every byte is in the vocabulary, so any text survives encoding and decoding.
    Characters beyond ASCII get no merges, so each is split into several tokens, which
    lets even a short demo show that streaming never sends half a character.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[END],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    pieces = (piece for text in texts for piece in text.replace(PROMPT_END, "").split(END))
    plain = ("".join(c if c.isascii() else " " for c in piece) for piece in pieces)
    tokenizer.train_from_iterator(plain, trainer)
    return tokenizer


def save_tokenizer(tokenizer: Any, folder: Path, positions: int) -> None:
    """Write ``tokenizer.json``, and ``tokenizer_config.json`` with the chat template.

    The template is in the configuration because every release of transformers that
    supports chat templates reads it there.
    """
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "add_prefix_space": False,
        "clean_up_tokenization_spaces": False,
        "eos_token": END,
        "pad_token": END,
        "padding_side": "left",
        "model_max_length": positions,
        "chat_template": TEMPLATE,
    }
    text = json.dumps(settings, indent=2, ensure_ascii=False) + "\n"
    (folder / "tokenizer_config.json").write_text(text, encoding="utf-8")


def new_network() -> Any:
    """Return an untrained GPT-2 of 1.5 million parameters."""
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=VOCABULARY,
        n_positions=POSITIONS,
        n_embd=160,
        n_layer=4,
        n_head=5,
        # Every window is new text, so there is nothing to overfit.
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        bos_token_id=None,
        eos_token_id=0,
    )
    return GPT2LMHeadModel(config)


def save_network(network: Any, folder: Path) -> None:
    """Write the weights as float16 and a configuration that loads them as float32.

    This halves their size in the wheel; the arithmetic is float32, so that answers in a
    batch equal the answers alone.
    """
    import torch
    from safetensors.torch import save

    weights = {
        name: tensor.detach().to(torch.float16).contiguous()
        for name, tensor in network.state_dict().items()
        # Tied to transformer.wte.weight, so it is stored once, under that name.
        if name != "lm_head.weight"
    }
    (folder / "model.safetensors").write_bytes(save(weights, metadata={"format": "pt"}))
    config = network.config.to_diff_dict()
    config["architectures"] = ["GPT2LMHeadModel"]
    config["pad_token_id"] = 0
    config["dtype"] = "float32"
    # Older releases of transformers read this name instead.
    config["torch_dtype"] = "float32"
    version = config["transformers_version"]
    generation = {
        "do_sample": False,
        "eos_token_id": 0,
        "pad_token_id": 0,
        "transformers_version": version,
    }
    for name, content in (("config.json", config), ("generation_config.json", generation)):
        text = json.dumps(content, indent=2, sort_keys=True) + "\n"
        (folder / name).write_text(text, encoding="utf-8")


PROMPTS = (
    "Programming in C++ is like",
    "Programming in Python is like",
    "The capital of France is",
    "Once upon a time",
    "A model server is",
    "Hello",
    "I am going",
    "How can you be",
    "Where is the nearest",
    "What is your favourite",
    "The quick brown fox",
    "Tell me about Seoul.",
    "What is a batch?",
    "The president of the United States",
)


def greedy(
    folder: Path, prompts: Sequence[str], max_new_tokens: int = 96, *, chat: bool = False
) -> list[str]:
    """Return the greedy answer to each prompt, generated one at a time."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    network = AutoModelForCausalLM.from_pretrained(folder).eval()
    answers = []
    for prompt in prompts:
        text = prompt
        if chat:
            messages = [{"role": "user", "content": prompt}]
            text = tokenizer.apply_chat_template(
                messages, tokenize=False, add_generation_prompt=True
            )
        ids = tokenizer(text, return_tensors="pt")
        output = network.generate(**ids, max_new_tokens=max_new_tokens)[0]
        answer = output[ids["input_ids"].shape[1] :]
        answers.append(str(tokenizer.decode(answer, skip_special_tokens=True)))
    return answers
