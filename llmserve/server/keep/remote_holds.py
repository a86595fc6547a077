"""Holds models of a ``serve --on-demand`` from another process, such as a frontend."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from llmserve.errors import ClientError, ModelNotReadyError, NotLoadedError

_NOT_YET, _PATIENCE = 0.2, 20
"""Seconds between two tries to reach a ``serve`` that is about to serve, and how many there are."""


class Holds:
    """The models that a process uses, and that its ``serve`` therefore keeps loaded.

    Requests that overlap share a hold, unless its model has to make place for another: requests
    that come then wait until it is loaded again.

    >>> holds = Holds(Path("serve.sock"))
    >>> async def use(send) -> None:
    ...     async with holds.hold("gpt2"):
    ...         await send()
    """

    def __init__(self, control: Path) -> None:
        self._control = control
        self._shared: dict[str, _Shared] = {}

    @asynccontextmanager
    async def hold(
        self,
        model: str,
        *,
        load: bool = True,
        on_place: Callable[[int], None] = lambda _: None,
        priority: int = 0,
        keep: float | None = None,
    ) -> AsyncIterator[None]:
        """Have a model loaded, and keep it while the block runs.

        Models for a lower ``priority`` are loaded first. ``on_place`` is called with which of the
        models that are to be loaded it is, from 1. Without ``load``,
        :class:`llmserve.errors.NotLoadedError` is raised if it is not loaded. ``keep`` is for how
        many seconds it is kept from then on when nobody uses it: 0 unloads it, and below 0 there is
        no end.
        """
        shared = self._shared.get(model)
        if shared and load and priority < shared.priority and not shared.held.done():
            # It asks anew, and who comes after it waits with it.
            shared.going = True
        is_own = keep is not None
        if shared is None or shared.going or is_own or not (load or shared.held.done()):
            shared = _Shared(self._control, model, load=load, priority=priority, keep=keep)
            if load and not is_own:
                self._shared[model] = shared
        shared.listeners.append(on_place)
        try:
            if shared.place and not shared.held.done():
                on_place(shared.place)
            await asyncio.shield(shared.held)
            yield
        finally:
            shared.listeners.remove(on_place)
            if not shared.listeners:
                shared.close()
                if self._shared.get(model) is shared:
                    del self._shared[model]


class _Shared:
    """One connection to ``serve``, which holds a model until it is closed."""

    def __init__(
        self, control: Path, model: str, *, load: bool, priority: int, keep: float | None
    ) -> None:
        self.listeners: list[Callable[[int], None]] = []
        self.place = 0
        self.going = False
        loop = asyncio.get_running_loop()
        self.held: asyncio.Future[None] = loop.create_future()
        self._control = control
        self.priority = priority
        self._request = {"do": "hold", "model": model, "load": load, "priority": priority}
        self._request |= {} if keep is None else {"keep": keep}
        self._task = loop.create_task(self._run())

    def close(self) -> None:
        self.going = True
        self._task.cancel()
        if self.held.done() and not self.held.cancelled():
            self.held.exception()
        self.held.cancel()

    async def _run(self) -> None:
        try:
            for _ in range(_PATIENCE):
                if await self._follow():
                    break
                await asyncio.sleep(_NOT_YET)
            self._fail(NotLoadedError("the server does not say whether the model is loaded"))
        except (OSError, ValueError) as error:
            self._fail(NotLoadedError(f"no `llmserve serve` answers at {self._control} ({error})"))
        finally:
            self.going = True

    async def _follow(self) -> bool:
        """Follow what happens to the hold until its end; False if it should be asked for again."""
        reader, writer = await asyncio.open_unix_connection(self._control)
        try:
            writer.write(json.dumps(self._request).encode() + b"\n")
            while line := await reader.readline():
                answer = json.loads(line)
                if "error" in answer:
                    # Its frontends are started a moment before it holds models.
                    return False
                self._hear(answer)
            return True
        finally:
            writer.close()

    def _hear(self, answer: Mapping[str, Any]) -> None:
        if "failed" in answer:
            self._fail(_error(answer))
        elif "place" in answer:
            self.place = int(answer["place"])
            for listener in self.listeners:
                listener(self.place)
        else:
            self.going = bool(answer.get("going"))
            if not self.held.done():
                self.held.set_result(None)

    def _fail(self, error: ClientError) -> None:
        self.going = True
        if not self.held.done():
            self.held.set_exception(error)
            # It may be that nobody waits any more.
            self.held.exception()


def _error(answer: Mapping[str, Any]) -> ClientError:
    is_unknown = answer.get("code") == ModelNotReadyError.code
    kind = ModelNotReadyError if is_unknown else NotLoadedError
    return kind(answer["failed"], hint=answer.get("hint"), details=answer.get("details"))
