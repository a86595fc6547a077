"""The parts of a model for unit tests of drivers and generators, without weights or Triton."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from llmserve.runtime import contract
from llmserve.runtime.contract import ALIASES
from llmserve.runtime.params import READERS
from llmserve.runtime.protocols import Formatter, Parts, Tokenizer
from llmserve.runtime.text_formatter import TextFormatter
from llmserve.testing.fake import FakeBackendUtils

_INPUTS = (
    contract.TEXT_INPUT,
    contract.MESSAGES,
    contract.MAX_TOKENS,
    contract.STREAM,
    contract.STOP_WORDS,
    contract.INPUT_IDS,
    contract.PROMPT_ONLY,
    *contract.TEXT_FORMAT_INPUTS,
)


class ByteTokenizer:
    """A tokenizer whose ids are the bytes of the text; 0 ends an answer.

    >>> ByteTokenizer().decode(ByteTokenizer().encode("é"))
    'é'
    """

    eos_ids = frozenset({0})
    vocab_size = 256

    def encode(self, text: str, *, special: bool = True) -> list[int]:
        """Return the bytes of a text."""
        del special
        return list(text.encode())

    def encode_chat(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        """Return the bytes of all that was said."""
        return [byte for message in messages for byte in message["content"].encode()]

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of bytes."""
        return bytes(i for i in ids if i).decode(errors="replace")


def make_parts(
    generator: Any,
    *,
    tokenizer: Tokenizer | None = None,
    formatter: Formatter | None = None,
    inputs: Sequence[str] = (),
    batched: bool = True,
    decoupled: bool = True,
    **defaults: Any,
) -> Parts:
    """Return what a driver is started with; ``inputs`` are those of the generator's own.

    ``defaults`` are the options of a build that hold for a request which does not say: max_tokens,
    stream, chat, echo.
    """
    return Parts(
        name="tested",
        tokenizer=tokenizer or ByteTokenizer(),
        generator=generator,
        formatter=formatter or TextFormatter({}, Path()),
        inputs=frozenset({*(tensor.name for tensor in _INPUTS), *inputs}),
        extras=frozenset({*inputs} - READERS.keys() - ALIASES.keys()),
        batched=batched,
        decoupled=decoupled,
        defaults={"max_tokens": 8, "stream": False, "chat": False, "echo": False, **defaults},
        pb_utils=FakeBackendUtils(),
    )
