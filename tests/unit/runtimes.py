"""Small runtime classes for tests of drivers: a tokenizer of letters, a generator that counts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from llmserve.runtime.generation import Generation
from llmserve.runtime.protocols import Parts, Tokenizer
from llmserve.runtime.text_formatter import TextFormatter
from llmserve.testing import FakeBackendUtils

INPUTS = frozenset(
    {"text_input", "messages", "max_tokens", "stream", "stop_words", "exclude_input_in_output"}
)


class Bytes:
    """A tokenizer whose ids are bytes."""

    eos_ids = frozenset({0})

    def encode(self, text: str, *, special: bool = True) -> list[int]:
        return list(text.encode())

    def encode_chat(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        return [byte for message in messages for byte in message["content"].encode()]

    def decode(self, ids: Sequence[int]) -> str:
        return bytes(i for i in ids if i).decode(errors="replace")


class Repeats:
    """A generator that repeats the prompt for ever; a prompt with ``!`` makes it fail."""

    context_length: int | None = 100
    eos_ids: frozenset[int] = frozenset()

    def __init__(self) -> None:
        self.batches: list[int] = []

    def generate(self, generations: Sequence[Generation], tokenizer: Tokenizer) -> None:
        self.batches.append(len(generations))
        step = 0
        while not all(generation.done for generation in generations):
            for generation in generations:
                if ord("!") in generation.prompt_ids and step == 2:
                    raise MemoryError("no memory left\nfor this")
                generation.push(generation.prompt_ids[step % len(generation.prompt_ids)])
            step += 1


def parts(generator: Any, *, decoupled: bool = True, **defaults: Any) -> Parts:
    return Parts(
        name="tested",
        tokenizer=Bytes(),
        generator=generator,
        formatter=TextFormatter({}, Path()),
        inputs=INPUTS,
        extras=frozenset(),
        batched=True,
        decoupled=decoupled,
        defaults={"max_tokens": 8, "stream": False, "chat": False, "echo": False, **defaults},
        pb_utils=FakeBackendUtils(),
    )
