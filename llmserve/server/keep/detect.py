"""Detects what has ended or failed, from processes and from Triton's log."""

from __future__ import annotations

import time
from collections.abc import Callable

from llmserve.contract.report import State
from llmserve.server.find.launch import POLL
from llmserve.server.keep.kept import Kept, KeptModel
from llmserve.server.keep.states import Watch
from llmserve.server.run.activity import Stops
from llmserve.server.run.machine import resources
from llmserve.server.workarounds import DEATH_REPORTED

_RELOAD_BEGINS = 15.0 + POLL
"""Seconds after which a Triton that has not begun to reload a model is stuck."""
_ENDS_WITHIN = 3.0
"""Seconds within which the process of a model that raised an error ends by itself."""
_LAST_WORDS = 2.0
"""Seconds before an end in which a line of the log may explain it."""


class Detector:
    """Moves the states of a Triton and its models to what has happened.

    ``give_up`` is called with a model that has failed to load, which Triton would try again.
    """

    def __init__(self, kept: Kept, give_up: Callable[[KeptModel], None]) -> None:
        self._kept = kept
        self._give_up = give_up
        self._stops = Stops()
        self._loading_at = 0.0
        """When a model was last being loaded; others begin after it."""

    def check(self, now: float) -> None:
        kept = self._kept
        ended = kept.server.wait(0) is not None
        kept.log.read()
        if ended:
            kept.lost(now, f"Triton ended: {kept.server.process.why_it_ended()}")
            self._quote_log(kept.triton)
        elif kept.triton.alive and self._is_stopped(now):
            kept.lost(now, "Triton is stopped, by a signal")
        elif kept.triton.alive:
            self._check_models(now)

    def _is_stopped(self, now: float) -> bool:
        """Return whether Triton hangs, since a signal has stopped it.

        Of a container, that is not known: the process here only shows what it prints.
        """
        kept = self._kept
        if kept.settings.runtime == "docker":
            return False
        return bool(self._stops.check([kept.server.pid], now))

    def _check_models(self, now: float) -> None:
        kept = self._kept
        loading = kept.log.progress(0).loading
        if loading:
            self._loading_at = now
        for name, how in kept.stubs.poll(loading).items():
            if name in kept.models:
                kept.models[name].died_at, kept.models[name].how = now, how
        kept.stubs.kill_given_up(loading, now)
        # The process that loads may be another one than that which answers meanwhile.
        stopped = kept.stubs.stopped(now).difference(loading)
        for model in kept.models.values():
            if not kept.triton.alive:
                return
            if model.state is not State.UNLOADED:
                model.check_folder(kept.folder(model.name), now)
            if model.alive and model.died_at is not None:
                model.died(now, f"its process has died: {model.how}")
                self._quote_log(model)
                model.died_at = None
            elif model.alive and model.name in stopped:
                model.died(now, "its process is stopped, by a signal")
                # Triton never would end it, and clients wait for it.
                kept.stubs.kill(model.name)
            elif model.state is State.LOADING:
                self._check_loading(model, now)

    def _check_loading(self, model: KeptModel, now: float) -> None:
        kept = self._kept
        if kept.log.loads[model.name] > model.loads:
            model.died_at, model.served, model.cost_restart = None, True, False
            model.loaded(now)
            kept.emptied = False
        elif why := kept.log.failures.get(model.name):
            if model.served and model.name not in kept.log.hopeless:
                model.died(now, f"it failed to load: {why}")
            else:
                model.failed(now, f"it failed to load: {why}")
            self._give_up(model)
        elif model.name in kept.log.raised and not model.served:
            # Triton reports that when its process has ended, and loads nothing before.
            model.raised_at = model.raised_at or now
            if now - model.raised_at > _ENDS_WITHIN:
                kept.stubs.kill(model.name)
        elif model.died_at is not None and now - model.died_at > DEATH_REPORTED:
            # See workarounds.DIED_LOADING.
            model.died_at, why = None, f"its process died while it was loading: {model.how}"
            self._quote_log(model)
            kept.notify(f"{model.name}: meanwhile, {resources()}")
            if kept.settings.on_demand and not model.served:
                # Whoever asks for it has it tried again; the others still answer.
                model.failed(now, why)
                model.cost_restart = True
                kept.want_restart(now, f"Triton waits for {model.name}")
            else:
                model.died(now, why)
                kept.lost(now, f"Triton waits for {model.name}", fault=False)
        elif now - max(model.since, self._loading_at) > _RELOAD_BEGINS:
            if model.served:
                kept.lost(now, f"Triton does not load {model.name}")
            else:
                # A new model is not worth the cost of a restart for the others.
                model.failed(now, "Triton does not begin to load it")
                self._give_up(model)

    def _quote_log(self, ended: Watch) -> None:
        """Report the line of the log that explains what has just ended, if there is one.

        It is no part of the state: clients may see that, and the line may be about a request.
        """
        if words := self._kept.log.last_words(time.monotonic() - _LAST_WORDS):
            self._kept.notify(f"{ended.name}: the log says: {words}")
