"""Models that are loaded when a request needs them: which is next, and which makes place for it.

Whoever sends requests to a model holds it meanwhile. A model that has to go gets no new holds and
is unloaded when the last hold ends, so that it answers nothing any more (see
workarounds.UNLOADED_AT_WORK). Of the models that nobody holds, the least recently used goes first.
Who waits is served in the order of arrival, and nobody overtakes.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from llmserve.contract.failures import back_off
from llmserve.contract.report import OnDemandReport
from llmserve.errors import LLMServeError, ModelNotReadyError, NotLoadedError, reason
from llmserve.names import near

_FIRST_BACK_OFF, _MAX_BACK_OFF = 5.0, 300.0
"""Seconds until a model that failed to load is tried again: twice as many after each failure."""
_FIRST_AFTER_RESTART, _MAX_AFTER_RESTART = 60.0, 3600.0
"""The same for one of which Triton has to be restarted, which all other models pay for."""
_MB = 1e6


@dataclass(frozen=True)
class OnDemand:
    """How many models may be loaded at once, and for how long.

    ``memory`` is in bytes. A model that nobody uses for ``unload_after`` seconds is unloaded. The
    ``pinned`` ones are loaded from the start, and never make place for others.

    >>> OnDemand(max_loaded=2).pinned
    ()
    """

    max_loaded: int | None = None
    memory: float | None = None
    unload_after: float | None = None
    pinned: tuple[str, ...] = ()

    def allow(self, sizes: Iterable[float]) -> bool:
        """Return whether models of these sizes may be loaded at once."""
        sizes = list(sizes)
        enough = self.memory is None or sum(sizes) <= self.memory
        return enough and (self.max_loaded is None or len(sizes) <= self.max_loaded)


class Loader(Protocol):
    """Loads and unloads models, and knows what they are."""

    def is_loaded(self, name: str) -> bool:
        """Return whether a model takes memory, at work or not."""

    def why_it_failed(self, name: str) -> str:
        """Return why a model cannot answer until it is loaded again, "" if it can."""

    def size(self, name: str) -> float:
        """Return the bytes that a model takes, or is expected to take."""

    def cost_restart(self, name: str) -> bool:
        """Return whether Triton has to be restarted, or was, since a model was loaded in vain."""

    def is_paused(self) -> bool:
        """Return whether nothing is to be asked of any model for a while."""

    async def load(self, name: str) -> None: ...
    async def unload(self, name: str) -> None: ...


@dataclass(eq=False)
class Hold:
    """A use of a model, or the wait for it. ``granted`` raises why it cannot be loaded."""

    model: str
    granted: asyncio.Future[None]
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when ``report`` returns something else."""
    place: int = 0
    """Which of the models that are still to be loaded it waits for, from 1."""
    going: bool = False
    """Whether the model has to go once it is not used any more."""

    def report(self) -> dict[str, Any]:
        """Return the state for who holds it, in another process."""
        if not self.granted.done():
            return {"place": self.place}
        if isinstance(error := self.granted.exception(), LLMServeError):
            code = getattr(error, "code", NotLoadedError.code)
            details = getattr(error, "details", {})
            return {"failed": error.problem, "hint": error.hint, "code": code, "details": details}
        return {"held": True, "going": self.going}

    def change(self, *, place: int | None = None, going: bool | None = None) -> None:
        new = (self.place if place is None else place, self.going if going is None else going)
        if new != (self.place, self.going):
            self.place, self.going = new
            self.changed.set()

    def grant(self) -> None:
        if not self.granted.done():
            self.granted.set_result(None)
            self.changed.set()

    def refuse(self, error: LLMServeError) -> None:
        if not self.granted.done():
            self.granted.set_exception(error)
            # Nobody may ask for it any more.
            self.granted.exception()
            self.changed.set()


