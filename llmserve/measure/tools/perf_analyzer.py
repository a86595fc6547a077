"""NVIDIA's perf_analyzer: inputs as it wants them, and its CSV and profile as figures."""

from __future__ import annotations

import csv
import json
import shlex
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from llmserve.client.model import ModelInfo
from llmserve.errors import LLMServeError, UsageError
from llmserve.measure.bench import Target
from llmserve.measure.job import Ask
from llmserve.measure.runs import Load, ToolFigures
from llmserve.measure.summary import Spread
from llmserve.measure.tools import process

VARIABLE = "LLMSERVE_PERF_ANALYZER"
MEND = (
    "the package of that name on PyPI is empty; take bin/perf_analyzer out of the wheel of "
    f"tritonclient 2.51.0, name it with {VARIABLE}, and have libb64 (Debian: libb64-0d) and the "
    "CUDA runtime (pip install nvidia-cuda-runtime-cu12) for it"
)
_PATIENCE = 1800.0
_MICRO = 1e6
_NANO = 1e9
# What it calls its latencies in the CSV, in microseconds.
_COLUMNS = {
    "Avg latency": "latency_mean",
    "p50 latency": "latency_p50",
    "p90 latency": "latency_p90",
    "p99 latency": "latency_p99",
    "Server Queue": "server_queue",
    "Server Compute Infer": "server_compute_infer",
}


def check() -> tuple[Path, str]:
    """Find it and ask for its version, so that what is missing is told before anything runs."""
    program = process.find("perf_analyzer", VARIABLE, MEND)
    said = process.run([str(program), "--version"], Path.cwd(), timeout=30, mend=MEND)
    return program, said.strip().removeprefix("Perf Analyzer Version ").split(" ")[0]


def measure(
    target: Target, info: ModelInfo, load: Load, asks: Sequence[Ask], folder: Path
) -> ToolFigures:
    """Run perf_analyzer under a load and read what it found."""
    if info.exchange == "sequence":
        raise UsageError(
            "perf_analyzer steps through sequences of a length that it chooses itself, so its "
            "figures would be of something else",
            mend="leave out --tool perf-analyzer",
        )
    program, version = check()
    (folder / "inputs.json").write_text(json.dumps(inputs(info, load, asks)), encoding="utf-8")
    command = [str(program), *arguments(target, info, load, asks, folder)]
    try:
        process.run(command, folder, timeout=_PATIENCE, mend=MEND)
    except LLMServeError as error:
        if "START flag" in error.problem:
            raise UsageError(
                f"perf_analyzer makes sequences of its requests to {info.name!r}, because it is "
                "scheduled like one, and steps that it does not understand",
                mend="use --tool aiperf, which asks it as any client does",
            ) from None
        raise
    return ToolFigures(
        tool="perf-analyzer",
        version=version,
        command=shlex.join(["perf_analyzer", *command[1:]]),
        figures={**read_csv(folder / "figures.csv"), **read_profile(folder / "profile.json")},
    )


def arguments(
    target: Target, info: ModelInfo, load: Load, asks: Sequence[Ask], folder: Path
) -> list[str]:
    """Say the load in its words; arrivals are given to it one by one, so that they are the same."""
    said = [
        "-m", info.name, "-u", target.place.url, "-i", "grpc", "--async",
        "--input-data", "inputs.json", "-f", "figures.csv", "--verbose-csv",
        "--profile-export-file", "profile.json",
    ]  # fmt: skip
    if info.exchange == "stream":
        said.append("--streaming")
    if load.rate is None:
        said += ["--concurrency-range", str(load.concurrency)]
    else:
        times = [ask.at or 0.0 for ask in asks]
        gaps = [b - a for a, b in pairwise(times)] or [1 / load.rate]
        lines = "\n".join(str(max(1, round(gap * _MICRO))) for gap in gaps)
        (folder / "intervals.txt").write_text(f"{lines}\n", encoding="utf-8")
        said += ["--request-intervals", "intervals.txt"]
    return [*said, "--request-count", str(load.requests or len(asks))]


def inputs(info: ModelInfo, load: Load, asks: Sequence[Ask]) -> dict[str, Any]:
    """Give the requests as its ``--input-data``; options can go as inputs only."""
    rows = []
    for ask in asks:
        options = dict(ask.options)
        if "stream" in info.inputs and info.exchange == "stream":
            options["stream"] = load.stream
        strange = sorted(options.keys() - info.inputs.keys())
        if strange:
            raise UsageError(
                f"perf_analyzer sends options as inputs, and {info.name!r} has no {strange[0]}",
                mend="leave out --set of it, or --tool perf-analyzer",
            )
        values = {
            key: value if isinstance(value, list) else [value] for key, value in options.items()
        }
        rows.append({"text_input": [ask.prompt], **values})
    return {"data": rows}


def read_csv(path: Path) -> dict[str, float]:
    """Read its own figures, in our units and by our names; its rate is in its profile."""
    try:
        with path.open(encoding="utf-8", newline="") as stream:
            row = next(csv.DictReader(stream))
    except (OSError, StopIteration):
        raise LLMServeError("perf_analyzer wrote no figures", mend="run it by hand") from None
    figures: dict[str, float] = {}
    for column, name in _COLUMNS.items():
        if row.get(column):
            figures[name] = float(row[column]) / _MICRO
    return figures


def read_profile(path: Path) -> dict[str, float]:
    """Work out of its time stamps what its CSV does not have, or not well.

    With a number of requests it looks only once a second whether they are done, and counts the
    time until it has looked: 40 requests of 1.0 s become 20 a second.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        told: list[Mapping[str, Any]] = content["experiments"][0]["requests"]
    except (OSError, ValueError, LookupError, TypeError):
        return {}
    requests = [request for request in told if request["response_timestamps"]]
    if not requests:
        return {}
    ends = [request["response_timestamps"][-1] for request in requests]
    begins = [request["timestamp"] for request in requests]
    figures = {
        "requests": float(len(requests)),
        "requests_per_second": len(requests) / ((max(ends) - min(begins)) / _NANO),
    }
    if not any(len(request["response_timestamps"]) > 1 for request in requests):
        return figures
    first = Spread.of(
        [(request["response_timestamps"][0] - request["timestamp"]) / _NANO for request in requests]
    )
    if first is not None:
        figures |= {"ttft_mean": first.mean, "ttft_p50": first.p50, "ttft_p99": first.p99}
    return figures
