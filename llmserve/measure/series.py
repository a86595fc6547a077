"""Several subjects and many variants; see :mod:`llmserve.measure.results`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from llmserve.measure.runs import Run, Subject


@dataclass(frozen=True)
class Cell:
    """All runs of one subject under one load, a run per round, in the order of the rounds."""

    subject: str
    load: str
    runs: tuple[Run, ...]


@dataclass(frozen=True)
class Ratio:
    """A metric of ``subject`` divided by that of ``against``, under one load.

    ``low`` and ``high`` are a 95 % confidence interval over rounds; of one round it has no end,
    and ``high`` is infinite, in JSON null. ``verdict`` is
    ``better``, ``worse`` or ``no difference``: the last when the interval holds 1, or
    when there are too few rounds to say. ``why`` is that in one sentence.
    """

    metric: str
    load: str
    subject: str
    against: str
    ratio: float
    low: float
    high: float
    verdict: str
    why: str


@dataclass(frozen=True)
class Comparison:
    """Subjects under the same loads; the first subject is what the others are held against.

    ``loads`` are the labels of :attr:`Load.label` in their order, ``subjects`` in theirs;
    ``cells`` has one :class:`Cell` for each pair. Within a round all subjects saw the same
    prompts, lengths and arrival times, in an order that changes from round to round.
    ``ended_early`` says what ended it before its time, such as a server that has died.
    """

    title: str
    started: str
    subjects: tuple[Subject, ...]
    loads: tuple[str, ...]
    rounds: int
    cells: tuple[Cell, ...]
    ratios: tuple[Ratio, ...]
    interrupted: bool = False
    ended_early: str | None = None


@dataclass(frozen=True)
class Variant:
    """One combination of a sweep.

    ``build`` are the varied build settings, ``load`` the varied ones of the load
    (``concurrency`` or ``rate``). ``state`` is ``waiting``, ``done``, ``stopped`` (it cannot
    win, so it was not measured to the end) or ``failed`` (it could not be built, served or
    asked); ``why`` says why, for the last two. ``throughput`` is output tokens a second and
    ``latency`` the 99th percentile over all its runs, None before it has any;
    ``within`` says whether that holds the sweep's limit.
    """

    name: str
    build: Mapping[str, Any]
    load: Mapping[str, Any]
    state: str = "waiting"
    why: str = ""
    runs: tuple[Run, ...] = ()
    throughput: float | None = None
    latency: float | None = None
    within: bool | None = None


@dataclass(frozen=True)
class Sweep:
    """Variants of one model, ranked by throughput among those within the limit.

    ``varied`` maps each varied setting to its values, in their order. ``limit_latency`` and
    ``limit_ttft`` are in seconds at the 99th percentile, None for no limit. ``ranking`` names
    the variants that are ``done``: those within the limit by throughput, then the others.
    ``settings`` holds what all variants had in common.
    """

    title: str
    started: str
    plugin: str
    model: str
    varied: Mapping[str, tuple[Any, ...]]
    variants: tuple[Variant, ...]
    ranking: tuple[str, ...]
    rounds: int
    limit_latency: float | None = None
    limit_ttft: float | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)
    interrupted: bool = False