@dataclass(eq=False)
class _Model:
    """A model on offer."""

    name: str
    pinned: bool
    used_at: float
    holds: set[Hold] = field(default_factory=set)
    waiting: list[Hold] = field(default_factory=list)
    task: asyncio.Task[None] | None = None
    """What loads or unloads it at the moment."""
    unloading: bool = False
    leaving: bool = False
    """Whether it is to be unloaded, whoever waits."""
    victim: bool = False
    """Whether it has to make place for one that is waited for."""
    unloads: int = 0
    failures: int = 0
    retry_at: float = 0.0
    why: str = ""
    seconds: float | None = None
    """How long its last load took."""

    @property
    def going(self) -> bool:
        return self.leaving or self.victim


class Demand:
    """Decides what to load and to unload; all of it runs on one event loop.

    Whoever has one calls :meth:`check` regularly, and :meth:`settle` at the end.
    """

    def __init__(
        self,
        names: Iterable[str],
        loader: Loader,
        settings: OnDemand,
        notify: Callable[[str], None] = lambda _: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._loader = loader
        self._settings = settings
        self._notify = notify
        self._clock = clock
        self._models: dict[str, _Model] = {}
        self._queue: list[_Model] = []
        """The models that are waited for, in the order in which they are loaded."""
        self._moved = asyncio.Event()
        """Set, and replaced, whenever something may have changed."""
        self._stopped = False
        for name in names:
            self.offer(name)

    def offer(self, name: str) -> None:
        """Offer a model, which may be new."""
        if name not in self._models:
            pinned = name in self._settings.pinned
            self._models[name] = _Model(name, pinned, self._clock())

    def withdraw(self, name: str) -> None:
        """Offer a model no more that is not loaded, since it is gone."""
        model = self._models.get(name)
        if model and not (model.task or model.holds or self._loader.is_loaded(name)):
            error = ModelNotReadyError(f"there is no model {name!r} any more")
            self._refuse_waiting(model, error)
            del self._models[name]
            self._plan()

    @property
    def offered(self) -> list[str]:
        return list(self._models)

    # Holds

    def hold(self, name: str, *, load: bool = True) -> Hold:
        """Ask for a model; it stays until :meth:`release`. Without ``load``, only if it is loaded.

        Raises :class:`ModelNotReadyError` if it is not on offer.
        """
        hold = Hold(name, asyncio.get_running_loop().create_future())
        model = self._model(name)
        if self._stopped:
            hold.refuse(NotLoadedError("the server is stopping"))
        elif self._takes_holds(model):
            self._grant(model, [hold])
        elif not load:
            hold.refuse(NotLoadedError(f"{name!r} is not loaded"))
        elif (left := model.retry_at - self._clock()) > 0 and model.task is None:
            hold.refuse(_failed(model, left))
        elif why := self._never_fits(model):
            hold.refuse(_too_large(model, why))
        else:
            model.waiting.append(hold)
            if model not in self._queue:
                self._queue.append(model)
            self._plan()
        return hold

    def release(self, hold: Hold) -> None:
        """End a hold, or the wait for it."""
        model = self._models.get(hold.model)
        if model is None:
            pass  # It was withdrawn meanwhile.
        elif hold in model.holds:
            model.holds.remove(hold)
            model.used_at = self._clock()
        elif hold in model.waiting:
            model.waiting.remove(hold)
        if not hold.granted.done():
            hold.granted.cancel()
        self._plan()

    def is_in_use(self) -> bool:
        """Return whether anybody holds a model."""
        return any(model.holds for model in self._models.values())

    # Orders of a user

    async def load(self, name: str) -> None:
        """Load a model now, whatever has failed before, and return when it is loaded."""
        model = self._model(name)
        model.retry_at = 0.0
        hold = self.hold(name)
        try:
            await hold.granted
        finally:
            self.release(hold)

    async def unload(self, name: str) -> None:
        """Unload a model once nobody uses it; who asks for it meanwhile has it loaded again."""
        model = self._model(name)
        while model.task is not None and not model.unloading:
            await self._moved.wait()
        before = model.unloads
        if self._loader.is_loaded(name):
            model.leaving = True
            self._plan()
        while model.unloads == before and (model.leaving or model.unloading):
            await self._moved.wait()

    # Time

    def check(self) -> None:
        """Notice what has failed, what is not used any more, and what takes too much memory."""
        now, idle = self._clock(), self._settings.unload_after
        for model in self._models.values():
            if not self._loader.is_loaded(model.name) and model.task is None:
                model.leaving = False
                why = self._loader.why_it_failed(model.name)
                if why and not model.failures:
                    # It was loaded, and has died too often since.
                    self._record_failure(model, why)
            elif idle is not None and self._is_idle(model) and now - model.used_at >= idle:
                model.leaving = True
        self._shrink()
        self._plan()

    def _is_idle(self, model: _Model) -> bool:
        return not (model.pinned or model.holds or model.waiting or model.task)

    def _shrink(self) -> None:
        """Let models go that have grown too large together."""
        staying = [model for model in self._taking() if not (model.leaving or model.unloading)]
        for model in self._by_use(staying):
            sizes = [self._loader.size(each.name) for each in staying]
            if self._settings.memory is None or sum(sizes) <= self._settings.memory:
                return
            model.leaving = True
            staying.remove(model)
            self._notify(
                f"{model.name}: has to go, since {sum(sizes) / _MB:.0f} MB are loaded "
                f"and {self._settings.memory / _MB:.0f} may be"
            )

    async def settle(self) -> None:
        """Refuse whoever waits, and stop loading."""
        self._stopped = True
        for model in self._models.values():
            self._refuse_waiting(model, NotLoadedError("the server is stopping"))
        tasks = [model.task for model in self._models.values() if model.task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def report(self, name: str) -> OnDemandReport | None:
        """Return what ``llmserve status`` shows of a model on offer, besides its state."""
        if (model := self._models.get(name)) is None:
            return None
        left = model.retry_at - self._clock()
        return OnDemandReport(
            loaded=self._loader.is_loaded(name) and model.task is None,
            size=int(self._loader.size(name)),
            pinned=model.pinned,
            waited_for=bool(model.waiting),
            load_seconds=None if model.seconds is None else round(model.seconds, 3),
            retry_after=int(left) + 1 if left > 0 else None,
        )

    # Decisions

    def _plan(self) -> None:
        """Grant, load and unload what can be now."""
        self._moved.set()
        self._moved = asyncio.Event()
        if self._stopped:
            return
        self._queue = [model for model in self._queue if model.waiting]
        for model in self._models.values():
            model.victim = False
        before: list[_Model] = []
        paused = self._loader.is_paused()
        for model in list(self._queue):
            if self._takes_holds(model):
                self._grant(model, model.waiting)
                self._queue.remove(model)
            elif paused:
                pass
            elif model.task is None and not self._loader.is_loaded(model.name):
                if why := self._never_fits(model):
                    self._refuse_waiting(model, _too_large(model, why))
                    self._queue.remove(model)
                elif not self._begin(model, before):
                    # Whoever comes later leaves its place: a large model would never find one.
                    before.append(model)
        for model in self._models.values():
            if model.going and not model.holds and model.task is None:
                if self._loader.is_loaded(model.name):
                    self._start(model, self._unload(model), unloading=True)
                else:
                    model.leaving = False
            for hold in model.holds:
                hold.change(going=model.going or paused)
        for place, model in enumerate(self._queue, start=1):
            for hold in model.waiting:
                hold.change(place=place)

    def _begin(self, model: _Model, before: Sequence[_Model]) -> bool:
        """Begin to load a model if there is place for it; otherwise choose what has to go.

        Those ``before`` it are to be loaded as well. Only the first may stop others at work.
        """
        taking = self._taking()
        staying = [each for each in taking if not (each.going or each.unloading)]
        victims: list[_Model] = []
        for each in self._by_use(staying):
            if self._fits([*staying, *before, model]) or (before and each.holds):
                break
            victims.append(each)
            staying.remove(each)
        if not self._fits([*staying, *before, model]):
            return False
        for each in victims:
            each.victim = True
        if not self._fits([*taking, *before, model]):
            return False
        self._start(model, self._load(model))
        return True

    def _by_use(self, models: Iterable[_Model]) -> list[_Model]:
        """Return the models that may go: those that nobody uses first, and of them the oldest."""
        candidates = [model for model in models if not model.pinned and model.task is None]
        return sorted(candidates, key=lambda model: (bool(model.holds), model.used_at))

    def _taking(self) -> list[_Model]:
        """Return the models that take memory, or are about to."""
        models = self._models.values()
        return [m for m in models if m.task is not None or self._loader.is_loaded(m.name)]

    def _fits(self, models: Iterable[_Model]) -> bool:
        return self._settings.allow(self._loader.size(model.name) for model in models)

    def _never_fits(self, model: _Model) -> str:
        """Return why a model can never be loaded, "" if it can."""
        others = [each for each in self._models.values() if each.pinned and each is not model]
        if self._fits([*others, model]):
            return ""
        if self._fits([model]):
            return f"the pinned models ({_names(others)}) leave no place for it"
        needed, memory = self._loader.size(model.name) / _MB, (self._settings.memory or 0) / _MB
        return f"it needs {needed:.0f} MB of memory, and {memory:.0f} MB are allowed"

    def _takes_holds(self, model: _Model) -> bool:
        loaded = self._loader.is_loaded(model.name)
        return loaded and model.task is None and not (model.going or self._loader.is_paused())

    def _grant(self, model: _Model, holds: Iterable[Hold]) -> None:
        model.used_at = self._clock()
        for hold in holds:
            model.holds.add(hold)
            hold.grant()
        model.waiting = []

    def _model(self, name: str) -> _Model:
        if name not in self._models:
            hint = near(name, self._models)
            raise ModelNotReadyError(f"there is no model {name[:200]!r}", hint=hint)
        return self._models[name]

    # Work

    def _start(
        self, model: _Model, work: Coroutine[Any, Any, None], *, unloading: bool = False
    ) -> None:
        model.unloading = unloading
        model.task = asyncio.ensure_future(work)

    async def _load(self, model: _Model) -> None:
        began = self._clock()
        try:
            await self._loader.load(model.name)
        except Exception as error:  # whatever it is, it concerns this model only
            model.task = None
            self._record_failure(model, error.problem if isinstance(error, LLMServeError)
                                 else reason(error))  # fmt: skip
        else:
            model.task, model.failures, model.retry_at = None, 0, 0.0
            model.seconds = self._clock() - began
            size = self._loader.size(model.name) / _MB
            self._notify(f"{model.name}: loaded in {model.seconds:.1f} s, {size:.0f} MB")
            if model in self._queue and not self._loader.is_paused():
                # Before anything else, such as another model that waits for its place.
                self._grant(model, model.waiting)
        self._plan()

    async def _unload(self, model: _Model) -> None:
        try:
            await self._loader.unload(model.name)
        except Exception as error:  # Triton has ended: what is left then is loaded again
            self._notify(f"{model.name}: not unloaded: {reason(error)}")
        model.task, model.unloading, model.leaving = None, False, False
        model.unloads += 1
        self._plan()

    def _record_failure(self, model: _Model, why: str) -> None:
        first, longest = _FIRST_BACK_OFF, _MAX_BACK_OFF
        if self._loader.cost_restart(model.name):
            first, longest = _FIRST_AFTER_RESTART, _MAX_AFTER_RESTART
        wait = back_off(model.failures, first, longest)
        model.failures, model.why = model.failures + 1, why
        model.retry_at = self._clock() + wait
        self._notify(f"{model.name}: is tried again on request, after {wait:g} s")
        self._refuse_waiting(model, _failed(model, wait))

    def _refuse_waiting(self, model: _Model, error: LLMServeError) -> None:
        for hold in model.waiting:
            hold.refuse(error)
        model.waiting = []


def _failed(model: _Model, left: float) -> NotLoadedError:
    seconds = int(left) + 1
    return NotLoadedError(
        f"{model.name!r} could not be loaded ({model.why}), and is tried again in {seconds} s",
        details={"retry_after": seconds},
    )


def _too_large(model: _Model, why: str) -> NotLoadedError:
    return NotLoadedError(f"{model.name!r} is not loaded: {why}")


def _names(models: Iterable[_Model]) -> str:
    return ", ".join(model.name for model in models)
