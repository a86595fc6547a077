"""What is seen of a ``serve`` at one moment. Nothing here is a conclusion: those are decide's."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum

from llmserve.contract.report import FaultReport
from llmserve.server.run.ends import End


@dataclass(frozen=True)
class ModelPicture:
    """What is seen of one model in one Triton."""

    has_folder: bool = True
    not_asked: str = ""
    """Why Triton could not be asked to load it, as without space for the files that tell it."""
    load_number: int = 0
    """Which of its loads this is: another number once its processes have been replaced."""
    # Triton's log, since Triton was last asked to load the model.
    is_loaded: bool = False
    failure: str = ""
    """Why it could not be loaded."""
    raised: str = ""
    """Why it will fail to load, while its process still goes on."""
    is_loading: bool = False
    is_hopeless: bool = False
    """Whether it would fail again, whenever it is loaded."""
    is_unhealthy: bool = False
    """Whether it failed since its process did not respond for a second."""
    # Its processes.
    processes: frozenset[int] = frozenset()
    died: End | None = None
    """How one of them has ended since the last picture."""
    is_stopped: bool = False
    """Whether a signal has stopped one of them for a while."""
    given_up: frozenset[int] = frozenset()
    """Those that load, that Triton has given up, and for whose end it waits (GIVEN_UP)."""
    # Only while it is loaded or unloaded, or if its answers are checked.
    seconds: float = 0.0
    """The time of processors that they have used."""
    # Only while it is loaded or unloaded.
    answers: int = 0
    """How many requests it has answered, of one that has no process of its own to be seen."""
    takes_requests: bool | None = None
    """Whether Triton says that it does; None while that is not known."""
    asked_at: float = 0.0
    """When Triton was asked for that."""
    is_asked_for_token: bool = False
    """Whether it has a canary request to answer."""
    is_being_withdrawn: bool = False
    """Whether Triton is still being kept from loading it again and again (TRIED_AGAIN)."""
    runs_in_triton: bool = False
    """Whether Triton itself runs it, so that it has no process."""


class Heard(Enum):
    """What came of a canary request."""

    ANSWERED = "answered"
    MISSED = "missed"
    DIED = "died"
    WORKS = "works"
    """It has not answered, but works."""


@dataclass(frozen=True)
class Canary:
    """What a canary request has shown of a model; of Triton or a frontend, it has no name."""

    heard: Heard
    model: str = ""
    why: str = ""
    load_number: int = -1
    """Which load of the model was asked."""


@dataclass(frozen=True)
class Checked:
    """What came of a check of a model's answers."""

    model: str
    load_number: int
    """Which load of the model was asked."""
    took: float
    """The seconds for which it was asked."""
    known: int
    """How many known answers there are."""
    fault: FaultReport | None = None
    problem: str = ""
    """Why it could not be checked."""
    unjudged: str = ""
    """Why a user's answer could not be judged, which says nothing of the known ones."""


@dataclass(frozen=True)
class HasRead:
    """What came of having a model read its warm prompts."""

    model: str
    load_number: int
    """Which load of the model was asked."""
    took: float
    """The seconds for which it was asked."""
    tokens: int
    """How many it has read, if need be in what was kept."""
    problems: tuple[str, ...] = ()
    """Why which of them could not be read."""


@dataclass(frozen=True)
class StartPicture:
    """What came of a start: ``problem`` is why there is none.

    Of Triton, ``failures`` are the models without which it was started, or that kept it from that.
    """

    problem: str = ""
    failures: Mapping[str, str] = field(default_factory=dict)
    is_renewable: bool = True
    """Whether a Triton that was started can load and unload models while it runs."""


@dataclass(frozen=True)
class TritonPicture:
    """What is seen of one Triton and of its models."""

    models: Mapping[str, ModelPicture] = field(default_factory=dict)
    ended: str = ""
    """Why its process has ended, "" while it runs."""
    is_stopped: bool = False
    is_stuck: bool = False
    """Whether it waits for a process that has ended (STUCK_STUB)."""
    is_busy: bool = False
    """Whether it is being started or ended."""
    start: StartPicture | None = None
    """What came of a start, since the last picture."""
    canaries: tuple[Canary, ...] = ()
    """What was heard since the last picture."""
    checked: tuple[Checked, ...] = ()
    """What came of checks of answers since the last picture."""
    has_read: tuple[HasRead, ...] = ()
    """Which models have read their warm prompts since the last picture."""
    seconds: float = 0.0
    """The time of processors that Triton itself has used, if answers are checked."""
    is_hidden: bool = False
    """Whether nothing is seen of what its processes use, as in a container."""
    last_words: str = ""
    """The line of the log that may explain what has just ended."""
    resources: str = ""
    """What the machine has left, if something has just died."""

    def of(self, name: str) -> ModelPicture:
        return self.models.get(name, _NOTHING)

    @property
    def is_loading(self) -> bool:
        return any(model.is_loading for model in self.models.values())


_NOTHING = ModelPicture()


@dataclass(frozen=True)
class FrontendPicture:
    """What is seen of one frontend."""

    ended: str = ""
    is_stopped: bool = False
    is_busy: bool = False
    start: StartPicture | None = None
    canaries: tuple[Canary, ...] = ()


@dataclass(frozen=True)
class Picture:
    """What is seen of all, at a moment of a monotonic clock."""

    now: float
    tritons: tuple[TritonPicture, ...] = ()
    frontends: tuple[FrontendPicture, ...] = ()
    parts: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """What each model on demand is made of, by the files that there are now."""
    sizes: Mapping[str, float] = field(default_factory=dict)
    """The bytes that each model on demand takes, with all replicas, or is expected to take."""
