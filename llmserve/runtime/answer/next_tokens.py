"""Which token a text is where an answer begins."""

from __future__ import annotations

from collections.abc import Sequence

from llmserve.contract.options import LOGPROBS_OF
from llmserve.runtime.errors import RequestError
from llmserve.runtime.protocols import Tokenizer

_LOOKED_BACK = 16
"""How many tokens of a prompt may change how the next text is read: words are shorter."""


def tokens_after(ids: Sequence[int], texts: Sequence[str], tokenizer: Tokenizer) -> tuple[int, ...]:
    """Return the token that each text is after a prompt; each has to be one, and its own."""
    end = _end(ids, tokenizer)
    before = tokenizer.decode(end)
    found: list[int] = []
    for text in texts:
        read = tokenizer.encode(before + text, special=False)
        # A tokenizer may drop a text, such as a mark without width.
        if not read or read[:-1] != end or read[-1] in found:
            raise RequestError(
                f"{text[:40]!r} is not a token of its own at the beginning of this model's answer",
                code="unsupported_option",
                param=LOGPROBS_OF,
            )
        found.append(read[-1])
    return tuple(found)


def _end(ids: Sequence[int], tokenizer: Tokenizer) -> list[int]:
    """Return the last tokens of a prompt that are read again from their text as they are.

    There may be none: a special token has no text, and nothing joins one.
    """
    for length in range(min(_LOOKED_BACK, len(ids)), 0, -1):
        end = list(ids[-length:])
        if tokenizer.encode(tokenizer.decode(end), special=False) == end:
            return end
    return []
