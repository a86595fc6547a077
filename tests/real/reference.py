"""What the real model answers when transformers runs it, without anything of llmserve."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

CHATS = (
    "What is the capital of Japan?",
    "Name three fruits.",
    "Write a sentence about the sea.",
    "Explain what a compiler does.",
    "Why is the sky blue?",
    "Translate 'good morning' into French.",
    "Who wrote Romeo and Juliet?",
    "What is 12 plus 30?",
    "How do I boil an egg?",
    "Suggest a name for a bakery.",
)
TOKENS = 16
_TEXT = ("class", "exceptions", "execmodel", "import", "with", "specialnames", "formatstrings")


class Reference:
    """The model in float32, with an adapter that PEFT has merged into it if one is given."""

    def __init__(self, folder: Path, adapter: Path | None = None) -> None:
        self.folder = folder
        self.tokenizer = AutoTokenizer.from_pretrained(folder, padding_side="left")
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        if adapter:
            from peft import PeftModel

            self.model = PeftModel.from_pretrained(self.model, str(adapter)).merge_and_unload()

    @cached_property
    def answers(self) -> list[str]:
        """The greedy answers to ``CHATS``."""
        return self.answers_to(CHATS)

    def answers_to(self, questions: Sequence[str]) -> list[str]:
        """Return the greedy answers to questions, of at most ``TOKENS`` tokens."""
        chats = [[{"role": "user", "content": question}] for question in questions]
        batch: Any = self.tokenizer.apply_chat_template(
            chats, add_generation_prompt=True, padding=True, return_tensors="pt", return_dict=True
        )
        with torch.inference_mode():
            ids = self.model.generate(**batch, max_new_tokens=TOKENS, do_sample=False)
        answers = ids[:, batch["input_ids"].shape[1] :]
        return [
            str(text) for text in self.tokenizer.batch_decode(answers, skip_special_tokens=True)
        ]

    def text(self, tokens: int) -> str:
        """Return the beginning of the language reference that Python brings, of so many tokens."""
        ids = self.tokenizer.encode("\n".join(topics[name] for name in _TEXT))[:tokens]
        assert len(ids) == tokens
        return str(self.tokenizer.decode(ids))

    def chunks(self, count: int) -> list[str]:
        """Return parts of that text, of some 250 tokens each."""
        text, size = self.text(260 * count), 1000
        return [text[start : start + size] for start in range(0, count * size, size)]

    def perplexity(self, chunks: Sequence[Sequence[int]]) -> float:
        """Return how much each token of the chunks surprises the model, on average."""
        losses = []
        for chunk in chunks:
            ids = torch.tensor([chunk])
            with torch.inference_mode():
                loss = self.model(input_ids=ids, labels=ids).loss
            losses.append(loss.expand(len(chunk) - 1))
        return float(torch.cat(losses).mean().exp())
