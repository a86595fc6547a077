"""The demo model's tokenizer: byte-level BPE that loses nothing."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from llmserve.demo.topics.chat import END, TEMPLATE
from llmserve.demo.topics.unfamiliar import GIVEN

VOCABULARY = 1024


def train_tokenizer(texts: Iterable[str]) -> Any:
    """Return a ``tokenizers.Tokenizer`` whose merges are learned from the ASCII part of ``texts``.

    Every byte is in the vocabulary, so any text survives the way there and back.
    Characters beyond ASCII get no merges: each is then split over several tokens,
    which lets even a short demo show that streaming never sends half a character.
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
    pieces = (piece for text in texts for piece in text.replace(GIVEN, "").split(END))
    plain = ("".join(c if c.isascii() else " " for c in piece) for piece in pieces)
    tokenizer.train_from_iterator(plain, trainer)
    return tokenizer


def save_tokenizer(tokenizer: Any, folder: Path, positions: int) -> None:
    """Write ``tokenizer.json`` and ``tokenizer_config.json``, the chat template in the latter.

    The template goes into the configuration because every transformers that knows
    chat templates reads it there.
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
