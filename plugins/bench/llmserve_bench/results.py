"""The result of a measurement, :class:`Result`, which is saved as one JSON file.

All times are in seconds; those of a record count from the start of its run.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import inf
from typing import Any, Literal


@dataclass(frozen=True)
class Record:
    """One request.

    ``scheduled`` is when it was due: its arrival time under a rate, otherwise the moment its slot
    became free. Latency counts from there, so that a server cannot hide a stall. ``pieces`` are
    the times at which parts of the answer arrived, and ``tokens`` how many output tokens each of
    them contained, if known.
    """

    index: int
    scheduled: float
    sent: float
    done: float
    pieces: tuple[float, ...] = ()
    tokens: tuple[int, ...] = ()
    input_tokens: int | None = None
    output_tokens: int | None = None
    finish_reason: str | None = None
    error: str | None = None
    message: str | None = None
    texts: int = 0
    """How many texts it had, if the model answers with values."""
    adapter: str = ""
    image: str = ""
    """The file of the image that it showed."""

    @property
    def latency(self) -> float:
        return self.done - self.scheduled

    @property
    def first_token(self) -> float:
        """Seconds to the first piece, or to the end if the answer has no text."""
        return (self.pieces[0] if self.pieces else self.done) - self.scheduled

    @property
    def token_time(self) -> float | None:
        """Mean seconds between tokens; None if the answer came in one piece."""
        later = sum(self.tokens[1:])
        return (self.pieces[-1] - self.pieces[0]) / later if later > 0 else None


@dataclass(frozen=True)
class Subject:
    name: str
    model: str
    url: str
    build: Mapping[str, Any] = field(default_factory=dict)
    server: str | None = None
    engine: str = ""
    """What computes the answers, as far as a local repository tells: engine, types, device."""


@dataclass(frozen=True)
class Load:
    """How requests are sent.

    Either ``concurrency`` requests are always in flight, or ``rate`` of them are sent per second
    without waiting for answers. ``requests`` or ``duration`` ends the load. ``prompts`` describes
    the prompts, and ``limit_latency`` and ``limit_ttft`` are the limits for goodput. ``texts`` is
    how many texts a request has, if the model answers with values; 0 if it generates text. Requests
    name the ``adapters`` in turn; an empty name is the model without one. They show the ``images``,
    which are files, in turn as well; an empty name is a request without one.
    """

    concurrency: int | None = None
    rate: float | None = None
    arrivals: str = "poisson"
    requests: int | None = None
    duration: float | None = None
    warmup: int = 4
    stream: bool = False
    seed: int = 0
    prompts: str = ""
    options: Mapping[str, Any] = field(default_factory=dict)
    limit_latency: float | None = None
    limit_ttft: float | None = None
    processes: int = 1
    timeout: float | None = None
    texts: int = 0
    adapters: tuple[str, ...] = ()
    images: tuple[str, ...] = ()

    def within_limits(self, latency: float, first_token: float) -> bool:
        return latency <= (self.limit_latency or inf) and first_token <= (self.limit_ttft or inf)

    @property
    def label(self) -> str:
        return f"rate {self.rate:g}/s" if self.rate else f"concurrency {self.concurrency}"


@dataclass(frozen=True)
class ModelFigures:
    """Triton's own statistics of one model, summed over the run; an ensemble has several.

    ``inferences`` counts rows and ``executions`` batches.
    """

    model: str
    requests: int
    inferences: int
    executions: int
    success: float
    queue: float
    compute_input: float
    compute_infer: float
    compute_output: float


@dataclass(frozen=True)
class Gauge:
    mean: float
    peak: float


@dataclass(frozen=True)
class ServerFigures:
    """The server's own figures of a run; the model that got the requests comes first.

    ``stand_ins`` maps each model that a stand-in served to what it stood in for.
    """

    models: tuple[ModelFigures, ...]
    gauges: Mapping[str, Gauge] = field(default_factory=dict)
    stand_ins: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class GeneratorCost:
    """What the load generator itself cost.

    ``cpu`` is the processor time of all its processes, ``busy`` the share of a core that the
    busiest one used, and ``late`` the 99th percentile of its delays.
    """

    processes: int
    cpu: float
    busy: float
    late: float


@dataclass(frozen=True)
class ToolFigures:
    """The figures of another tool, by the names of :data:`llmserve_bench.figures.FIGURES`."""

    tool: str
    version: str
    command: str
    figures: Mapping[str, float]


@dataclass(frozen=True)
class Run:
    """One measurement; ``ended_early`` is why it ended early, such as a dead server."""

    seconds: float
    records: tuple[Record, ...]
    server: ServerFigures | None
    generator: GeneratorCost
    tools: tuple[ToolFigures, ...] = ()
    interrupted: bool = False
    ended_early: str | None = None

    @property
    def good(self) -> list[Record]:
        return [record for record in self.records if record.error is None]


@dataclass(frozen=True)
class Case:
    """One model under one load, with a run for each round.

    ``varied`` are the settings that distinguish it from the other variants of a sweep. ``state``
    is ``done``, ``failed`` or ``not run``; ``why`` is the reason.
    """

    subject: Subject
    load: Load
    runs: tuple[Run, ...] = ()
    varied: Mapping[str, str] = field(default_factory=dict)
    state: str = "done"
    why: str = ""

    @property
    def stand_ins(self) -> list[str]:
        servers = [run.server for run in self.runs if run.server]
        return sorted({name for server in servers for name in server.stand_ins.values()})

    @property
    def name(self) -> str:
        varied = " ".join(f"{key}={value}" for key, value in self.varied.items())
        return f"{varied or self.subject.name}{' (stand-in)' if self.stand_ins else ''}"


@dataclass(frozen=True)
class Loss:
    """What a model's answers lose against the first's, and the bytes of its processes.

    ``perplexity`` is of the first's answers and the prompts before them. ``alike`` is the share of
    the first's tokens before another one is likelier, and ``json`` is of those answers that are
    JSON at the first how many are here; ``tool_calls`` is the same of valid calls of tools. What
    cannot be known is None.
    """

    name: str
    perplexity: float | None = None
    alike: float | None = None
    json: float | None = None
    memory: int | None = None
    tool_calls: float | None = None


@dataclass(frozen=True)
class Result:
    """The result of a command. A comparison measures the other cases against the first.

    ``problems`` are failures outside the measurement itself, such as those of another tool.
    """

    kind: Literal["bench", "compare", "sweep"]
    title: str
    started: str
    rounds: int
    machine: Mapping[str, str]
    cases: tuple[Case, ...]
    interrupted: bool = False
    ended_early: str | None = None
    problems: tuple[str, ...] = ()
    losses: tuple[Loss, ...] = ()

    @property
    def runs(self) -> list[Run]:
        return [run for case in self.cases for run in case.runs]

    @property
    def loads(self) -> list[str]:
        return list(dict.fromkeys(case.load.label for case in self.cases))
