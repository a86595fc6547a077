"""Trains a LoRA adapter with PEFT, as an example: a chat model then answers with SQL.

    pip install -c constraints.txt peft
    python -m plugins.tools.train_adapter ./my-model ./sql-adapter

A small model learns the form in minutes on two cores: questions about tables that it has not seen
get queries of them. For a task of your own, let ``examples`` yield your questions and answers.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

STEPS, BATCH, RATE = 20, 4, 2e-3
_TABLES = {
    "customers": {"city": ("Paris", "Oslo", "Rome"), "name": ("Smith", "Garcia", "Chen")},
    "orders": {"status": ("open", "paid", "late"), "country": ("Spain", "Japan", "Peru")},
    "books": {"author": ("Homer", "Woolf", "Eco"), "language": ("Greek", "French", "Latin")},
    "flights": {"airline": ("Iberia", "Finnair", "KLM"), "origin": ("Berlin", "Lima", "Cairo")},
    "students": {"school": ("Eton", "Central", "North"), "grade": ("A", "B", "C")},
    "films": {"director": ("Lang", "Varda", "Ozu"), "genre": ("comedy", "drama", "western")},
}
_IGNORED = -100
"""What PyTorch counts as no label."""


def examples() -> Iterator[tuple[str, str]]:
    """Yield questions and answers."""
    for table, columns in _TABLES.items():
        yield f"List all {table}.", f"SQL: SELECT * FROM {table};"
        yield f"How many {table} are there?", f"SQL: SELECT COUNT(*) FROM {table};"
        for column, values in columns.items():
            for value in values:
                rest = f"FROM {table} WHERE {column} = '{value}';"
                yield f"Which {table} have the {column} {value}?", f"SQL: SELECT * {rest}"
                yield f"How many {table} have the {column} {value}?", f"SQL: SELECT COUNT(*) {rest}"


def train(source: Path, target: Path, *, steps: int = STEPS) -> None:
    """Train an adapter of the model in a folder, and write it to another one."""
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(source)
    base = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    config = LoraConfig(
        r=8, lora_alpha=16, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"
    )
    model: Any = get_peft_model(base, config)
    model.print_trainable_parameters()
    learned = [encoded(tokenizer, *pair) for pair in examples()]
    draw = random.Random(0)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=RATE)
    for step in range(1, steps + 1):
        loss = model(**batch(draw.sample(learned, BATCH))).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % 5 == 0:
            print(f"step {step} of {steps}: loss {loss.item():.3f}", flush=True)
    model.save_pretrained(target)


def encoded(tokenizer: Any, question: str, answer: str) -> tuple[list[int], list[int]]:
    """Return the tokens of a chat, and what is to be learned of each: the answer alone."""
    messages = [{"role": "user", "content": question}]
    prompt = tokenizer.apply_chat_template(
        messages, add_generation_prompt=True, tokenize=True, return_dict=True
    )["input_ids"]
    own = tokenizer(answer, add_special_tokens=False)["input_ids"] + [tokenizer.eos_token_id]
    return prompt + own, [_IGNORED] * len(prompt) + own


def batch(chosen: list[tuple[list[int], list[int]]]) -> dict[str, torch.Tensor]:
    """Return the tensors of a step; shorter rows are filled at their end."""
    width = max(len(ids) for ids, _ in chosen)
    rows = [
        (
            ids + [0] * (width - len(ids)),
            [1] * len(ids) + [0] * (width - len(ids)),
            labels + [_IGNORED] * (width - len(labels)),
        )
        for ids, labels in chosen
    ]
    names = ("input_ids", "attention_mask", "labels")
    return {
        name: torch.tensor(column)
        for name, column in zip(names, zip(*rows, strict=True), strict=True)
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Train a LoRA adapter with PEFT, as an example.")
    parser.add_argument("model", type=Path, help="folder of a chat model")
    parser.add_argument("adapter", type=Path, help="folder that the adapter is written to")
    parser.add_argument("--steps", type=int, default=STEPS)
    chosen = parser.parse_args()
    train(chosen.model, chosen.adapter, steps=chosen.steps)
