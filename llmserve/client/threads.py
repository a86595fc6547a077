"""Work on files, in threads."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from typing import ParamSpec, TypeVar

_P = ParamSpec("_P")
_R = TypeVar("_R")


async def in_thread(work: Callable[_P, _R], *args: _P.args, **kwargs: _P.kwargs) -> _R:
    """Return what a function returns; who is cancelled meanwhile goes on when it has ended.

    Nobody may close a file to which a thread still writes.
    """
    running = asyncio.ensure_future(asyncio.to_thread(work, *args, **kwargs))
    try:
        return await asyncio.shield(running)
    except asyncio.CancelledError:
        with suppress(Exception):
            await running
        raise
