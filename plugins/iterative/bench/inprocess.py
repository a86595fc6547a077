"""Without Triton: the engine, ``generate()`` and ``generate_batch()`` in this process."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from shapes import prompt_ids

from llmserve.runtime import Generation, Params
from llmserve_iterative.engine.engine import Engine

NEW = 64
Prompts = Sequence[list[int]]


class Letters:
    """A tokenizer that costs nothing: a letter per token."""

    eos_ids: frozenset[int] = frozenset()

    def encode(self, text: str, *, special: bool = True) -> list[int]:
        """Return a token per letter."""
        del special
        return [ord(letter) for letter in text]

    def encode_chat(self, messages: Any) -> list[int]:
        """Return the tokens of all that was said."""
        return self.encode(str(messages))

    def decode(self, ids: Sequence[int]) -> str:
        """Return a letter per token."""
        return "x" * len(ids)


def make_engine(model: Any, sequences: int = 64) -> Engine:
    """Return an engine over a model, which belongs to it from now on.

    Its cache is as large as that of a served model with so many sequences.
    """
    return Engine(model, Letters(), max_sequences=sequences, cache_tokens=256 * sequences)


def engine_rate(engine: Engine, prompts: Prompts, tokens: int = NEW) -> float:
    """Return the tokens a second of sequences at a time."""
    for prompt in prompts:
        engine.admit(_generation(prompt, tokens))
    begun = time.perf_counter()
    while engine.busy:
        engine.step()
    return len(prompts) * tokens / (time.perf_counter() - begun)


def step_seconds(engine: Engine, length: int, count: int = 32) -> float:
    """Return the seconds of the median step of one sequence at a context's length."""
    generation = _generation(prompt_ids(0, length - count // 2), count)
    engine.admit(generation)
    while not generation.token_ids:
        engine.step()
    times = []
    while engine.busy:
        begun = time.perf_counter()
        engine.step()
        times.append(time.perf_counter() - begun)
    return sorted(times)[len(times) // 2]


def generate_rate(model: Any, prompts: Prompts) -> float:
    """Return the tokens a second of ``generate()`` on a batch."""
    import torch

    ids = torch.tensor(prompts, device=model.device)
    begun = time.perf_counter()
    with torch.inference_mode():
        answer = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=NEW,
            min_new_tokens=NEW,
            do_sample=False,
        )
    made = answer[:, ids.shape[1] :].tolist()
    return sum(map(len, made)) / (time.perf_counter() - begun)


def generate_batch_rate(model: Any, prompts: Prompts) -> float:
    """Return the tokens a second of transformers' own continuous batching."""
    from transformers import GenerationConfig

    config = GenerationConfig(max_new_tokens=NEW, do_sample=False, eos_token_id=-1, pad_token_id=0)
    begun = time.perf_counter()
    answers = model.generate_batch(
        inputs=prompts,
        generation_config=config,
        progress_bar=False,
    )
    made = sum(len(answer.generated_tokens) for answer in answers.values())
    if made != len(prompts) * NEW:
        raise RuntimeError(f"generate_batch made {made} tokens, not {len(prompts) * NEW}")
    return made / (time.perf_counter() - begun)


def _generation(prompt: list[int], tokens: int) -> Generation:
    return Generation(
        prompt,
        Params(ignore_eos=True),
        max_tokens=tokens,
        eos_ids=frozenset(),
        decode=Letters().decode,
    )
