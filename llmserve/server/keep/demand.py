"""Which models a ``serve --on-demand`` loads next, and which of them make place for others.

Whoever sends requests to a model holds it meanwhile. A model that has to go gets no new holds and
is unloaded when the last hold ends, so that it answers nothing any more (see
workarounds.UNLOADED_AT_WORK). Of the models that nobody holds, the least recently used goes first.
Who waits is served by class, the lower number first, and within a class in the order of arrival.
Once a model has been waited for for :data:`LATE_AFTER` seconds, nobody overtakes it any more.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

from llmserve.contract.classes import LATE_AFTER
from llmserve.contract.failures import back_off
from llmserve.contract.report import OnDemandReport
from llmserve.errors import LLMServeError, ModelNotReadyError, NotLoadedError
from llmserve.names import near
from llmserve.server.keep.actions import Action, Fulfil, Grant, Inform, Refuse, Tell
from llmserve.server.keep.desired import Desired, Hold, OnDemand, Order

_FIRST_BACK_OFF, _MAX_BACK_OFF = 5.0, 300.0
"""Seconds until a model that failed to load is tried again: twice as many after each failure."""
_FIRST_AFTER_RESTART, _MAX_AFTER_RESTART = 60.0, 3600.0
"""The same for one of which Triton has to be restarted, which all other models pay for."""
_MB = 1e6


class Models(Protocol):
    """What is known of the models, in all replicas together."""

    @property
    def is_paused(self) -> bool:
        """Whether nothing is to be asked of any model for a while."""

    @property
    def has_ended(self) -> bool:
        """Whether nothing is left that could load a model."""

    def takes_memory(self, name: str) -> bool:
        """Return whether a model takes memory, at work or not."""

    def is_changing(self, name: str) -> bool:
        """Return whether a model is still being loaded or unloaded."""

    def refused(self, name: str) -> str:
        """Return why a model was not loaded when that was last asked for, "" if it was."""

    def why_it_failed(self, name: str) -> str:
        """Return why a model cannot answer until it is loaded again, "" if it can."""

    def size(self, name: str) -> float:
        """Return the bytes that a model takes, or is expected to take."""

    def cost_restart(self, name: str) -> bool:
        """Return whether Triton has to be restarted, or was, since a model was loaded in vain."""


@dataclass(frozen=True)
class LoadEverywhere:
    """A model is to be loaded in all replicas."""

    model: str


@dataclass(frozen=True)
class UnloadEverywhere:
    """A model is to be unloaded in all replicas that have it."""

    model: str


Step = Action | LoadEverywhere | UnloadEverywhere


@dataclass(eq=False)
class _Model:
    """A model on offer."""

    name: str
    pinned: bool
    used_at: float
    holds: set[Hold] = field(default_factory=set)
    waiting: list[Hold | Order] = field(default_factory=list)
    since: float | None = None
    """Since when it is waited for."""
    unload_orders: list[Order] = field(default_factory=list)
    doing: Literal["", "load", "unload", "undo"] = ""
    """What happens to it; what is left of a load that has failed is undone."""
    began: float = 0.0
    leaving: bool = False
    """Whether it is to be unloaded, whoever waits."""
    victim: bool = False
    """Whether it has to make place for one that is waited for."""
    failures: int = 0
    retry_at: float = 0.0
    why: str = ""
    seconds: float | None = None
    """How long its last load took."""
    keep: float | None = None
    """For how long it is kept without any use, if whoever has used it has said so."""

    @property
    def going(self) -> bool:
        return self.leaving or self.victim or self.doing == "undo"


class Demand:
    """What is remembered of the models on offer, and what is decided about them."""

    def __init__(self, names: Iterable[str], settings: OnDemand, now: float = 0.0) -> None:
        self._settings = settings
        self._models: dict[str, _Model] = {}
        self._queue: list[_Model] = []
        """The models that are waited for, in the order in which they are loaded."""
        self._known: set[Hold | Order] = set()
        """Who has been heard, and has not gone."""
        self._steps: list[Step] = []
        for name in names:
            self._offer(name, now)

    @property
    def offered(self) -> list[str]:
        return list(self._models)

    @property
    def is_in_use(self) -> bool:
        """Whether anybody holds a model."""
        return any(model.holds for model in self._models.values())

    def offer_no_more(self, name: str, models: Models) -> bool:
        """Offer a model no more that is not loaded, since it is gone; return whether it is."""
        model = self._models[name]
        if model.doing or model.holds or models.takes_memory(name):
            return False
        self._refuse(model, ModelNotReadyError(f"there is no model {name!r} any more"))
        del self._models[name]
        return True

    def decide(self, desired: Desired, models: Models, now: float) -> list[Step]:
        """Return what is to be done for who holds models, waits for them or orders something."""
        self._notice_ends(models, now)
        self._hear(desired, models, now)
        self._let_idle_go(models, now)
        self._shrink(models)
        self._plan(models, now)
        steps, self._steps = self._steps, []
        return steps

    def report(self, name: str, models: Models, now: float) -> OnDemandReport | None:
        """Return what ``llmserve status`` shows of a model on offer, besides its state."""
        if (model := self._models.get(name)) is None:
            return None
        left = model.retry_at - now
        return OnDemandReport(
            loaded=models.takes_memory(name) and not model.doing,
            size=int(models.size(name)),
            pinned=model.pinned,
            waited_for=bool(model.waiting),
            load_seconds=None if model.seconds is None else round(model.seconds, 3),
            retry_after=int(left) + 1 if left > 0 else None,
        )

    # Who comes and goes

    def _hear(self, desired: Desired, models: Models, now: float) -> None:
        wanted: dict[Hold | Order, None] = dict.fromkeys([*desired.holds, *desired.orders])
        for gone in self._known - wanted.keys():
            self._forget(gone, now)
        for each in wanted:
            if each in self._known:
                continue
            self._known.add(each)
            if isinstance(each, Order) and each.model not in self._models and each.do != "unload":
                # It may be new.
                self._offer(each.model, now)
            if (model := self._models.get(each.model)) is None:
                hint = near(each.model, self._models)
                words = f"there is no model {each.model[:200]!r}"
                self._steps.append(Refuse(each, ModelNotReadyError(words, hint=hint)))
            elif isinstance(each, Hold):
                self._hear_hold(model, each, models, now)
            else:
                self._hear_order(model, each, models)

    def _hear_hold(self, model: _Model, hold: Hold, models: Models, now: float) -> None:
        if self._takes_holds(model, models):
            self._grant(model, [hold], now)
        elif not hold.load:
            self._steps.append(Refuse(hold, NotLoadedError(f"{model.name!r} is not loaded")))
        elif (left := model.retry_at - now) > 0 and not model.doing:
            self._steps.append(Refuse(hold, _failed(model, left)))
        elif why := self._never_fits(model, models):
            self._steps.append(Refuse(hold, _too_large(model, why)))
        else:
            self._wait(model, hold)

    def _hear_order(self, model: _Model, order: Order, models: Models) -> None:
        # Whatever has failed before: a user may have mended it.
        model.retry_at = 0.0
        if order.do == "load":
            self._wait(model, order)
            return
        model.unload_orders.append(order)
        if not (model.doing or models.takes_memory(model.name)):
            self._fulfil_unload(model)
        elif model.doing != "unload":
            model.leaving = True

    def _wait(self, model: _Model, who: Hold | Order) -> None:
        model.waiting.append(who)
        if model not in self._queue:
            self._queue.append(model)

    def _forget(self, gone: Hold | Order, now: float) -> None:
        self._known.discard(gone)
        if (model := self._models.get(gone.model)) is None:
            return  # It is not offered any more.
        if isinstance(gone, Hold) and gone in model.holds:
            model.holds.remove(gone)
            model.used_at = now
            if gone.keep is not None:
                model.keep = gone.keep if gone.keep >= 0 else math.inf
        elif gone in model.waiting:
            model.waiting.remove(gone)
        elif gone in model.unload_orders:
            model.unload_orders.remove(gone)

    def _offer(self, name: str, now: float) -> None:
        self._models[name] = _Model(name, name in self._settings.pinned, now)

    # What has come of it

    def _notice_ends(self, models: Models, now: float) -> None:
        for model in self._models.values():
            if model.doing:
                if not models.is_changing(model.name):
                    self._notice_end(model, models, now)
            elif not models.takes_memory(model.name):
                model.leaving = False
                self._fulfil_unload(model)
                why = models.why_it_failed(model.name)
                if why and not model.failures:
                    # It was loaded, and has died too often since.
                    self._record_failure(model, why, models, now)
            elif why := models.why_it_failed(model.name):
                # The same, and its parts are still loaded.
                model.doing, model.why = "undo", why
                self._steps.append(UnloadEverywhere(model.name))

    def _notice_end(self, model: _Model, models: Models, now: float) -> None:
        doing, model.doing = model.doing, ""
        if doing == "load" and not (why := models.refused(model.name)):
            model.failures, model.retry_at = 0, 0.0
            model.seconds = now - model.began
            size = models.size(model.name) / _MB
            self._tell(f"{model.name}: loaded in {model.seconds:.1f} s, {size:.0f} MB")
            if not models.is_paused:
                # Before anything else, such as another model that waits for its place.
                self._grant(model, model.waiting, now)
        elif doing == "load" and models.takes_memory(model.name):
            # Everywhere or nowhere.
            model.doing, model.why = "undo", why
            self._steps.append(UnloadEverywhere(model.name))
        elif doing == "unload":
            model.leaving, model.keep = False, None
            self._fulfil_unload(model)
        else:
            why = model.why if doing == "undo" else models.refused(model.name)
            self._record_failure(model, why, models, now)

    def _fulfil_unload(self, model: _Model) -> None:
        orders, model.unload_orders = model.unload_orders, []
        for order in orders:
            if order.do == "reload":
                self._wait(model, order)
            else:
                self._steps.append(Fulfil(order))

    def _let_idle_go(self, models: Models, now: float) -> None:
        """Let models go that nobody has used for as long as they are kept."""
        for model in self._models.values():
            kept = self._settings.unload_after if model.keep is None else model.keep
            is_up = not model.doing and models.takes_memory(model.name)
            if kept is None or not (is_up and self._is_idle(model)):
                continue
            if now - model.used_at >= kept and not models.why_it_failed(model.name):
                model.leaving = True

    def _is_idle(self, model: _Model) -> bool:
        return not (model.pinned or model.holds or model.waiting)

    def _shrink(self, models: Models) -> None:
        """Let models go that have grown too large together."""
        taking = self._taking(models)
        staying = [model for model in taking if not (model.leaving or model.doing == "unload")]
        for model in self._by_use(staying):
            sizes = [models.size(each.name) for each in staying]
            if self._settings.memory is None or sum(sizes) <= self._settings.memory:
                return
            model.leaving = True
            staying.remove(model)
            self._tell(
                f"{model.name}: has to go, since {sum(sizes) / _MB:.0f} MB are loaded "
                f"and {self._settings.memory / _MB:.0f} may be"
            )

    # What is to be loaded and unloaded

    def _plan(self, models: Models, now: float) -> None:
        for model in self._models.values():
            model.victim = False
            if not model.waiting:
                model.since = None
            elif model.since is None:
                model.since = now
        waited_for = [model for model in self._queue if model.waiting]
        # It is stable: those of a class stay in the order of their arrival.
        self._queue = sorted(waited_for, key=lambda model: _turn(model, now))
        before: list[_Model] = []
        for model in list(self._queue):
            if self._takes_holds(model, models):
                self._grant(model, model.waiting, now)
                self._queue.remove(model)
            elif models.has_ended:
                self._refuse(model, NotLoadedError("Triton has ended"))
                self._queue.remove(model)
            elif models.is_paused or model.doing or models.takes_memory(model.name):
                pass
            elif why := self._never_fits(model, models):
                self._refuse(model, _too_large(model, why))
                self._queue.remove(model)
            elif not self._begin(model, before, models, now):
                # Whoever comes later leaves its place: a large model would never find one.
                before.append(model)
        for model in self._models.values():
            if model.going and not (model.holds or model.doing):
                if models.takes_memory(model.name):
                    self._start(model, "unload", UnloadEverywhere(model.name), now)
                else:
                    model.leaving = False
            for hold in model.holds:
                going = model.going or models.is_paused
                self._steps.append(Inform(hold, hold.place, going=going))
        for place, model in enumerate(self._queue, start=1):
            for each in model.waiting:
                if isinstance(each, Hold):
                    self._steps.append(Inform(each, place, going=each.going))

    def _begin(self, model: _Model, before: Sequence[_Model], models: Models, now: float) -> bool:
        """Begin to load a model if there is place for it; otherwise choose what has to go.

        Those ``before`` it are to be loaded as well. Only the first may stop others at work.
        """
        taking = self._taking(models)
        staying = [each for each in taking if not (each.going or each.doing == "unload")]
        victims: list[_Model] = []
        for each in self._by_use(staying):
            if self._fits([*staying, *before, model], models) or (before and each.holds):
                break
            victims.append(each)
            staying.remove(each)
        if not self._fits([*staying, *before, model], models):
            return False
        for each in victims:
            each.victim = True
        if not self._fits([*taking, *before, model], models):
            return False
        self._start(model, "load", LoadEverywhere(model.name), now)
        return True

    def _start(
        self, model: _Model, doing: Literal["load", "unload"], step: Step, now: float
    ) -> None:
        model.doing, model.began = doing, now
        self._steps.append(step)

    def _by_use(self, models: Iterable[_Model]) -> list[_Model]:
        """Return the models that may go: those that nobody uses first, and of them the oldest."""
        candidates = [model for model in models if not (model.pinned or model.doing)]
        return sorted(candidates, key=lambda model: (bool(model.holds), model.used_at))

    def _taking(self, models: Models) -> list[_Model]:
        """Return the models that take memory, or are about to."""
        return [m for m in self._models.values() if m.doing or models.takes_memory(m.name)]

    def _fits(self, these: Iterable[_Model], models: Models) -> bool:
        return self._settings.allow(models.size(model.name) for model in these)

    def _never_fits(self, model: _Model, models: Models) -> str:
        """Return why a model can never be loaded, "" if it can."""
        others = [each for each in self._models.values() if each.pinned and each is not model]
        if self._fits([*others, model], models):
            return ""
        if self._fits([model], models):
            names = ", ".join(other.name for other in others)
            return f"the pinned models ({names}) leave no place for it"
        needed, memory = models.size(model.name) / _MB, (self._settings.memory or 0) / _MB
        return f"it needs {needed:.0f} MB of memory, and {memory:.0f} MB are allowed"

    def _takes_holds(self, model: _Model, models: Models) -> bool:
        is_there = models.takes_memory(model.name) and not model.doing
        return is_there and not (model.going or models.is_paused)

    # What is said to whom

    def _grant(self, model: _Model, whom: Iterable[Hold | Order], now: float) -> None:
        model.used_at = now
        for each in list(whom):
            if isinstance(each, Order):
                self._steps.append(Fulfil(each))
            else:
                model.holds.add(each)
                self._steps.append(Grant(each))
        model.waiting = [each for each in model.waiting if each not in {*whom}]

    def _refuse(self, model: _Model, error: LLMServeError) -> None:
        self._steps += [Refuse(each, error) for each in model.waiting]
        model.waiting = []

    def _record_failure(self, model: _Model, why: str, models: Models, now: float) -> None:
        first, longest = _FIRST_BACK_OFF, _MAX_BACK_OFF
        if models.cost_restart(model.name):
            first, longest = _FIRST_AFTER_RESTART, _MAX_AFTER_RESTART
        wait = back_off(model.failures, first, longest)
        model.failures, model.why = model.failures + 1, why
        model.retry_at = now + wait
        self._tell(f"{model.name}: is tried again on request, after {wait:g} s")
        self._refuse(model, _failed(model, wait))

    def _tell(self, line: str) -> None:
        self._steps.append(Tell(line))


def _turn(model: _Model, now: float) -> tuple[bool, float]:
    """Return what models that are waited for are sorted by."""
    if model.since is not None and now - model.since >= LATE_AFTER:
        return False, model.since
    # Who orders something is of the usual class.
    of = [each.priority if isinstance(each, Hold) else 0 for each in model.waiting]
    return True, min(of, default=0)


def _failed(model: _Model, left: float) -> NotLoadedError:
    seconds = int(left) + 1
    details: Mapping[str, int] = {"retry_after": seconds}
    return NotLoadedError(
        f"{model.name!r} could not be loaded ({model.why}), and is tried again in {seconds} s",
        details=details,
    )


def _too_large(model: _Model, why: str) -> NotLoadedError:
    return NotLoadedError(f"{model.name!r} is not loaded: {why}")
