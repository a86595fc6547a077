"""NVIDIA's perf_analyzer and AIPerf on the same model, with the same requests."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sysconfig
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from llmserve.client import ModelInfo
from llmserve.errors import LLMServeError, UsageError
from llmserve_bench.figures import distribution
from llmserve_bench.prompts import Request
from llmserve_bench.results import Load, ToolFigures
from llmserve_bench.targets import Target


@dataclass(frozen=True)
class Tool:
    name: str
    hint: str
    arguments: Callable[[Target, ModelInfo, Load, Sequence[Request], Path], list[str]]
    read: Callable[[Path], dict[str, float]]

    def check(self) -> tuple[Path, str]:
        """Find the tool and read its version, before anything is measured."""
        variable = f"LLMSERVE_{self.name.upper()}"
        configured, scripts = os.environ.get(variable), sysconfig.get_path("scripts")
        program = configured or shutil.which(self.name) or shutil.which(self.name, path=scripts)
        if not program or not Path(program).is_file():
            place = f"{variable}={configured}" if configured else "PATH"
            hint = f"{self.hint} and set {variable} to its path"
            raise LLMServeError(f"there is no {self.name} at {place}", hint=hint)
        version = self.run([program, "--version"], Path.cwd(), timeout=60).strip()
        return Path(program), version.removeprefix("Perf Analyzer Version ").split(" ")[0]

    def measure(
        self, target: Target, info: ModelInfo, load: Load, requests: Sequence[Request]
    ) -> ToolFigures:
        """Measure the same load as a run, or raise a one-line error if the tool cannot."""
        if info.exchange == "sequence":
            problem = f"{self.name} does not support the sequences of {info.name!r}"
            raise UsageError(problem, hint=f"leave out --tool {self.name}")
        program, version = self.check()
        with tempfile.TemporaryDirectory(prefix="llmserve-tool-") as folder:
            arguments = self.arguments(target, info, load, requests, Path(folder))
            self.run([str(program), *arguments], Path(folder))
            try:
                figures = self.read(Path(folder))
            except (OSError, ValueError, LookupError, TypeError):
                problem = f"{self.name} wrote no figures"
                raise LLMServeError(problem, hint="run it by hand") from None
        return ToolFigures(self.name, version, shlex.join([self.name, *arguments]), figures)

    def run(self, command: Sequence[str], folder: Path, timeout: float = 1800.0) -> str:
        try:
            process = subprocess.run(
                command, cwd=folder, env=_environment(), stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE, stderr=subprocess.STDOUT, encoding="utf-8",
                errors="replace", timeout=timeout, check=False,
            )  # fmt: skip
        except OSError as error:
            problem = f"{self.name} cannot be run: {error.strerror}"
            raise LLMServeError(problem, hint=self.hint) from None
        except subprocess.TimeoutExpired:
            problem = f"{self.name} did not finish within {timeout:.0f} s"
            raise LLMServeError(problem, hint="give fewer --requests") from None
        if process.returncode == 0:
            return process.stdout
        last = [line.strip() for line in process.stdout.splitlines() if line.strip()][-3:]
        problem = f"{self.name} failed (exit code {process.returncode}): {' / '.join(last)}"
        missing = "shared libraries" in process.stdout
        raise LLMServeError(problem, hint=self.hint if missing else "")


def _environment() -> dict[str, str]:
    """Return the environment for a tool, with the CUDA runtime if its wheel is installed."""
    libraries = Path(sysconfig.get_path("purelib")) / "nvidia" / "cuda_runtime" / "lib"
    paths = [os.environ.get("LD_LIBRARY_PATH", ""), str(libraries) if libraries.is_dir() else ""]
    # With HF_HUB_OFFLINE, AIPerf does not even read a tokenizer from a folder.
    kept = {key: value for key, value in os.environ.items() if key != "HF_HUB_OFFLINE"}
    return {**kept, "LD_LIBRARY_PATH": os.pathsep.join(path for path in paths if path)}


def _perf_analyzer_arguments(
    target: Target, info: ModelInfo, load: Load, requests: Sequence[Request], folder: Path
) -> list[str]:
    streams = "stream" in info.inputs and info.exchange == "stream"
    rows = []
    for request in requests:
        options = {**request.options, **({"stream": load.stream} if streams else {})}
        if unknown := sorted(options.keys() - info.inputs.keys()):
            raise UsageError(
                f"perf_analyzer sends options as inputs, and {info.name!r} has no {unknown[0]}",
                hint="leave out its --set, or --tool perf_analyzer",
            )
        values = {"text_input": request.prompt, **options}
        rows.append(
            {name: _perf_analyzer_data(info.inputs[name].dims, v) for name, v in values.items()}
        )
    (folder / "inputs.json").write_text(json.dumps({"data": rows}), encoding="utf-8")
    arguments = [
        "-m", info.name, "-u", target.url, "-i", "grpc", "--async",
        "--input-data", "inputs.json", "--profile-export-file", "profile.json",
        *(["--streaming"] if info.exchange == "stream" else []),
    ]  # fmt: skip
    if load.rate is None:
        arguments += ["--concurrency-range", str(load.concurrency)]
    else:
        # The intervals are listed one by one, so that arrivals are the same as ours.
        times = [request.due or 0.0 for request in requests]
        gaps = [b - a for a, b in pairwise(times)] or [1 / load.rate]
        lines = "".join(f"{max(1, round(gap * 1e6))}\n" for gap in gaps)
        (folder / "intervals.txt").write_text(lines, encoding="utf-8")
        arguments += ["--request-intervals", "intervals.txt"]
    return [*arguments, "--request-count", str(load.requests)]


def _perf_analyzer_data(dims: Sequence[int], value: Any) -> Any:
    """Return an input's values as perf_analyzer reads them: with a shape if the model has none."""
    values = value if isinstance(value, list) else [value]
    if min(dims, default=1) > 0:
        return values
    return {"content": values, "shape": [*([1] * (len(dims) - 1)), len(values)]}


