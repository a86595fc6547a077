"""Loads models again that have died, while Triton keeps serving the others."""

from __future__ import annotations

import asyncio
from functools import partial

from llmserve.contract.report import State
from llmserve.errors import ServerError, UsageError
from llmserve.server.keep.kept import Kept, KeptModel


class Reloader:
    def __init__(self, kept: Kept) -> None:
        self._kept = kept
        self._given_up_tasks: set[asyncio.Task[None]] = set()

    def check(self, now: float) -> None:
        """Reload the dead models whose wait is over."""
        kept = self._kept
        for model in kept.models.values():
            if not kept.triton.alive:
                return
            if model.state is State.RESTARTING and now >= model.restart_at:
                model.loading(now)
                try:
                    self.reload(model)
                except UsageError:
                    kept.lost(now, f"{model.name} is restarted with all others", fault=False)
                except (OSError, ServerError) as error:
                    model.failed(now, f"it cannot be read: {error}")

    def reload(self, model: KeptModel) -> None:
        """Have Triton load a model and its parts again; the old ones answer meanwhile."""
        kept = self._kept
        # Log lines about the previous model no longer count.
        kept.log.read()
        for part in (*model.parts, model.name):
            kept.log.failures.pop(part, None)
            kept.log.unhealthy.discard(part)
            kept.log.raised.pop(part, None)
            if part in kept.models:
                kept.models[part].loads = kept.log.loads[part]
                kept.models[part].died_at = kept.models[part].raised_at = None
            kept.server.renew(part)

    def give_up(self, model: KeptModel) -> None:
        """Have Triton try no more to load a model, until :meth:`reload` asks for it.

        See workarounds.TRIED_AGAIN.
        """
        give_up = partial(self._kept.server.give_up, model.name, loaded_before=model.served)
        task = asyncio.create_task(asyncio.to_thread(give_up))
        self._given_up_tasks.add(task)
        task.add_done_callback(self._given_up_tasks.discard)

    async def wait_until_given_up(self) -> None:
        """Wait until Triton tries no more to load what was given up."""
        await asyncio.gather(*self._given_up_tasks)
