"""NVIDIA's AIPerf: the requests as they are, over HTTP, and its JSON as figures."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from llmserve.client.model import ModelInfo
from llmserve.client.url import parse_url
from llmserve.errors import LLMServeError, UsageError
from llmserve.measure.bench import Target
from llmserve.measure.job import Ask
from llmserve.measure.runs import Load, ToolFigures
from llmserve.measure.tools import process

VARIABLE = "LLMSERVE_AIPERF"
MEND = (
    "pip install aiperf (it is large, so into an environment of its own) and name it with "
    f"{VARIABLE}"
)
_PATIENCE = 1800.0
_PARTS = {"avg": "mean", "p50": "p50", "p90": "p90", "p99": "p99"}
_SPREADS = {
    "request_latency": "latency",
    "time_to_first_token": "ttft",
    "inter_token_latency": "token_time",
}
_RATES = {
    "request_throughput": "requests_per_second",
    "output_token_throughput": "output_tokens_per_second",
    "request_count": "requests",
    "output_sequence_length": "output_tokens",
}


def check() -> tuple[Path, str]:
    """Find it and ask for its version, so that what is missing is told before anything runs."""
    program = process.find("aiperf", VARIABLE, MEND)
    return program, process.run(
        [str(program), "--version"], Path.cwd(), timeout=60, mend=MEND
    ).strip()


def measure(
    target: Target, info: ModelInfo, load: Load, asks: Sequence[Ask], folder: Path
) -> ToolFigures:
    """Run AIPerf under a load and read what it found."""
    if info.exchange == "sequence":
        raise UsageError(
            "AIPerf knows no sequences, so it cannot ask this model",
            mend="leave out --tool aiperf",
        )
    program, version = check()
    streams = info.exchange == "stream"
    content = {"data": [_session(ask, load.stream and streams) for ask in asks]}
    (folder / "inputs.json").write_text(json.dumps(content), encoding="utf-8")
    command = [str(program), *arguments(target, info, load, len(asks))]
    process.run(command, folder, timeout=_PATIENCE, mend=MEND)
    return ToolFigures(
        tool="aiperf",
        version=version,
        command=shlex.join(["aiperf", *command[1:]]),
        figures=read_figures(folder / "artifacts" / "profile_export_aiperf.json"),
    )


def arguments(target: Target, info: ModelInfo, load: Load, count: int) -> list[str]:
    """Say the load in its words."""
    streams = load.stream and info.exchange == "stream"
    address = parse_url(target.place.url)
    # Triton's own ports follow one another: HTTP, gRPC, metrics.
    url = target.http_url or f"http://{address.host}:{address.port - 1}"
    way = "generate_stream" if streams else "generate"
    said = [
        "profile", "-m", info.name, "-u", url, "--endpoint-type", "raw",
        "--endpoint", f"/v2/models/{info.name}/{way}",
        "--input-file", "inputs.json", "--custom-dataset-type", "inputs-json",
        "--extra-inputs", "response_field:text_output",
        "--tokenizer", str(_tokenizer(target)), "--request-count", str(load.requests or count),
        "--artifact-dir", "artifacts", "--no-auto-plot", "--ui", "none",
    ]  # fmt: skip
    if streams:
        said.append("--streaming")
    if load.rate is None:
        return [*said, "--concurrency", str(load.concurrency)]
    arrivals = load.arrivals or "poisson"
    return [
        *said, "--request-rate", str(load.rate), "--arrival-pattern", arrivals,
        "--random-seed", str(load.seed),
    ]  # fmt: skip


def read_figures(path: Path) -> dict[str, float]:
    """Read its figures in our units and by our names."""
    try:
        content: Mapping[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        figures = {
            name: float(content[key]["avg"]) for key, name in _RATES.items() if key in content
        }
        for key, name in _SPREADS.items():
            for part, ours in _PARTS.items():
                if content.get(key, {}).get(part) is not None:
                    figures[f"{name}_{ours}"] = float(content[key][part]) / 1000
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        raise LLMServeError("AIPerf wrote no figures", mend="run it by hand") from None
    return figures


def _session(ask: Ask, stream: bool) -> dict[str, Any]:
    payload = {"text_input": ask.prompt, **ask.options, **({"stream": True} if stream else {})}
    return {"session_id": str(ask.index), "payloads": [payload]}


def _tokenizer(target: Target) -> Path:
    if target.tokenizer is not None:
        return target.tokenizer.absolute()
    if target.repository is not None:
        folder = (target.repository / target.model / "1" / "tokenizer").absolute()
        if folder.is_dir():
            return folder
    raise UsageError("AIPerf counts tokens itself", mend="name a tokenizer with --tokenizer")
