"""A request that is being answered, and what happens when its client leaves."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Generic

from llmserve_gateway.bodies import ClientDisconnected, Receive
from llmserve_gateway.dialects import Dialect, R
from llmserve_gateway.keys import Key
from llmserve_gateway.reply import Reply, Send


@dataclass(frozen=True, eq=False)
class Answering(Generic[R]):
    """A request of a client, whoever answers it."""

    key: Key | None
    headers: Mapping[str, str]
    receive: Receive
    send: Send
    reply: Reply
    dialect: Dialect[R]
    is_later: bool = False
    """Whether it is answered in the background: it counts already, and waits for its turn."""


async def wait_until_left(receive: Receive) -> None:
    """Return when a client has gone."""
    while (await receive())["type"] != "http.disconnect":
        pass


@asynccontextmanager
async def cancel_on_disconnect(receive: Receive, reply: Reply) -> AsyncIterator[None]:
    """Cancel the block when the client disconnects before it has its whole response."""
    task = asyncio.current_task()
    assert task is not None  # noqa: S101
    disconnected = False

    async def listen() -> None:
        nonlocal disconnected
        await wait_until_left(receive)
        # The server says the same of a client that stays, once it has been answered.
        if not reply.has_ended:
            disconnected = True
            task.cancel()

    listener = asyncio.ensure_future(listen())
    try:
        yield
    except asyncio.CancelledError:
        if not disconnected:
            raise
        if hasattr(task, "uncancel"):
            task.uncancel()
        raise ClientDisconnected from None
    finally:
        listener.cancel()
