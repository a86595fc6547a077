"""Other tools: what they are told, and how what they say is read."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from llmserve.client.model import ModelInfo, Tensor
from llmserve.errors import LLMServeError, UsageError
from llmserve.measure.bench import Target
from llmserve.measure.job import Ask, Place
from llmserve.measure.runs import Load
from llmserve.measure.tools import aiperf, perf_analyzer, process

INPUTS = {
    name: Tensor(name, kind, (1,))
    for name, kind in (("text_input", "BYTES"), ("max_tokens", "INT32"), ("stream", "BOOL"))
}
WHOLE = ModelInfo("demo", "unary", True, 8, INPUTS, {})
PIECES = ModelInfo("demo", "stream", True, 8, INPUTS, {})
STEPS = ModelInfo("demo", "sequence", True, 1, INPUTS, {})
ASKS = (Ask(0, "one", {"max_tokens": 4}, 0.0), Ask(1, "two", {"max_tokens": 8}, 0.25))
TARGET = Target("demo", Place("127.0.0.1:8001"))
# Both as the tools wrote them for one run of theirs, shortened.
CSV = """Concurrency,Inferences/Second,Client Send,Network+Server Send/Recv,Server Queue,Server Compute Input,Server Compute Infer,Server Compute Output,Client Recv,p50 latency,p90 latency,p95 latency,p99 latency,Avg latency,request/response,response wait
4,19.988,10,0,37641,70,76321,18,6,102590,170347,184061,238357,101341,16,101303
"""  # noqa: E501
PROFILE = {
    "experiments": [
        {
            "experiment": {"mode": "concurrency", "value": 4},
            "requests": [
                {"timestamp": 1_000_000_000, "response_timestamps": [1_100_000_000, 1_500_000_000]},
                {"timestamp": 1_000_000_000, "response_timestamps": [1_300_000_000, 2_000_000_000]},
            ],
        }
    ]
}


def test_perf_analyzer_gets_every_request_with_its_options() -> None:
    made = perf_analyzer.inputs(PIECES, Load.closed(4, stream=True), ASKS)
    assert made["data"] == [
        {"text_input": ["one"], "max_tokens": [4], "stream": [True]},
        {"text_input": ["two"], "max_tokens": [8], "stream": [True]},
    ]


def test_an_option_that_it_cannot_send_is_told() -> None:
    with pytest.raises(UsageError, match="has no top_k"):
        perf_analyzer.inputs(WHOLE, Load.closed(1), [Ask(0, "x", {"top_k": 1})])


def test_perf_analyzer_gets_the_same_arrivals(tmp_path: Path) -> None:
    said = perf_analyzer.arguments(TARGET, PIECES, Load.open(4.0), ASKS, tmp_path)
    assert (tmp_path / "intervals.txt").read_text() == "250000\n"
    assert "--streaming" in said
    assert said[-2:] == ["--request-count", "2"]
    closed = perf_analyzer.arguments(TARGET, WHOLE, Load.closed(4), ASKS, tmp_path)
    assert "--streaming" not in closed
    assert closed[closed.index("--concurrency-range") + 1] == "4"


def test_perf_analyzers_figures_are_read_in_seconds(tmp_path: Path) -> None:
    path = tmp_path / "figures.csv"
    path.write_text(CSV)
    assert perf_analyzer.read_csv(path) == {
        "latency_mean": 0.101341, "latency_p50": 0.10259, "latency_p90": 0.170347,
        "latency_p99": 0.238357, "server_queue": 0.037641, "server_compute_infer": 0.076321,
    }  # fmt: skip
    with pytest.raises(LLMServeError, match="wrote no figures"):
        perf_analyzer.read_csv(tmp_path / "missing.csv")


def test_its_rate_is_that_of_its_own_time_stamps(tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    path.write_text(json.dumps(PROFILE))
    found = perf_analyzer.read_profile(path)
    assert found["requests_per_second"] == 2.0
    assert found["ttft_mean"] == pytest.approx(0.2)
    assert perf_analyzer.read_profile(tmp_path / "missing.json") == {}


def test_aiperf_is_told_the_load_and_read_in_seconds(tmp_path: Path) -> None:
    target = Target("demo", Place("127.0.0.1:8001"), tokenizer=tmp_path)
    said = aiperf.arguments(target, PIECES, Load.open(4.0, stream=True, seed=3), 2)
    assert said[said.index("-u") + 1] == "http://127.0.0.1:8000"
    assert said[said.index("--endpoint") + 1] == "/v2/models/demo/generate_stream"
    assert said[said.index("--request-rate") + 1] == "4.0"
    whole = aiperf.arguments(target, WHOLE, Load.closed(4), 2)
    assert whole[whole.index("--endpoint") + 1] == "/v2/models/demo/generate"
    content = {
        "request_throughput": {"unit": "requests/sec", "avg": 39.5},
        "request_latency": {"unit": "ms", "avg": 89.2, "p50": 98.0, "p99": 117.4},
        "time_to_first_token": {"unit": "ms", "avg": 15.4},
        "inter_token_latency": {"unit": "ms", "avg": 4.1},
    }
    path = tmp_path / "figures.json"
    path.write_text(json.dumps(content))
    expected = {
        "requests_per_second": 39.5, "latency_mean": 0.0892, "latency_p50": 0.098,
        "latency_p99": 0.1174, "ttft_mean": 0.0154, "token_time_mean": 0.0041,
    }  # fmt: skip
    assert aiperf.read_figures(path) == pytest.approx(expected)
    path.write_text("{")
    with pytest.raises(LLMServeError, match="wrote no figures"):
        aiperf.read_figures(path)


def test_sequences_are_beyond_both(tmp_path: Path) -> None:
    for tool in (perf_analyzer, aiperf):
        with pytest.raises(UsageError, match="leave out --tool"):
            tool.measure(TARGET, STEPS, Load.closed(1), ASKS, tmp_path)


def program(folder: Path, text: str) -> Path:
    path = folder / "perf_analyzer"
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path


def test_a_missing_tool_says_where_the_real_one_is(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv(perf_analyzer.VARIABLE, raising=False)
    with pytest.raises(LLMServeError, match=r"tritonclient 2\.51\.0"):
        perf_analyzer.check()


def test_a_missing_library_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    line = "error while loading shared libraries: libb64.so.0d: cannot open"
    made = program(tmp_path, f"echo 'perf_analyzer: {line}' >&2; exit 127")
    monkeypatch.setenv(perf_analyzer.VARIABLE, str(made))
    with pytest.raises(LLMServeError, match=r"libb64\.so\.0d is missing"):
        perf_analyzer.check()


def test_a_tool_that_fails_is_quoted_and_one_that_hangs_is_ended(tmp_path: Path) -> None:
    made = str(program(tmp_path, "echo first; echo the reason; exit 9"))
    with pytest.raises(LLMServeError, match=r"exit code 9\): first / the reason"):
        process.run([made], tmp_path, timeout=10, mend="")
    made = str(program(tmp_path, "exec sleep 60"))
    with pytest.raises(LLMServeError, match="was not done after"):
        process.run([made], tmp_path, timeout=0.3, mend="")
