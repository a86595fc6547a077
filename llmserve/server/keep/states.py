"""The states of supervised models and processes; :class:`Watch` contains all transitions.

::

    loading ──► ready ◄──► suspect          restarting ──► loading ──► ready
       │          │           │                  ▲
       └──────────┴───────────┴──────────────────┤
                                                 └──► failed (died too often)

With ``serve --on-demand``, one that nobody needs is unloaded, until it is loading.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from llmserve.contract.failures import back_off

MISSES = 2
"""The number of consecutive unanswered canary requests after which something counts as dead."""
_FIRST_WAIT, _MAX_WAIT = 0.5, 8.0
_DEATHS, _DEATHS_WINDOW = 5, 60.0


class State(str, Enum):
    """The state of a model, of a frontend, or of Triton itself."""

    LOADING = "loading"
    READY = "ready"
    SUSPECT = "suspect"
    """It has not answered the last canary request; clients' requests still go to it."""
    RESTARTING = "restarting"
    FAILED = "failed"
    """It has died too often, and stays down until a user reloads it."""
    UNLOADED = "unloaded"
    """It takes no memory; a request has it loaded."""


_ALIVE = (State.READY, State.SUSPECT)
_DOWN = (State.FAILED, State.UNLOADED)
_BEST_FIRST = ("ready", "suspect", "loading", "restarting", "unloaded", "failed")


@dataclass
class Watch:
    """One supervised model or process. Times are seconds of a monotonic clock."""

    name: str
    notify: Callable[[str], None] = lambda _: None
    """Called with a line for every change."""
    state: State = State.LOADING
    why: str = ""
    """The reason for the state, if something is wrong."""
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
        return self.state in _ALIVE

    @property
    def went_wrong(self) -> bool:
        """Whether it has ended at least once, or cannot be started."""
        return self.restarts > 0 or self.state in (State.RESTARTING, State.FAILED)

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
        self._to(State.LOADING, now, self.why)

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
        if self.state in _ALIVE:
            self._to(State.SUSPECT, now, why)

    def missed(self, now: float, why: str) -> None:
        if self.state not in _ALIVE:
            return
        self.misses += 1
        if self.misses >= MISSES:
            self.died(now, why)
        else:
            self._to(State.SUSPECT, now, why)

    def died(self, now: float, why: str) -> None:
        """Record a death: it restarts after a wait, unless it has died too often recently."""
        if self.state in (State.RESTARTING, *_DOWN):
            return
        self._deaths = [at for at in self._deaths if now - at < self.deaths_window] + [now]
        self.misses = 0
        if len(self._deaths) >= self.deaths:
            self.failed(now, why)
        else:
            self.restart_at = now + back_off(len(self._deaths) - 1, _FIRST_WAIT, self.max_wait)
            self._to(State.RESTARTING, now, why)

    def interrupted(self, now: float, why: str) -> None:
        """Record an end that is not its fault; it restarts together with its server."""
        if self.state not in _DOWN:
            self.misses = 0
            self._to(State.RESTARTING, now, why)

    def failed(self, now: float, why: str) -> None:
        """Record a failure after which it is not restarted."""
        self._to(State.FAILED, now, why)

    def unloaded(self, now: float) -> None:
        """Record that it is unloaded, which who does that reports."""
        self.misses, self.state, self.why, self.since = 0, State.UNLOADED, "", now

    def load_requested(self, now: float) -> None:
        """Record a user's request to load it, and forget its earlier deaths."""
        self._deaths.clear()
        if not self.alive:
            self.loading(now)

    def report(self) -> dict[str, Any]:
        """Return its entry for ``llmserve status``."""
        return {
            "name": self.name,
            "state": self.state.value,
            "why": self.why,
            "restarts": self.restarts,
        }

    def _to(self, state: State, now: float, why: str) -> None:
        changed = (state, why) != (self.state, self.why)
        if state is not self.state:
            self.since = now
        self.state, self.why = state, why
        if changed:
            self.notify(f"{self.name}: {state.value}" + (f" ({why})" if why else ""))


def best_of(reports: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the report of the replica in the best state, with the restarts of all replicas.

    One that fails its canaries is worse than another in the same state.
    """
    best = min(reports, key=lambda r: (_BEST_FIRST.index(r["state"]), bool(r.get("failing"))))
    return {**best, "restarts": sum(report["restarts"] for report in reports)}
