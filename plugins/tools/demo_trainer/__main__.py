"""Train the demo model again: ``python -m plugins.tools.demo_trainer --output DIR``."""

from __future__ import annotations

import argparse
import itertools
import math
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from plugins.tools.demo_trainer.grammar import END, PROMPT_END, documents
from plugins.tools.demo_trainer.model import (
    POSITIONS,
    PROMPTS,
    greedy,
    new_network,
    save_network,
    save_tokenizer,
    train_tokenizer,
)  # fmt: skip

SEED = 20
STEPS = 900
BATCH = 8
PEAK = 3e-3
WARM_UP = 60
IGNORED = -100
# Enough documents for the tokenizer to learn its merges.
TOKENIZER_DOCUMENTS = 12_000


def log(line: str) -> None:
    """Write a line of progress to stderr."""
    sys.stderr.write(line + "\n")
    sys.stderr.flush()


def windows(tokenizer: Any, seed: int) -> Iterator[tuple[list[int], list[int]]]:
    """Pack documents into windows of full length, so that every position is trained.

    Like a prompt at run time, a window begins at the beginning of a document. Each comes with
    its targets: its tokens, with ``IGNORED`` for those of a document's prompt.
    """
    tokens: list[int] = []
    targets: list[int] = []
    for text in documents(seed):
        prompt, mark, answer = text.rpartition(PROMPT_END)
        prompt_ids = tokenizer.encode(prompt).ids if mark else []
        answer_ids = tokenizer.encode(answer + END).ids
        tokens += prompt_ids + answer_ids
        targets += [IGNORED] * len(prompt_ids) + answer_ids
        if len(tokens) >= POSITIONS:
            yield tokens[:POSITIONS], targets[:POSITIONS]
            tokens, targets = [], []


def rate(step: int, steps: int) -> float:
    """Return the learning rate: a linear warm-up, then half a cosine down to zero."""
    if step < WARM_UP:
        return PEAK * (step + 1) / WARM_UP
    progress = (step - WARM_UP) / max(1, steps - WARM_UP)
    return PEAK * 0.5 * (1 + math.cos(math.pi * progress))


def train(tokenizer: Any, seed: int, steps: int, threads: int) -> Any:
    """Return a network trained on ``steps`` batches of the text of ``seed``."""
    import torch
    from torch.nn.functional import cross_entropy

    torch.set_num_threads(threads)
    torch.manual_seed(seed)
    torch.use_deterministic_algorithms(True)
    network = new_network().train()
    matrices = [weight for weight in network.parameters() if weight.dim() > 1]
    vectors = [weight for weight in network.parameters() if weight.dim() <= 1]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=PEAK, betas=(0.9, 0.98))
    source = windows(tokenizer, seed)
    recent: list[float] = []
    started = time.monotonic()
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = rate(step, steps)
        tokens, targets = torch.tensor(list(itertools.islice(source, BATCH))).unbind(1)
        logits = network(input_ids=tokens, use_cache=False).logits
        loss = cross_entropy(
            logits[:, :-1].flatten(0, 1), targets[:, 1:].flatten(), ignore_index=IGNORED
        )
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(network.parameters(), 1.0)
        optimizer.step()
        recent = [*recent[-49:], loss.item()]
        if (step + 1) % 50 == 0 or step + 1 == steps:
            mean = sum(recent) / len(recent)
            seconds = time.monotonic() - started
            log(f"step {step + 1}/{steps}  loss {mean:.4f}  {seconds:.0f} s")
    return network


def main(arguments: list[str] | None = None) -> None:
    """Train the tokenizer and the network, write the folder and print some answers."""
    parser = argparse.ArgumentParser(
        prog="python -m plugins.tools.demo_trainer", description=__doc__
    )
    parser.add_argument("--output", type=Path, required=True, help="the folder to write")
    parser.add_argument("--seed", type=int, default=SEED, help="default: %(default)s")
    parser.add_argument("--steps", type=int, default=STEPS, help="default: %(default)s")
    parser.add_argument("--threads", type=int, default=2, help="default: %(default)s")
    options = parser.parse_args(arguments)
    folder: Path = options.output
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = train_tokenizer(itertools.islice(documents(options.seed), TOKENIZER_DOCUMENTS))
    save_tokenizer(tokenizer, folder, POSITIONS)
    network = train(tokenizer, options.seed, options.steps, options.threads)
    save_network(network, folder)
    for prompt, answer in zip(PROMPTS, greedy(folder, PROMPTS), strict=True):
        log(f"{prompt!r} -> {answer!r}")


if __name__ == "__main__":
    main()
