"""A dashboard for Grafana and alerts for Prometheus, from two tables of queries."""

from __future__ import annotations

import re
from typing import Any

from llmserve_deploy.description import Deployment
from llmserve_deploy.kubernetes import manifest
from llmserve_deploy.pods import Data


def _quantile(share: float, series: str, window: str, by: str = "le, model_name") -> str:
    return f"histogram_quantile({share}, sum by ({by}) (rate({series}_bucket[{window}])))"


def _rate(series: str, by: str, window: str = "$__rate_interval") -> str:
    return f"sum by ({by}) (rate({series}[{window}]))"


def _seconds(title: str, series: str) -> tuple[str, str, dict[str, str]]:
    window = "$__rate_interval"
    shares = {"p50": 0.5, "p95": 0.95, "p99": 0.99}
    queries = {
        f"{{{{model_name}}}} {name}": _quantile(share, series, window)
        for name, share in shares.items()
    }
    return title, "s", queries


_MODEL = "{{model_name}}"
# Title, unit, and queries by their legend.
PANELS: tuple[tuple[str, str, dict[str, str]], ...] = (
    ("Requests in flight", "short", {
        _MODEL: "sum by (model_name) (vllm:num_requests_running)",
        "waiting": "sum(vllm:num_requests_waiting)",
    }),
    ("Requests finished", "reqps", {
        "{{model_name}} {{outcome}}": _rate("llmserve_requests_total", "model_name, outcome"),
    }),
    ("Requests refused, by status", "reqps", {
        "{{status}}": _rate("llmserve_refused_total", "status"),
    }),
    ("Tokens per second", "short", {
        "{{model_name}} prompt": _rate("vllm:prompt_tokens_total", "model_name"),
        "{{model_name}} generated": _rate("vllm:generation_tokens_total", "model_name"),
    }),
    _seconds("Time to the first token", "vllm:time_to_first_token_seconds"),
    _seconds("Time between tokens", "vllm:request_time_per_output_token_seconds"),
    _seconds("Request latency", "vllm:e2e_request_latency_seconds"),
    _seconds("Time in the gateway's queue", "vllm:request_queue_time_seconds"),
    ("Triton: queue to compute", "short", {
        "{{model}}": f'{_rate("nv_inference_queue_duration_us", "model")} / clamp_min('
                     f'{_rate("nv_inference_compute_infer_duration_us", "model")}, 1)',
    }),
    ("Triton: failures", "reqps", {
        "{{model}} {{reason}}": _rate("nv_inference_request_failure", "model, reason"),
    }),
)  # fmt: skip

_FINISHED = _rate("llmserve_requests_total", "model_name", "5m")
_FAILED = _rate('llmserve_requests_total{outcome="failed"}', "model_name", "5m")
_FULL = 'llmserve_refused_total{status="429"}'
# Name, query, duration, severity, and meaning.
ALERTS = (
    ("LLMServeGone", "absent(vllm:num_requests_waiting)", "2m", "critical",
          "No gateway reports its metrics"),
    ("LLMServeFailing", f"{_FAILED} / {_FINISHED} > 0.05", "5m", "critical",
          "More than one request in twenty fails"),
    ("LLMServeFull", f"sum(rate({_FULL}[5m])) > 0", "5m", "warning",
          "Requests are refused because a queue is full or a key is over its budget"),
    ("LLMServeWaiting", "min_over_time(sum(vllm:num_requests_waiting)[10m:30s]) > 0", "0m",
          "warning", "For ten minutes, at least one request has always been waiting"),
    ("LLMServeSlowFirstToken",
          f'{_quantile(0.95, "vllm:time_to_first_token_seconds", "5m")} > 5', "10m", "warning",
          "One stream in twenty waits more than 5 s for its first token"),
)  # fmt: skip


_SERIES = re.compile(r"\b((?:vllm:|llmserve_|nv_)\w+)({?)")


def dashboard_files(d: Deployment, *, operator: bool) -> dict[str, Any]:
    """Return both; with Prometheus' ``operator``, the alerts are a Kubernetes object.

    With it, both select only this deployment's pods, by the job that the PodMonitor sets.
    """
    label = f'job="{d.name}"' if operator else ""
    rules = [_rule(name, _only(label, query), *more) for name, query, *more in ALERTS]
    groups = {"groups": [{"name": d.name, "rules": rules}]}
    return {
        "dashboard.json": _dashboard(d, label),
        "alerts.yaml": manifest("monitoring.coreos.com/v1", "PrometheusRule", d, groups)
        if operator
        else groups,
    }


def _only(label: str, query: str) -> str:
    """Restrict every series of a query to those with a label."""

    def narrow(series: re.Match[str]) -> str:
        return f"{series[1]}{{{label}{',' if series[2] else '}'}"

    return _SERIES.sub(narrow, query) if label else query


def _rule(name: str, query: str, duration: str, severity: str, summary: str) -> Data:
    return {
        "alert": name,
        "expr": query,
        "for": duration,
        "labels": {"severity": severity},
        "annotations": {"summary": summary},
    }


_WIDTH, _HEIGHT = 12, 8


def _dashboard(d: Deployment, label: str) -> Data:
    source = {"type": "prometheus", "uid": "${source}"}
    panels = []
    for at, (title, unit, queries) in enumerate(PANELS):
        row, column = divmod(at, 2)
        place = {"h": _HEIGHT, "w": _WIDTH, "x": column * _WIDTH, "y": row * _HEIGHT}
        panels.append({
            "id": at + 1,
            "type": "timeseries",
            "title": title,
            "datasource": source,
            "gridPos": place,
            "fieldConfig": {"defaults": {"unit": unit, "min": 0}, "overrides": []},
            "targets": [
                {"refId": chr(ord("A") + number), "expr": _only(label, query),
                 "legendFormat": legend, "datasource": source}
                for number, (legend, query) in enumerate(queries.items())
            ],
        })  # fmt: skip
    return {
        "uid": d.name,
        "title": f"llmserve: {d.name}",
        "schemaVersion": 39,
        "time": {"from": "now-1h", "to": "now"},
        "refresh": "10s",
        "templating": {
            "list": [{"name": "source", "label": "Source", "type": "datasource",
                      "query": "prometheus"}],
        },
        "panels": panels,
    }  # fmt: skip
