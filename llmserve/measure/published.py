"""What is published on ``/metrics``: by models of themselves, and by Triton of the machine."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from urllib.parse import urlsplit

from llmserve.server.backends.telling import METRIC

_PATIENCE = 5.0
_LINE = re.compile(r"([A-Za-z_:][\w:]*)(?:\{(.*)\})? +([-+.\deE]+)(?: |$)")
_TYPE = re.compile(r"# TYPE ([A-Za-z_:][\w:]*) +(\w+)")
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')
_SUMS = ("_total", "_sum", "_count")
MACHINE = (
    "nv_gpu_utilization",
    "nv_gpu_memory_used_bytes",
    "nv_gpu_power_usage",
    "nv_cpu_utilization",
    "nv_cpu_memory_used_bytes",
    "nv_pinned_memory_pool_used_bytes",
)
"""What Triton tells of the machine; the rest of its own the statistics tell with more precision."""
_SHARES = ("nv_gpu_utilization", "nv_cpu_utilization")


@dataclass(frozen=True)
class Page:
    """The page at a moment: ``sums`` only grow, ``gauges`` rise and fall."""

    sums: Mapping[str, float] = field(default_factory=dict)
    gauges: Mapping[str, float] = field(default_factory=dict)


def fetch(url: str) -> str | None:
    """Get the page; None where there is none."""
    from http.client import HTTPConnection, HTTPException, HTTPSConnection

    try:
        # Not urllib, which would ask a proxy for this machine's own address.
        parts = urlsplit(url if "//" in url else f"http://{url}")
        kind = HTTPSConnection if parts.scheme == "https" else HTTPConnection
        connection = kind(parts.hostname or "", parts.port, timeout=_PATIENCE)
        try:
            connection.request("GET", parts.path.rstrip("/") or "/metrics")
            answer = connection.getresponse()
            return answer.read().decode(errors="replace") if answer.status == 200 else None
        finally:
            connection.close()
    except (OSError, HTTPException, ValueError):
        return None


def read_page(text: str, models: Sequence[str]) -> Page:
    """Read what these models publish, and what Triton tells of the machine.

    Labels are added up, but for shares of a device, of which it is the mean.

    >>> read_page('acme_tokens_total{model="demo",version="1"} 7', ["demo"]).sums
    {'acme_tokens_total': 7.0}
    """
    kinds = dict(_TYPE.findall(text))
    found: dict[str, list[float]] = {}
    for name, labels, value in _lines(text):
        if (name.startswith("nv_") and name not in MACHINE) or name == METRIC:
            continue
        # Cumulative buckets and quantiles make no sense added up; their sum and count do.
        if labels.keys() & {"le", "quantile"}:
            continue
        if "model" in labels and labels["model"] not in models:
            continue
        found.setdefault(name, []).append(value)
    sums, gauges = {}, {}
    for name, values in found.items():
        if name in _SHARES:
            gauges[name] = sum(values) / len(values)
        elif kinds.get(name) == "counter" or (name not in kinds and name.endswith(_SUMS)):
            sums[name] = sum(values)
        else:
            gauges[name] = sum(values)
    return Page(sums, gauges)


def labels_of(text: str, metric: str) -> list[dict[str, str]]:
    """Give the labels of all values of a metric that are not 0.

    >>> labels_of('acme{model="demo"} 1', "acme")
    [{'model': 'demo'}]
    """
    return [labels for name, labels, value in _lines(text) if name == metric and value]


def _lines(text: str) -> Iterator[tuple[str, dict[str, str], float]]:
    for line in text.splitlines():
        match = _LINE.match(line)
        if match is None:
            continue
        try:
            value = float(match[3])
        except ValueError:
            continue
        if math.isfinite(value):
            yield match[1], dict(_LABEL.findall(match[2] or "")), value
