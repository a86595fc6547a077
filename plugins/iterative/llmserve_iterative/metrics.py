"""Figures for Triton's ``/metrics``, beside those that Triton has itself."""

from __future__ import annotations

import os
from typing import Any

from llmserve.runtime import Stepper

_GAUGES = {
    "running_sequences": ("live", "Sequences under way"),
    "waiting_sequences": ("waiting", "Sequences that wait for room in the cache"),
    "cache_used_tokens": ("cache_used", "Tokens in the cache of sequences under way"),
    "cache_tokens": ("cache_tokens", "Tokens that the cache has room for"),
}
_COUNTERS = {
    "input_tokens_total": "Prompt tokens of requests taken in",
    "output_tokens_total": "Tokens made",
    "first_token_seconds_sum": "Time from a request's arrival to its first token",
    "first_token_seconds_count": "Requests that got a first token",
    "token_seconds_sum": "Time between tokens after the first",
    "token_seconds_count": "Tokens after the first",
}
_INTERVAL = 0.25


class Metrics:
    """Gathers figures at no cost and hands them to Triton a few times a second.

    Each hand-over crosses to Triton's process, and a second thread in the middle of one would
    bring the server down: the driver holds its lock meanwhile.
    """

    def __init__(self, pb_utils: Any, model: str) -> None:
        self._pending = dict.fromkeys(_COUNTERS, 0.0)
        self._published = 0.0
        family = pb_utils.MetricFamily
        # A family has to stay referenced as long as its metrics are used.
        gauges = {name: (text, family.GAUGE) for name, (_, text) in _GAUGES.items()}
        counters = {name: (text, family.COUNTER) for name, text in _COUNTERS.items()}
        self.families = {
            name: family(f"llmserve_{name}", *of) for name, of in (gauges | counters).items()
        }
        # When a model is loaded anew its old process goes after the new one has come, and Triton
        # drops a metric of the same labels for both, though the new one still writes to it.
        labels = {"model": model, "process": str(os.getpid())}
        self._metrics = {name: made.Metric(labels=labels) for name, made in self.families.items()}

    def close(self) -> None:
        """Let go of all metrics; one that outlived Triton's memory would crash the process."""
        self._metrics.clear()
        self.families.clear()

    def count(self, name: str, amount: float) -> None:
        self._pending[name] += amount

    def publish(self, now: float, engine: Stepper, *, at_once: bool) -> None:
        """Hand everything over, if the last time is long enough ago."""
        if not at_once and now - self._published < _INTERVAL:
            return
        self._published = now
        for name, (attribute, _) in _GAUGES.items():
            self._metrics[name].set(getattr(engine, attribute))
        for name, amount in self._pending.items():
            if amount:
                self._metrics[name].increment(amount)
                self._pending[name] = 0.0
