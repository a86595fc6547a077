"""What a ``serve`` reports of itself: its models, its frontends and its replicas, and their states.

The control socket, ``llmserve status --json``, the gateway and Ray read and write it through these
types alone, as JSON whose keys are the names of the fields. A key that a reader does not know is
ignored, and one that is not there has its default, so that versions get on with one another.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from enum import Enum
from typing import Any, TypeVar

from llmserve.contract.failures import FAILURES, Row


class State(str, Enum):
    """The state of a model, of a frontend, of Triton, or of a whole ``serve``."""

    READY = "ready"
    SUSPECT = "suspect"
    """It has not answered the last canary request; clients' requests still go to it."""
    LOADING = "loading"
    RESTARTING = "restarting"
    """It has ended, and is started again after a wait."""
    UNLOADED = "unloaded"
    """It takes no memory; a request has it loaded."""
    FAILED = "failed"
    """It has died too often, or cannot be loaded, and stays down until a user reloads it."""
    SILENT = "not answering"
    """A ``serve`` that was stopped, or hangs: nothing else is known of it."""

    @property
    def answers(self) -> bool:
        """Whether requests are expected to be answered."""
        return self in (State.READY, State.SUSPECT)

    @property
    def is_well(self) -> bool:
        """Whether nothing is wrong: it answers, if need be after it is loaded."""
        return self in (State.READY, State.UNLOADED)

    @property
    def takes_requests(self) -> bool:
        """Whether a request is answered, if need be after its model is loaded."""
        return self.answers or self is State.UNLOADED

    @property
    def has_ended(self) -> bool:
        """Whether what it was answering is lost."""
        return self in (State.RESTARTING, State.FAILED)

    @property
    def is_down(self) -> bool:
        """Whether nothing is under way to change that it does not answer, and it has no memory."""
        return self in (State.FAILED, State.UNLOADED)


_BEST_FIRST = (
    State.READY, State.SUSPECT, State.LOADING, State.RESTARTING, State.UNLOADED, State.FAILED,
    State.SILENT,
)  # fmt: skip


@dataclass(frozen=True)
class OnDemandReport:
    """What is known of a model that is loaded when a request needs it.

    ``size`` is in bytes, and ``task`` is what the model is for, "" if it takes no text.
    """

    loaded: bool
    size: int = 0
    pinned: bool = False
    waited_for: bool = False
    task: str = ""
    adapters: tuple[str, ...] = ()
    """The names of its adapters at the moment."""
    load_seconds: float | None = None
    """How long its last load took."""
    retry_after: int | None = None
    """The seconds until it is tried again, after it could not be loaded."""


@dataclass(frozen=True)
class FaultReport:
    """Why the answers of a model are not those that are known of it, or not any more."""

    check: str
    """Which check failed: ``template``, ``prompt``, ``log-probabilities``, ``answer``, ``length``.
    """
    why: str
    prompt: str = ""
    """The request that shows it: one of ours, "" if it is a user's, which nobody is told."""
    off_by: float | None = None
    """By how much a score has changed at least, in logits; None if that is no number."""
    explained: float = 0.0
    """How much of that rounding explains."""

    def in_words(self) -> str:
        of = repr(self.prompt) if self.prompt else "a user's answer"
        return f"{self.check} of {of}: {self.why}"


@dataclass(frozen=True)
class CertificateReport:
    """What ``serve --certify`` has found of a model's answers."""

    known: int = 0
    """How many known answers it is compared with."""
    checks: int = 0
    """How many were asked again so far."""
    faults: int = 0
    """How often its answers were found to be wrong."""
    fault: FaultReport | None = None
    """Why its answers are taken for wrong now; of several replicas, if all are."""
    faulty: int = 0
    """In how many replicas they are."""
    problem: str = ""
    """Why nothing is known of its answers."""
    judged: int = 0
    """How many answers to users were judged by the scores of their tokens as a prompt."""
    unjudged: str = ""
    """Why the last one was not, if it was not."""


@dataclass(frozen=True)
class PartReport:
    """What is reported of whatever is supervised."""

    name: str
    state: State
    why: str = ""
    """The reason for the state, if something is wrong."""
    restarts: int = 0
    code: str = ""
    """What a request that is lost by that fails of: a row of the table of failures."""

    @property
    def failure(self) -> Row | None:
        """The row that a request for it fails of, None if it takes requests."""
        return None if self.state.takes_requests else FAILURES.get(self.code)


@dataclass(frozen=True)
class FrontendReport(PartReport):
    """A frontend, and where it listens."""

    url: str = ""


