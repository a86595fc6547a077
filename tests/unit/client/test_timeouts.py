"""The time of a request has in it what the client asks its model before."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterator

import pytest

import llmserve
from llmserve.errors import RequestTimeoutError
from llmserve.testing import ScriptedTriton

ABOUT = json.dumps({"chat_template": "{{ messages }}<think></think>", "text": "Hello. <think>"})
CHAT = [{"role": "user", "content": "Hi"}]
ONE = 0.15
"""The seconds of each answer: to which template there is, to how a prompt ends, and to the chat."""


@pytest.fixture
def slow() -> Iterator[str]:
    triton = ScriptedTriton([ABOUT], first=ONE, inputs=["messages", "chat_template_kwargs"])
    with triton.serving() as url:
        yield url


@pytest.mark.parametrize(("model", "stream"), [("whole", False), ("pieces", True)])
def test_the_first_chat_is_over_when_its_time_is(slow: str, model: str, stream: bool) -> None:
    async def ask(seconds: float) -> None:
        async with llmserve.connect_async(slow) as client:
            began = time.monotonic()
            if stream:
                pieces = client.stream(model, messages=CHAT, timeout=seconds)
                assert "".join([p.text + p.reasoning async for p in pieces])
            else:
                await client.generate(model, messages=CHAT, timeout=seconds)
            assert time.monotonic() - began > 3 * ONE

    asyncio.run(ask(30))
    # More than each of the three takes, and less than all of them.
    with pytest.raises(RequestTimeoutError, match=r"within 0\.33 s"):
        asyncio.run(ask(2.2 * ONE))


def test_the_blocking_client_has_the_same_limits(slow: str) -> None:
    with llmserve.connect(slow) as client:
        with pytest.raises(RequestTimeoutError):
            client.generate("whole", messages=CHAT, timeout=1.5 * ONE)
        assert client.generate("whole", messages=CHAT, timeout=30).reasoning
