"""The states of supervised models and processes; :class:`Watch` contains all transitions.

::

    loading ──► ready ◄──► suspect          restarting ──► loading ──► ready
       │          │           │                  ▲
       └──────────┴───────────┴──────────────────┤
                                                 └──► failed (died too often)

With ``serve --on-demand``, one that nobody needs is unloaded, until it is loading.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from llmserve.contract.failures import back_off
from llmserve.contract.report import PartReport, State

MISSES = 2
"""The number of consecutive unanswered canary requests after which something counts as dead."""
_FIRST_WAIT, _MAX_WAIT = 0.5, 8.0
_DEATHS, _DEATHS_WINDOW = 5, 60.0


DIED, NOT_LOADED = "model_died", "not_loaded"
"""The failures that requests are lost by: its process has ended, or could not be started."""


@dataclass
class Watch:
    """One supervised model or process. Times are seconds of a monotonic clock."""

    name: str
    notify: Callable[[str], None] = lambda _: None
    """Called with a line for every change."""
    state: State = State.LOADING
    why: str = ""
    """The reason for the state, if something is wrong."""
    code: str = ""
    """What a request that is lost by that fails of."""
    since: float = 0.0
    restart_at: float = 0.0
    """When to restart it, if it is restarting."""
    misses: int = 0
    restarts: int = 0
    deaths: float = _DEATHS
    """How many of them in ``deaths_window`` seconds are too often."""
    deaths_window: float = _DEATHS_WINDOW
    max_wait: float = _MAX_WAIT
    """The longest wait before a restart, in seconds."""
    _deaths: list[float] = field(default_factory=list)

    @property
    def alive(self) -> bool:
        """Whether requests are expected to be answered."""
        return self.state.answers

    @property
    def went_wrong(self) -> bool:
        """Whether it has ended at least once, or cannot be started."""
        return self.restarts > 0 or self.state.has_ended

    def in_words(self) -> str:
        """Say what went wrong with it."""
        again = f"{self.name} was started again"
        again += "" if self.restarts == 1 else f" {self.restarts} times"
        if self.state is State.FAILED:
            return f"{self.name}: {self.why}"
        return again if self.restarts else f"{self.name} has ended ({self.why})"

    def loading(self, now: float) -> None:
        """Record that it is being started."""
        self.restarts += self.state is State.RESTARTING
        self._to(State.LOADING, now, self.why, self.code)

    def loaded(self, now: float) -> None:
        self.misses = 0
        self._to(State.READY, now, "")

    def answered(self, now: float) -> None:
        """Record that it has answered a canary request or a client."""
        self.misses = 0
        if self.state is State.SUSPECT:
            self._to(State.READY, now, "")

    def works(self, now: float, why: str) -> None:
        """Record that it has not answered a canary request, but has too much to do."""
        if self.state.answers:
            self._to(State.SUSPECT, now, why)

    def missed(self, now: float, why: str) -> None:
        if not self.state.answers:
            return
        self.misses += 1
        if self.misses >= MISSES:
            self.died(now, why)
        else:
            self._to(State.SUSPECT, now, why)

    def died(self, now: float, why: str) -> None:
        """Record a death: it restarts after a wait, unless it has died too often recently."""
        if self.state is State.RESTARTING or self.state.is_down:
            return
        self._deaths = [at for at in self._deaths if now - at < self.deaths_window] + [now]
        self.misses = 0
        if len(self._deaths) >= self.deaths:
            self.failed(now, why, DIED)
        else:
            self.restart_at = now + back_off(len(self._deaths) - 1, _FIRST_WAIT, self.max_wait)
            self._to(State.RESTARTING, now, why, DIED)

    def interrupted(self, now: float, why: str) -> None:
        """Record an end that is not its fault; it restarts together with its server."""
        if not self.state.is_down:
            self.misses = 0
            self._to(State.RESTARTING, now, why, DIED)

    def failed(self, now: float, why: str, code: str = NOT_LOADED) -> None:
        """Record a failure after which it is not restarted."""
        self._to(State.FAILED, now, why, code)

    def unloaded(self, now: float) -> None:
        """Record that it is unloaded, which who does that reports."""
        self.misses, self.state, self.why, self.code, self.since = 0, State.UNLOADED, "", "", now

    def load_requested(self, now: float) -> None:
        """Record a user's request to load it, and forget its earlier deaths."""
        self._deaths.clear()
        if not self.alive:
            self.loading(now)

    def report(self) -> PartReport:
        return PartReport(self.name, self.state, self.why, self.restarts, self.code)

    def _to(self, state: State, now: float, why: str, code: str = "") -> None:
        changed = (state, why) != (self.state, self.why)
        if state is not self.state:
            self.since = now
        self.state, self.why, self.code = state, why, code
        if changed:
            self.notify(f"{self.name}: {state.value}" + (f" ({why})" if why else ""))
