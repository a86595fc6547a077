"""What is watched, and the states it goes through: every transition is in :class:`Watch`.

::

    loading ──► ready ◄──► suspect          restarting ──► loading ──► ready
       │          │           │                  ▲
       └──────────┴───────────┴──────────────────┤
                                                 └──► failed (it has died too often)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

MISSES = 2
"""So many canaries in a row without an answer, and the thing counts as dead."""
_FIRST_WAIT, _LONGEST_WAIT = 0.5, 8.0
_MOST_DEATHS, _OF_LATE = 5, 60.0


class State(str, Enum):
    """What is known of a model, of a frontend, or of Triton itself."""

    LOADING = "loading"
    READY = "ready"
    SUSPECT = "suspect"
    """It has not answered the last canary; requests still go to it."""
    RESTARTING = "restarting"
    FAILED = "failed"
    """It has died too often, and is left alone until somebody asks for it."""


_ALIVE = (State.READY, State.SUSPECT)
_BEST_FIRST = ("ready", "suspect", "loading", "restarting", "failed")


@dataclass
class Watch:
    """One thing that is watched over. Times are seconds of one clock that never goes back."""

    name: str
    say: Callable[[str], None] = lambda _: None
    """Takes a line whenever something has changed."""
    state: State = State.LOADING
    why: str = ""
    """What has brought it there, where that is not as it should be."""
    since: float = 0.0
    again_at: float = 0.0
    """When it is to be started again, while it is restarting."""
    misses: int = 0
    restarts: int = 0
    _deaths: list[float] = field(default_factory=list)

    @property
    def alive(self) -> bool:
        """Whether requests are expected to be answered."""
        return self.state in _ALIVE

    def loading(self, now: float) -> None:
        """It is being started."""
        self.restarts += self.state is State.RESTARTING
        self._to(State.LOADING, now, self.why)

    def loaded(self, now: float) -> None:
        self.misses = 0
        self._to(State.READY, now, "")

    def answered(self, now: float) -> None:
        """It has answered a canary, or somebody."""
        self.misses = 0
        if self.state is State.SUSPECT:
            self._to(State.READY, now, "")

    def missed(self, now: float, why: str) -> None:
        if self.state not in _ALIVE:
            return
        self.misses += 1
        if self.misses >= MISSES:
            self.died(now, why)
        else:
            self._to(State.SUSPECT, now, why)

    def died(self, now: float, why: str) -> None:
        """It is gone: it restarts after a while, unless that has happened too often of late."""
        if self.state in (State.RESTARTING, State.FAILED):
            return
        self._deaths = [then for then in self._deaths if now - then < _OF_LATE] + [now]
        self.misses = 0
        if len(self._deaths) >= _MOST_DEATHS:
            self.failed(now, why)
        else:
            self.again_at = now + min(_LONGEST_WAIT, _FIRST_WAIT * 2 ** (len(self._deaths) - 1))
            self._to(State.RESTARTING, now, why)

    def waits(self, now: float, why: str) -> None:
        """It is gone for no fault of its own, and comes back with what it belongs to."""
        if self.state is not State.FAILED:
            self.misses = 0
            self._to(State.RESTARTING, now, why)

    def failed(self, now: float, why: str) -> None:
        """Nothing more is tried."""
        self._to(State.FAILED, now, why)

    def asked_for(self, now: float) -> None:
        """Somebody wants it loaded anew: what was before counts no more."""
        self._deaths.clear()
        if not self.alive:
            self.loading(now)

    def report(self) -> dict[str, Any]:
        """Return what ``llmserve status`` prints of it."""
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
            self.say(f"{self.name}: {state.value}" + (f" ({why})" if why else ""))


def best_of(reports: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return how the best of several is that do the same, with the restarts of all."""
    best = min(reports, key=lambda one: _BEST_FIRST.index(one["state"]))
    return {**best, "restarts": sum(one["restarts"] for one in reports)}
