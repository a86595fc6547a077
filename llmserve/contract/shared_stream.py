"""The shared stream: one response of Triton per step with the new text of many answers.

A response of Triton's Python backend costs a quarter of a millisecond and more, whatever it holds.
So a client of many streams opens one request per process of a model, with ``open_shared_stream``
and a name that only it knows. That request stays unanswered: its responses carry the pieces of all
requests that name it in ``shared_stream``, in ``text_output``, as JSON: first a :data:`GREETING`,
then lists of :class:`SharedPiece`.

The pieces there are a preview. A request's own responses are complete in themselves, and join to
the whole answer: usually the final one has all of it. If the stream breaks, or the process that has
the request has no stream of that name, more of them come, from the beginning of the answer. So a
client that has had a part of an answer leaves out as much of what the request's own responses say,
and nothing depends on which of the two arrives first.

The model ends the stream when for a moment no request in flight has named it: until then, Triton
cannot unload the model.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any, NamedTuple

NUMBER = 1
"""The version of all this."""
DECLARED = "llmserve.shared_stream"
"""The parameter in ``config.pbtxt`` with that number, of models that have shared streams."""
GREETING = {"shared_stream": NUMBER}
"""The content of the first response."""

_DIGITS = 32


class SharedPiece(NamedTuple):
    """The next part of one answer, as in a request's own response."""

    request: str
    """The id of the request."""
    row: int
    """The position of the prompt in it."""
    text: str
    finish_reason: str
    input_tokens: int
    output_tokens: int
    cached_tokens: int | None = None


def is_name(text: str) -> bool:
    """Return whether a text can name a stream: 128 random bits, which nobody else can guess."""
    return len(text) == _DIGITS and set(text) <= set("0123456789abcdef")


def pack(content: Iterable[SharedPiece] | dict[str, int]) -> bytes:
    # A lone surrogate, which only a damaged formatter makes, must not cost the others' pieces.
    text = json.dumps(content, ensure_ascii=False, separators=(",", ":"))
    return text.encode(errors="replace")


def unpack(content: str) -> list[SharedPiece]:
    """Return the pieces in a response, none for the greeting; ValueError if it is neither."""
    rows: Any = json.loads(content)
    if isinstance(rows, dict) and rows == GREETING:
        return []
    try:
        return [SharedPiece(*row) for row in rows]
    except TypeError as error:
        raise ValueError(f"not the pieces of a shared stream: {error}") from None
