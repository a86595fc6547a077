"""Prompts to read the demo model by, and its greedy answers to them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

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
    """Return the greedy answer to each prompt, asked one at a time."""
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
