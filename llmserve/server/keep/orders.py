"""What users ask for while a Triton runs: to load, to reload and to unload models."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Collection, Iterable, Sequence
from functools import partial

from llmserve.contract.report import State
from llmserve.errors import ServerError
from llmserve.names import near
from llmserve.repository.repository import Repository
from llmserve.server.keep.kept import CHECK_INTERVAL, Kept
from llmserve.server.keep.reload import Reloader
from llmserve.server.keep.work import Work
from llmserve.server.server import Server

_UNLOAD_BEGINS = 60.0
"""Seconds after which a Triton that loads nothing and has not unloaded a model is stuck."""
_FORMER_NEEDED = 60.0
"""Seconds after which an old process, which a new one has replaced, answers nothing any more."""


class Orders:
    """Carries out one order at a time, beside the checks that go on meanwhile."""

    def __init__(self, kept: Kept, reloader: Reloader) -> None:
        self._kept = kept
        self._reloader = reloader

    async def reload(self, name: str) -> None:
        """Load or reload a model; the old one answers until the new one is loaded."""
        kept = self._kept
        repository = await self.check(name)
        if not kept.server.renewable:
            raise ServerError("this Triton cannot reload a model", hint="stop and start it")
        self._require_triton()
        parts = (*repository.parts_of(name), name)
        own = kept.own_parts(name)
        former = [part for part in own if part in kept.models and part not in parts]
        old, processes = kept.server, {*kept.stubs.of(name)}
        for part in parts:
            if part not in kept.models:
                kept.models[part] = kept.watched(part, State.LOADING)
        kept.models[name].parts, kept.models[name].former = parts[:-1], tuple(former)
        if kept.models[name].alive:
            # Its clients did not ask for that.
            kept.notify(f"{name}: is loaded again, as a user asks")
        loads_before = {part: kept.log.loads[part] for part in parts}
        for part in parts:
            kept.models[part].load_requested(time.monotonic())
        self._reloader.reload(kept.models[name])
        while not all(kept.log.loads[part] > before for part, before in loads_before.items()):
            await asyncio.sleep(CHECK_INTERVAL)
            self._refuse_failed(parts)
        if former:
            await self._drop_former(old, name, former, processes)

    async def _drop_former(
        self, server: Server, name: str, parts: Sequence[str], processes: Collection[int]
    ) -> None:
        """Unload parts that a model does not have any more, once its old processes have ended."""
        kept, began = self._kept, time.monotonic()
        kept.models[name].former = ()
        for part in parts:
            # A Triton that is restarted meanwhile does not load them.
            kept.models.pop(part, None)
        while kept.server is server and time.monotonic() - began < _FORMER_NEEDED:
            if not kept.triton.alive or {*processes}.isdisjoint(kept.stubs.of(name)):
                break
            await asyncio.sleep(CHECK_INTERVAL)
        await self._drop(server, parts[0], parts)

    async def check(self, name: str) -> Repository:
        """Return the repository; refuse a model that is not there or cannot be read."""
        # Read again: the model may be new, or built anew.
        repository = Repository.open(self._kept.settings.repository)
        if name not in repository.models:
            hint = near(name, repository.models)
            raise ServerError(f"no model {name!r} in {repository.path}", hint=hint)
        await self._check_files(repository, name)
        return repository

    async def _check_files(self, repository: Repository, name: str) -> None:
        """Refuse a model whose configuration cannot be read (workarounds.UNREADABLE).

        Triton would be restarted for nothing, which would also interrupt the other models.
        """
        from llmserve.repository.check import check_repository

        here = self._kept.settings.runtime == "embedded"
        check = partial(check_repository, models=[name], quick=True, served_here=here)
        for problem in await asyncio.to_thread(check, repository):
            if problem.fatal:
                raise ServerError(str(problem))

    def _refuse_failed(self, parts: Iterable[str]) -> None:
        kept = self._kept
        for part in parts:
            if why := kept.log.failures.get(part):
                if kept.models[part].alive:
                    self._reloader.give_up(kept.models[part])
                raise ServerError(
                    f"model {part!r} failed to load: {why}",
                    hint="its previous version, if any, keeps running",
                )
            if kept.models[part].state is State.FAILED:
                raise ServerError(f"model {part!r}: {kept.models[part].why}")
        if not kept.triton.alive or kept.stopping:
            raise _ended()

    async def unload(self, name: str) -> None:
        """Unload a model and its parts; it finishes its requests in flight."""
        kept = self._kept
        if name not in kept.models:
            raise ServerError(f"no model {name!r} is served", hint=near(name, kept.models))
        for owner in kept.models.values():
            if name in owner.parts:
                raise ServerError(f"{name} is a part of {owner.name}", hint=f"unload {owner.name}")
        if not kept.server.renewable:
            raise ServerError("this Triton cannot unload a model", hint="stop it")
        self._require_triton()
        # The model before its parts.
        names = (name, *kept.own_parts(name))
        server = kept.server
        await self.wait_until_loaded(names)
        if kept.server is not server:
            # The next Triton loads the model: it was chosen before this could drop it.
            raise _restarting()
        self._require_triton()
        for each in names:
            # Forgotten before its process ends.
            kept.models.pop(each, None)
        kept.emptied = all(model.state is State.FAILED for model in kept.models.values())
        await self.drop(server, names, Work(kept, names))

    async def drop(self, server: Server, names: Sequence[str], work: Work) -> None:
        """Have Triton unload a model and then its parts, and return when they are gone.

        One that calls its parts itself may do so until it has answered its last request.
        """
        name, left = names[0], names
        if len(names) > 1 and self._kept.stubs.of(name):
            await self._drop(server, name, names[:1])
            await self.wait_until_ended(names[:1], work)
            left = names[1:]
        await self._drop(server, name, left)
        self._kept.notify(f"{name}: unloaded")

    async def _drop(self, server: Server, name: str, names: Sequence[str]) -> None:
        # Another Triton was started without them.
        if self._kept.server is server:
            for each in names:
                server.drop(each)
        await self._wait_until_gone(name, names)

    async def wait_until_ended(self, names: Sequence[str], work: Work) -> None:
        """Wait for the processes of unloaded models (workarounds.NEVER_ENDED)."""
        kept = self._kept
        idle_since, done = time.monotonic(), await work.done()
        # The end of a Triton is that of its processes, whose numbers others may have then.
        while kept.triton.alive and not kept.stopping and any(map(kept.stubs.of, names)):
            now, before, done = time.monotonic(), done, await work.done()
            if done != before:
                idle_since = now
            elif now - idle_since > work.lingers:
                kept.notify(f"{names[0]}: its processes are ended, which did not end by themselves")
                for name in names:
                    kept.stubs.kill(name)
            await asyncio.sleep(CHECK_INTERVAL / 5)

    async def wait_until_loaded(self, names: Iterable[str]) -> None:
        """Keep the files of processes that start (workarounds.FILES_GONE)."""
        kept = self._kept
        while kept.triton.alive and not {*names}.isdisjoint(kept.log.progress(0).loading):
            await asyncio.sleep(CHECK_INTERVAL)

    async def _wait_until_gone(self, name: str, names: Iterable[str]) -> None:
        """Return when Triton does not send requests to models any more."""
        kept = self._kept
        server, since = kept.server, time.monotonic()
        while not kept.stopping and not kept.given_up:
            if kept.server is not server:
                # It was started without the model.
                server, since = kept.server, time.monotonic()
            if kept.log.progress(0).loading:
                # Triton begins with nothing else before that.
                since = time.monotonic()
            if kept.triton.alive and kept.log.stuck:
                # See workarounds.STUCK_STUB.
                kept.lost(time.monotonic(), f"Triton waits for {name}", fault=False)
            elif kept.triton.alive and not await asyncio.to_thread(self._may_answer, names):
                return
            elif self._does_not_unload(since):
                kept.lost(time.monotonic(), f"Triton does not unload {name}")
            await asyncio.sleep(CHECK_INTERVAL)
        raise _ended()

    def _require_triton(self) -> None:
        if not self._kept.triton.alive:
            raise _restarting()

    def _does_not_unload(self, since: float) -> bool:
        return self._kept.triton.alive and time.monotonic() - since > _UNLOAD_BEGINS

    def _may_answer(self, names: Iterable[str]) -> bool:
        """Return whether any model is ready; one of a Triton that hangs may answer later."""
        try:
            return any(self._kept.server.takes_requests(name) for name in names)
        except ServerError:
            return True


def _restarting() -> ServerError:
    return ServerError("Triton is restarting", hint="wait until it is ready")


def _ended() -> ServerError:
    return ServerError("Triton has ended", hint="see `llmserve status`")
