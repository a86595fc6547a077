"""One load against one subject, request by request; see :mod:`llmserve.measure.results`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Record:
    """One request of the measured window.

    ``scheduled`` is when it should have been sent: its arrival time under a rate, else when its
    place became free. Latency and time to first token count from there. ``sent`` is when it
    really was. ``first`` is when the first piece of text came, ``done`` when the answer was
    complete or had failed. ``pieces`` are the arrival times of all pieces with text or tokens
    (a whole answer is one piece), and ``tokens`` how many output tokens each of them brought:
    a piece may bring several. Both are empty for a request that failed before anything came.

    ``input_tokens`` and ``output_tokens`` are None where the model does not count.
    ``error`` is None, or the kind of failure, such as ``rejected``, ``timeout``,
    ``unreachable``; ``message`` is its one line.
    """

    index: int
    scheduled: float
    sent: float
    first: float | None
    done: float
    input_tokens: int | None
    output_tokens: int | None
    pieces: tuple[float, ...] = ()
    tokens: tuple[int, ...] = ()
    finish_reason: str | None = None
    error: str | None = None
    message: str | None = None


@dataclass(frozen=True)
class Subject:
    """What was measured: a model behind a URL, and how it was built where that is known.

    ``name`` is what tables and legends call it. ``build`` holds ``plugin``, ``model``,
    ``batching`` and options such as ``max_batch_size`` of a variant that llmserve built for the
    measurement; it is empty for a model that was served already. ``server`` names the runtime,
    such as ``embedded Triton 2.51.0``, where it is known.
    """

    name: str
    model: str
    url: str
    exchange: str
    build: Mapping[str, Any] = field(default_factory=dict)
    server: str | None = None


@dataclass(frozen=True)
class Load:
    """How a subject was asked.

    ``concurrency`` is set for a closed loop (so many requests are always under way) and
    ``rate`` for an open one (so many are sent each second, whatever comes back), with
    ``arrivals`` ``poisson`` or ``constant``. Either ``requests`` or ``duration`` ends it.
    ``dataset`` describes the prompts in words; ``options`` are those sent with each request.
    ``limit_latency`` and ``limit_ttft`` are the limits that goodput is counted under.
    """

    concurrency: int | None
    rate: float | None
    arrivals: str | None
    requests: int | None
    duration: float | None
    warmup: int
    stream: bool
    seed: int
    dataset: str
    options: Mapping[str, Any] = field(default_factory=dict)
    limit_latency: float | None = None
    limit_ttft: float | None = None
    processes: int = 1
    timeout: float | None = None

    @classmethod
    def closed(cls, concurrency: int, **given: Any) -> Load:
        """Keep so many requests under way; what is not given has the command line's default.

        >>> Load.closed(8, requests=98).label
        'concurrency 8'
        """
        return cls(
            **{**_DEFAULTS, "warmup": min(concurrency, 16), **given, "concurrency": concurrency}
        )

    @classmethod
    def open(cls, rate: float, **given: Any) -> Load:
        """Send so many a second, whatever comes back."""
        return cls(**{**_DEFAULTS, "arrivals": "poisson", **given, "rate": rate})

    @property
    def label(self) -> str:
        """Say it in two words, for axes and legends: ``concurrency 8`` or ``rate 2.5/s``."""
        if self.concurrency is not None:
            return f"concurrency {self.concurrency}"
        return f"rate {self.rate:g}/s"


_DEFAULTS: dict[str, Any] = {
    "concurrency": None,
    "rate": None,
    "arrivals": None,
    "requests": None,
    "duration": None,
    "warmup": 4,
    "stream": False,
    "seed": 0,
    "dataset": "",
}


@dataclass(frozen=True)
class ModelFigures:
    """Triton's own statistics of one model (an ensemble brings its parts along).

    ``inferences`` counts rows and ``executions`` batches, so ``inferences / executions`` is the
    mean batch. A decoupled or iterative model executes once per step. The times are sums in
    seconds over all ``requests``: ``queue``, ``compute_input``, ``compute_infer``
    and ``compute_output`` are parts of ``success``. ``batches`` says how often each batch
    size ran; Triton leaves it empty for some schedulers.
    """

    model: str
    requests: int
    failed: int
    inferences: int
    executions: int
    success: float
    queue: float
    compute_input: float
    compute_infer: float
    compute_output: float
    batches: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Sampled:
    """What rises and falls, looked at so many times during the window."""

    mean: float
    peak: float
    count: int


@dataclass(frozen=True)
class ServerFigures:
    """What the server says it did during the window: differences between its end and start.

    ``models`` has the asked model first. ``metrics`` holds what a model counts itself on
    ``/metrics``, by name without labels. ``samples`` holds what rises and falls there, the
    machine's own figures such as ``nv_gpu_utilization`` included: over several devices the mean
    of a share and the sum of all else. Both are empty where metrics cannot be reached, and
    ``samples`` for a window of less than a quarter of a second. ``stand_ins`` names the models
    that one of llmserve's stand-ins answered, and what it stands in for: such a model's figures
    are not those of the real backend.
    """

    models: tuple[ModelFigures, ...]
    metrics: Mapping[str, float] = field(default_factory=dict)
    samples: Mapping[str, Sampled] = field(default_factory=dict)
    stand_ins: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class LoaderCost:
    """What the load generator itself used during the window.

    ``cpu`` is processor time of all its processes. ``busy`` is the share of one core that the
    busiest process used: near 1 it was the bottleneck. ``late`` is the 99th percentile of how
    late requests were sent, for which a stalled server is not to blame. ``warning`` says in one
    line when the figures must not be trusted, else it is None. ``wire`` is how requests
    travelled: ``plain``, or ``grpc`` for gRPC's library, which costs several times as much.
    """

    processes: int
    cpu: float
    busy: float
    late: float
    warning: str | None = None
    wire: str = ""


@dataclass(frozen=True)
class ToolFigures:
    """What another tool measured on the same model, prompts and load.

    ``figures`` are by the names of :class:`llmserve.measure.summary.Summary`, in its units
    (``requests_per_second``, ``latency_mean``, ``latency_p99``, ``ttft_mean``, ...), as far as
    the tool tells them; ``command`` is what was run.
    """

    tool: str
    version: str
    command: str
    figures: Mapping[str, float]


@dataclass(frozen=True)
class Run:
    """One load against one subject. ``seconds`` is the length of the window.

    With a number of requests the window ends when the last one is done; with a duration it ends
    then, and requests that are under way are not counted (``unfinished`` says how many, and
    ``unfinished_seconds`` how long they had been under way, together).
    ``interrupted`` runs were ended with Ctrl-C and hold what came until then; ``ended_early``
    says what else ended a run before its time, such as a server that has died. ``started``
    is the wall clock in ISO form, ``machine`` a few words on where it ran.
    """

    subject: Subject
    load: Load
    started: str
    seconds: float
    records: tuple[Record, ...]
    server: ServerFigures | None
    loader: LoaderCost
    tools: tuple[ToolFigures, ...] = ()
    unfinished: int = 0
    interrupted: bool = False
    machine: Mapping[str, str] = field(default_factory=dict)
    unfinished_seconds: float = 0.0
    ended_early: str | None = None
