"""Figures of a model that makes steps, for Triton's ``/metrics`` beside those it has itself."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from weakref import WeakKeyDictionary

from llmserve.runtime.job import Job
from llmserve.runtime.protocols import Parts, Stepper

_GAUGES: dict[str, tuple[Callable[[Stepper], int], str]] = {
    "llmserve_running_sequences": (lambda engine: engine.live, "Sequences under way"),
    "llmserve_waiting_sequences": (
        lambda engine: engine.waiting, "Sequences that wait for room in the cache"
    ),
    "llmserve_cache_used_tokens": (
        lambda engine: engine.cache_used, "Tokens in the cache of sequences under way"
    ),
    "llmserve_cache_tokens": (
        lambda engine: engine.cache_tokens, "Tokens that the cache has room for; 0: not known"
    ),
}  # fmt: skip
_READ, _WRITTEN = "llmserve_input_tokens_total", "llmserve_output_tokens_total"
_FIRST, _FIRST_COUNT = "llmserve_first_token_seconds_sum", "llmserve_first_token_seconds_count"
_LATER, _LATER_COUNT = "llmserve_token_seconds_sum", "llmserve_token_seconds_count"
_COUNTERS = {
    _READ: "Prompt tokens of requests taken in",
    _WRITTEN: "Tokens made",
    _FIRST: "Time from a request's arrival to its first token",
    _FIRST_COUNT: "Requests that got a first token",
    _LATER: "Time between tokens after the first",
    _LATER_COUNT: "Tokens after the first",
}
_INTERVAL = 0.25


@dataclass
class _Course:
    began: float
    first_token: float = 0.0
    counted: int = 0


class Metrics:
    """Gathers figures at no cost and hands them to Triton a few times a second.

    Each hand-over crosses to Triton's process, so one thread at a time makes them.
    """

    def __init__(self, parts: Parts, engine: Stepper, now: float) -> None:
        self._engine = engine
        self._courses: WeakKeyDictionary[Job, _Course] = WeakKeyDictionary()
        self._counted = dict.fromkeys(_COUNTERS, 0.0)
        self._told: dict[str, float] = {}
        family = parts.pb_utils.MetricFamily
        # A family has to stay referenced as long as its metrics are used.
        gauges = {name: (text, family.GAUGE) for name, (_, text) in _GAUGES.items()}
        counters = {name: (text, family.COUNTER) for name, text in _COUNTERS.items()}
        self.families = {name: family(name, *of) for name, of in (gauges | counters).items()}
        # When a model is loaded anew its old process goes after the new one has come, and Triton
        # drops a metric of the same labels for both, though the new one still writes to it.
        labels = {"model": parts.name, "process": str(os.getpid())}
        self._metrics = {name: made.Metric(labels=labels) for name, made in self.families.items()}
        self._published = now
        self.publish(now, at_once=True)

    def close(self) -> None:
        """Let go of all metrics; one that outlived Triton's memory would crash the process."""
        self._metrics.clear()
        self.families.clear()

    def began(self, job: Job, now: float) -> None:
        self._courses[job] = _Course(now)
        self._counted[_READ] += sum(len(g.prompt_ids) for g in job.generations)

    def made(self, job: Job, now: float) -> None:
        """Take note of what a request got since the last time."""
        course = self._courses[job]
        new = sum(len(generation.token_ids) for generation in job.generations) - course.counted
        if not new:
            return
        if not course.counted:
            course.first_token = now
            self._counted[_FIRST] += now - course.began
            self._counted[_FIRST_COUNT] += 1
        course.counted += new
        self._counted[_WRITTEN] += new
        if job.done and course.counted > 1:
            self._counted[_LATER] += now - course.first_token
            self._counted[_LATER_COUNT] += course.counted - 1

    def publish(self, now: float, *, at_once: bool) -> None:
        """Hand over what has changed, if the last time is long enough ago."""
        if not at_once and now - self._published < _INTERVAL:
            return
        self._published = now
        gauges = {name: float(read(self._engine)) for name, (read, _) in _GAUGES.items()}
        for name, value in (gauges | self._counted).items():
            before = self._told.get(name, 0.0)
            if value == before:
                continue
            self._told[name] = value
            if name in gauges:
                self._metrics[name].set(value)
            else:
                self._metrics[name].increment(value - before)
