"""The figures of runs as rows of text, for the command line and for reports.

The first rows have the words of TensorRT-LLM's ``identity_test.py``, which people know.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from llmserve.measure.runs import ModelFigures, Run, Sampled
from llmserve.measure.summary import Spread, Summary, summarize

_SAMPLED = {
    "nv_gpu_utilization": ("GPU utilization", " (%)", 100.0),
    "nv_gpu_memory_used_bytes": ("GPU memory", " (GB)", 1e-9),
    "nv_gpu_power_usage": ("GPU power", " (W)", 1.0),
    "nv_cpu_utilization": ("CPU utilization", " (%)", 100.0),
    "nv_cpu_memory_used_bytes": ("CPU memory", " (GB)", 1e-9),
    "nv_pinned_memory_pool_used_bytes": ("pinned memory", " (MB)", 1e-6),
}


@dataclass(frozen=True)
class Row:
    """A figure: what it is called, its value where there is one, and how it is written.

    ``name`` is that of the figure in a tool's :attr:`ToolFigures.figures`, or empty.
    """

    label: str
    value: float | None
    name: str = ""

    @property
    def text(self) -> str:
        """Write the value; a figure that does not exist is a dash."""
        return "-" if self.value is None else f"{self.value:.2f}"


def rows(run: Run) -> list[Row]:
    """Give every figure of a run in the order in which they are read."""
    found = summarize(run)
    return [*_seeds_words(found), *_streaming(found), *_goodput(run, found), *_server(run)]


def shown(tables: Sequence[Sequence[Row]]) -> list[list[Row]]:
    """Leave out the rows that no run has a value for."""
    labels = {row.label for table in tables for row in table if row.value is not None}
    return [[row for row in table if row.label in labels] for table in tables]


def _seeds_words(found: Summary) -> list[Row]:
    latency = found.latency
    return [
        Row("Requests/Sec", found.requests_per_second, "requests_per_second"),
        Row("OP tokens/sec", found.output_tokens_per_second, "output_tokens_per_second"),
        Row("Avg. latency (ms)", _part(latency, "mean"), "latency_mean"),
        Row("P50 latency (ms)", _part(latency, "p50"), "latency_p50"),
        Row("P90 latency (ms)", _part(latency, "p90"), "latency_p90"),
        Row("P99 latency (ms)", _part(latency, "p99"), "latency_p99"),
        Row("Avg. IP tokens per request", found.input_tokens),
        Row("Avg. OP tokens per request", found.output_tokens, "output_tokens"),
        Row("Avg. InFlight requests", found.inflight),
        Row("Total latency (ms)", found.seconds * 1000),
        Row("Total requests", float(found.requests), "requests"),
    ]


def _streaming(found: Summary) -> list[Row]:
    parts = (
        ("time to first token", "ttft", found.ttft),
        ("time between tokens", "token_time", found.token_time),
    )
    made = [row for label, name, spread in parts for row in _spread(label, name, spread)]
    gap = found.gap
    return [*made, Row("Longest gap in an answer (ms)", _part(gap, "maximum"))]


def _spread(label: str, name: str, spread: Spread | None) -> list[Row]:
    return [
        Row(f"Avg. {label} (ms)", _part(spread, "mean"), f"{name}_mean"),
        Row(f"P50 {label} (ms)", _part(spread, "p50"), f"{name}_p50"),
        Row(f"P99 {label} (ms)", _part(spread, "p99"), f"{name}_p99"),
    ]


def _goodput(run: Run, found: Summary) -> list[Row]:
    share = found.within_limits
    return [
        Row("Goodput (requests/s within limits)", found.goodput),
        Row("Within limits (%)", None if share is None else share * 100),
        *(Row(f"Errors: {kind}", float(count)) for kind, count in sorted(found.errors.items())),
        Row("Under way at the end", float(run.unfinished) if run.unfinished else None),
    ]


def _server(run: Run) -> list[Row]:
    if run.server is None:
        return []
    # By our own count: an iterative model counts a request at each of its steps.
    sent = len(run.records) + run.unfinished
    return [
        *_models(run.server.models, sent),
        *(row for name, seen in run.server.samples.items() for row in _sampled(name, seen)),
    ]


def _sampled(name: str, seen: Sampled) -> list[Row]:
    what, unit, scale = _SAMPLED.get(name, (name, "", 1.0))
    return [
        Row(f"Server: avg. {what}{unit}", seen.mean * scale),
        Row(f"Server: peak {what}{unit}", seen.peak * scale),
    ]


def _models(models: Sequence[ModelFigures], sent: int) -> list[Row]:
    """Give the rows of a model, or of an ensemble and of its parts.

    Triton knows of an ensemble only how long it took: it waits in no queue and makes no batches.
    Its parts are called by what is theirs alone, so that those of two builds stand side by side.
    """
    if len(models) < 2:
        return [row for model in models for row in _model("Server", model, sent)]
    whole, *parts = models
    return [
        Row("Server: avg. in all (ms)", whole.success / sent * 1000 if sent else None),
        Row("Server: executions", float(whole.executions)),
        *(
            row
            for part in parts
            for row in _model(f"Server, {part_name(part.model, whole.model)}", part, sent)
        ),
    ]


def part_name(part: str, whole: str) -> str:
    """Shorten a part's name, which begins with that of the model it belongs to.

    >>> part_name("demo_preprocessing", "demo"), part_name("preprocessing", "ensemble")
    ('preprocessing', 'preprocessing')
    """
    return part.removeprefix(f"{whole}_")


def _model(where: str, model: ModelFigures, sent: int) -> list[Row]:
    def per_request(total: float) -> float | None:
        return total / sent * 1000 if sent else None

    mean_batch = model.inferences / model.executions if model.executions else None
    return [
        Row(f"{where}: avg. queue (ms)", per_request(model.queue), "server_queue"),
        Row(f"{where}: avg. compute input (ms)", per_request(model.compute_input)),
        Row(
            f"{where}: avg. compute infer (ms)",
            per_request(model.compute_infer),
            "server_compute_infer",
        ),
        Row(f"{where}: avg. compute output (ms)", per_request(model.compute_output)),
        Row(f"{where}: avg. batch size", mean_batch),
        Row(f"{where}: executions", float(model.executions)),
    ]


def _part(spread: Spread | None, name: str) -> float | None:
    return None if spread is None else float(getattr(spread, name)) * 1000