def _read_perf_analyzer(folder: Path) -> dict[str, float]:
    # With a request count it checks only once a second whether they are done, and its rate includes
    # the time until that check. Its timestamps contain all that is needed.
    content = json.loads((folder / "profile.json").read_text(encoding="utf-8"))
    requests = [r for r in content["experiments"][0]["requests"] if r["response_timestamps"]]
    began = min(request["timestamp"] for request in requests)
    ended = max(request["response_timestamps"][-1] for request in requests)
    times = [[(at - r["timestamp"]) / 1e9 for at in r["response_timestamps"]] for r in requests]
    figures = {
        "requests": float(len(requests)),
        "requests_per_second": len(requests) / ((ended - began) / 1e9),
        **distribution("latency", [answer[-1] for answer in times]),
    }
    if any(len(answer) > 1 for answer in times):
        figures |= distribution("ttft", [answer[0] for answer in times])
    return figures


def _aiperf_arguments(
    target: Target, info: ModelInfo, load: Load, requests: Sequence[Request], folder: Path
) -> list[str]:
    streams = load.stream and info.exchange == "stream"
    sessions = []
    for request in requests:
        extra = {"stream": True} if streams else {}
        payload = {"text_input": request.prompt, **request.options, **extra}
        sessions.append({"session_id": str(request.index), "payloads": [payload]})
    (folder / "inputs.json").write_text(json.dumps({"data": sessions}), encoding="utf-8")
    tokenizer = target.tokenizer
    if tokenizer is None and target.repository is not None:
        tokenizer = target.repository / target.model / "1" / "tokenizer"
    if tokenizer is None or not tokenizer.is_dir():
        raise UsageError("AIPerf counts tokens itself", hint="name a tokenizer with --tokenizer")
    arguments = [
        "profile", "-m", info.name, "-u", target.triton.http, "--endpoint-type", "raw",
        "--endpoint", f"/v2/models/{info.name}/generate{'_stream' if streams else ''}",
        "--input-file", "inputs.json", "--custom-dataset-type", "inputs-json",
        "--extra-inputs", "response_field:text_output", "--tokenizer", str(tokenizer.absolute()),
        "--request-count", str(load.requests), "--artifact-dir", "artifacts",
        "--no-auto-plot", "--ui", "none", *(["--streaming"] if streams else []),
    ]  # fmt: skip
    if load.rate is None:
        return [*arguments, "--concurrency", str(load.concurrency)]
    pattern = ["--request-rate", str(load.rate), "--arrival-pattern", load.arrivals]
    return [*arguments, *pattern, "--random-seed", str(load.seed)]


_RATES = {
    "request_throughput": "requests_per_second",
    "output_token_throughput": "output_tokens_per_second",
    "request_count": "requests",
    "output_sequence_length": "output_tokens",
}
_TIMES = {
    "request_latency": "latency",
    "time_to_first_token": "ttft",
    "inter_token_latency": "token_time",
}


def _read_aiperf(folder: Path) -> dict[str, float]:
    text = (folder / "artifacts" / "profile_export_aiperf.json").read_text(encoding="utf-8")
    content = json.loads(text)
    figures = {name: float(content[key]["avg"]) for key, name in _RATES.items() if key in content}
    for key, name in _TIMES.items():
        for part, ours in (("avg", "mean"), ("p50", "p50"), ("p90", "p90"), ("p99", "p99")):
            if content.get(key, {}).get(part) is not None:
                figures[f"{name}_{ours}"] = float(content[key][part]) / 1000
    return figures


TOOLS = {
    "perf_analyzer": Tool(
        "perf_analyzer",
        "the package of that name on PyPI is empty: take bin/perf_analyzer from the wheel of "
        "tritonclient 2.51.0, install libb64 (Debian: libb64-0d) and the CUDA runtime "
        "(nvidia-cuda-runtime-cu12) for it",
        _perf_analyzer_arguments,
        _read_perf_analyzer,
    ),
    "aiperf": Tool(
        "aiperf",
        "install aiperf in a separate environment (it is large)",
        _aiperf_arguments,
        _read_aiperf,
    ),
}
