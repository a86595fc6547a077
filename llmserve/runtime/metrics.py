"""Metrics of a model that is run step by step, published in Triton's ``/metrics``."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from weakref import WeakKeyDictionary

from llmserve.runtime.drivers.job import Job
from llmserve.runtime.protocols import Parts, Stepper

_GAUGES: dict[str, tuple[Callable[[Stepper], int], str]] = {
    "llmserve_running_sequences": (lambda engine: engine.live, "Sequences in flight"),
    "llmserve_waiting_sequences": (
        lambda engine: engine.waiting, "Sequences waiting for space in the cache"
    ),
    "llmserve_cache_used_tokens": (
        lambda engine: engine.cache_used, "Tokens in the cache of sequences in flight"
    ),
    "llmserve_cache_tokens": (
        lambda engine: engine.cache_tokens, "Capacity of the cache in tokens; 0 if unknown"
    ),
}  # fmt: skip
_INPUT, _OUTPUT = "llmserve_input_tokens_total", "llmserve_output_tokens_total"
_CACHED = "llmserve_cached_tokens_total"
_FIRST, _FIRST_COUNT = "llmserve_first_token_seconds_sum", "llmserve_first_token_seconds_count"
_LATER, _LATER_COUNT = "llmserve_token_seconds_sum", "llmserve_token_seconds_count"
_COUNTERS = {
    _INPUT: "Prompt tokens of accepted requests",
    _CACHED: "Prompt tokens that were in the cache already, of requests with a first token",
    _OUTPUT: "Generated tokens",
    _FIRST: "Time from a request's arrival to its first token",
    _FIRST_COUNT: "Requests that got a first token",
    _LATER: "Time between tokens after the first",
    _LATER_COUNT: "Tokens after the first",
}
# What an engine counts itself, if it has these attributes.
_OF_ENGINE = {
    "llmserve_guessed_tokens_total": ("guessed_tokens", "Guesses of tokens that were checked"),
    "llmserve_accepted_tokens_total": ("accepted_tokens", "Guesses of tokens that were right"),
    "llmserve_warm_tokens_total": (
        "warm_tokens",
        "Tokens whose pages were read from disk instead of computed",
    ),
    "llmserve_warm_bytes_total": ("warm_bytes", "Bytes of these pages"),
    "llmserve_warm_saved_seconds_total": (
        "seconds_saved",
        "Time that these tokens would have taken longer to compute",
    ),
}
_INTERVAL = 0.25


@dataclass
class _Progress:
    began_at: float
    first_token_at: float = 0.0
    counted: int = 0


class Metrics:
    """Collects metrics cheaply and passes them to Triton a few times a second.

    Each update is a call into Triton's process, so only one thread at a time may publish.
    """

    def __init__(self, parts: Parts, engine: Stepper, now: float) -> None:
        self._engine = engine
        self._progress: WeakKeyDictionary[Job, _Progress] = WeakKeyDictionary()
        self._totals = dict.fromkeys(_COUNTERS, 0.0)
        self._published_values: dict[str, float] = {}
        family = parts.pb_utils.MetricFamily
        # A family must stay referenced as long as its metrics are used.
        gauges = {name: (text, family.GAUGE) for name, (_, text) in _GAUGES.items()}
        counted = _COUNTERS | {name: text for name, (_, text) in _OF_ENGINE.items()}
        counters = {name: (text, family.COUNTER) for name, text in counted.items()}
        self.families = {name: family(name, *args) for name, args in (gauges | counters).items()}
        # When a model is reloaded, its old process ends after the new one has started. Triton then
        # drops metrics with the same labels for both, though the new one still writes to them.
        labels = {"model": parts.name, "process": str(os.getpid())}
        self._metrics = {name: item.Metric(labels=labels) for name, item in self.families.items()}
        self._published_at = now
        self.publish(now, at_once=True)

    def close(self) -> None:
        """Release all metrics; one that outlived Triton's memory would crash the process."""
        self._metrics.clear()
        self.families.clear()

    def began(self, job: Job, now: float) -> None:
        self._progress[job] = _Progress(now)
        self._totals[_INPUT] += sum(len(g.prompt_ids) for g in job.generations)

    def made(self, job: Job, now: float) -> None:
        """Count the tokens that a request has got since the last call."""
        progress = self._progress[job]
        new = sum(len(generation.token_ids) for generation in job.generations) - progress.counted
        if not new:
            return
        if not progress.counted:
            progress.first_token_at = now
            self._totals[_FIRST] += now - progress.began_at
            self._totals[_FIRST_COUNT] += 1
            self._totals[_CACHED] += sum(g.cached_tokens or 0 for g in job.generations)
        progress.counted += new
        self._totals[_OUTPUT] += new
        if job.done and progress.counted > 1:
            self._totals[_LATER] += now - progress.first_token_at
            self._totals[_LATER_COUNT] += progress.counted - 1

    def publish(self, now: float, *, at_once: bool) -> None:
        """Pass changed values to Triton, if the last update is long enough ago."""
        if not at_once and now - self._published_at < _INTERVAL:
            return
        self._published_at = now
        gauges = {name: float(read(self._engine)) for name, (read, _) in _GAUGES.items()}
        counted = {
            name: float(getattr(self._engine, attribute, 0))
            for name, (attribute, _) in _OF_ENGINE.items()
        }
        for name, value in (gauges | self._totals | counted).items():
            previous = self._published_values.get(name, 0.0)
            if value == previous:
                continue
            self._published_values[name] = value
            if name in gauges:
                self._metrics[name].set(value)
            else:
                self._metrics[name].increment(value - previous)
