"""What the helpers of live tests do when a server fails."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, cast

import pytest

from llmserve.client import Piece
from llmserve.errors import ClientError
from llmserve.testing.live import LiveTriton, completion_order


@pytest.mark.parametrize("failing", [{"long"}, {"short"}, {"long", "short"}])
@pytest.mark.parametrize("pieces", [0, 1])
def test_a_request_that_fails_shows_in_the_order_of_completion(
    failing: set[str], pieces: int
) -> None:
    names = {9: "long", 1: "short"}

    def stream(model: str, prompt: str, *, max_tokens: int, **_: Any) -> Iterator[Piece]:
        yield from [Piece("a")] * pieces
        if names[max_tokens] in failing:
            raise ClientError(f"the {names[max_tokens]} one")

    triton = cast(LiveTriton, SimpleNamespace(client=SimpleNamespace(stream=stream)))
    first = "long" if "long" in failing else "short"
    with pytest.raises(ClientError, match=f"the {first} one"):
        completion_order(triton, "m", long=9, short=1)