@dataclass(frozen=True)
class ModelReport(PartReport):
    """A model of one Triton, or the best of those of all replicas."""

    loads: int | None = None
    """Which of its loads this is: another number once its process has been replaced."""
    failing: str = ""
    """Why it fails its canary requests, although it is alive."""
    note: str = ""
    """What else its user has to know, as that its folder is gone."""
    fingerprint: str = ""
    """The short name of what its answers depend on; "" if it has none."""
    certificate: CertificateReport | None = None
    """Only of one whose answers are checked."""
    demand: OnDemandReport | None = None
    """Only of one that is loaded on demand; in JSON, its fields are among the model's."""
    reading: bool = False
    """Whether it has yet to read its warm prompts; requests that come meanwhile are answered."""

    @property
    def why_not(self) -> str:
        """Why it does not answer as it should, "" if it does or will once it is loaded."""
        if self.state.takes_requests:
            return self.failing
        return f"{self.state.value}: {self.why}"

    @property
    def fault(self) -> FaultReport | None:
        """Why its answers are taken for wrong, if they are."""
        return self.certificate.fault if self.certificate else None


@dataclass(frozen=True)
class ReplicaReport:
    """One Triton: where it listens, its state, and that of its models."""

    state: State
    url: str = ""
    """The gRPC address; empty while it is not known yet."""
    http: str = ""
    runtime: str = ""
    log: str = ""
    restarts: int = 0
    why: str = ""
    models: tuple[ModelReport, ...] = ()

    def model(self, name: str) -> ModelReport | None:
        return next((model for model in self.models if model.name == name), None)


@dataclass(frozen=True)
class ServerReport(ReplicaReport):
    """A whole ``serve``: of several replicas, the first one's addresses and the best states."""

    pid: int = 0
    repository: str = ""
    stopping: bool = False
    on_demand: bool = False
    """Whether it loads its models when they are needed."""
    frontends: tuple[FrontendReport, ...] = ()
    replicas: tuple[ReplicaReport, ...] = ()
    """If there are several."""

    @classmethod
    def of(cls, replicas: Sequence[ReplicaReport], **common: Any) -> ServerReport:
        """Return the report of a ``serve`` that has these replicas."""
        first, names = replicas[0], {m.name: None for one in replicas for m in one.models}
        models = (best_of([m for one in replicas if (m := one.model(name))]) for name in names)
        best = min(replicas, key=lambda one: _BEST_FIRST.index(one.state))
        return cls(
            state=best.state, url=first.url, http=first.http, runtime=first.runtime, log=first.log,
            restarts=sum(one.restarts for one in replicas), why=best.why, models=tuple(models),
            replicas=tuple(replicas) if len(replicas) > 1 else (), **common,
        )  # fmt: skip

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> ServerReport:
        """Read a report; raise :class:`ValueError` if it is none."""
        try:
            return _read(cls, content)
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"not a report of `llmserve serve` ({error!r})") from None

    def to_json(self) -> dict[str, Any]:
        return _written(asdict(self))


def best_of(reports: Sequence[ModelReport]) -> ModelReport:
    """Return the report of the replica in the best state, with the restarts of all replicas.

    One that fails its canaries, or has yet to read, is worse than another in the same state.
    """
    best = min(
        reports, key=lambda one: (_BEST_FIRST.index(one.state), bool(one.failing), one.reading)
    )
    certificates = [report.certificate for report in reports if report.certificate]
    return replace(
        best,
        restarts=sum(report.restarts for report in reports),
        certificate=_all_of(certificates) if certificates else None,
    )


def _all_of(certificates: Sequence[CertificateReport]) -> CertificateReport:
    return CertificateReport(
        known=min(each.known for each in certificates),
        checks=sum(each.checks for each in certificates),
        faults=sum(each.faults for each in certificates),
        fault=certificates[0].fault if all(each.fault for each in certificates) else None,
        faulty=sum(each.faulty for each in certificates),
        problem=next((each.problem for each in certificates if each.problem), ""),
        judged=sum(each.judged for each in certificates),
        unjudged=next((each.unjudged for each in certificates if each.unjudged), ""),
    )


# JSON

_Read = TypeVar("_Read")


def _written(report: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields as JSON has them; what is not known is left out."""
    content = {**report, **(report.get("demand") or {}), "demand": None}
    return {name: _plain(value) for name, value in content.items() if value is not None}


def _plain(value: Any) -> Any:
    if isinstance(value, State):
        return value.value
    if isinstance(value, Mapping):
        return _written(value)
    if isinstance(value, tuple):
        return [_written(each) if isinstance(each, Mapping) else each for each in value]
    return value


def _read(kind: type[_Read], content: Mapping[str, Any]) -> _Read:
    known: Any = kind
    values = {each.name: content[each.name] for each in fields(known) if each.name in content}
    if "state" in values:
        values["state"] = State(values["state"])
    for name in _INNER.keys() & values.keys():
        values[name] = _read(_INNER[name], values[name])
    for name in _NESTED.keys() & values.keys():
        values[name] = tuple(_read(_NESTED[name], each) for each in values[name])
    if kind is ModelReport and "loaded" in content:
        values["demand"] = _read(OnDemandReport, content)
    if kind is OnDemandReport:
        values["adapters"] = tuple(values.get("adapters", ()))
    return kind(**values)


_INNER: Mapping[str, type[Any]] = {"certificate": CertificateReport, "fault": FaultReport}
_NESTED: Mapping[str, type[Any]] = {
    "models": ModelReport, "frontends": FrontendReport, "replicas": ReplicaReport,
}  # fmt: skip
