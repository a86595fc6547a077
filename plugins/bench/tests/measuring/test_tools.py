"""Other tools: the arguments they get, and the figures read from their files."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from llmserve.client import ModelInfo, TensorInfo
from llmserve.errors import LLMServeError, UsageError
from llmserve_bench.prompts import Request
from llmserve_bench.results import Load
from llmserve_bench.targets import Target
from llmserve_bench.tools import TOOLS, Tool

INPUTS = {
    name: TensorInfo(name, kind, (1,))
    for name, kind in (("text_input", "BYTES"), ("max_tokens", "INT32"), ("stream", "BOOL"))
}
WHOLE = ModelInfo("demo", "unary", True, 8, INPUTS, {})
PIECES = ModelInfo("demo", "stream", True, 8, INPUTS, {})
STEPS = ModelInfo("demo", "sequence", True, 1, INPUTS, {})
REQUESTS = (Request(0, "one", {"max_tokens": 4}, 0.0), Request(1, "two", {"max_tokens": 8}, 0.25))
TARGET = Target("demo", "127.0.0.1:8001")
PERF, AIPERF = TOOLS["perf_analyzer"], TOOLS["aiperf"]
# Written by the tool in a real run, shortened.
PROFILE = {
    "experiments": [
        {
            "requests": [
                {"timestamp": 1_000_000_000, "response_timestamps": [1_100_000_000, 1_500_000_000]},
                {"timestamp": 1_000_000_000, "response_timestamps": [1_300_000_000, 2_000_000_000]},
            ],
        }
    ]
}


def arguments_for(
    tool: Tool, folder: Path, info: ModelInfo, load: Load, target: Target = TARGET
) -> list[str]:
    return tool.arguments(target, info, load, REQUESTS, folder)


def test_perf_analyzer_gets_every_request_with_its_options(tmp_path: Path) -> None:
    words = arguments_for(PERF, tmp_path, PIECES, Load(concurrency=4, requests=2, stream=True))
    assert json.loads((tmp_path / "inputs.json").read_text())["data"] == [
        {"text_input": ["one"], "max_tokens": [4], "stream": [True]},
        {"text_input": ["two"], "max_tokens": [8], "stream": [True]},
    ]
    assert " ".join(words) == (
        "-m demo -u 127.0.0.1:8001 -i grpc --async --input-data inputs.json --profile-export-file "
        "profile.json --streaming --concurrency-range 4 --request-count 2"
    )


def test_perf_analyzer_gets_the_shape_of_an_input_without_a_fixed_one(tmp_path: Path) -> None:
    words = TensorInfo("stop_words", "BYTES", (-1,), optional=True)
    inputs = {**INPUTS, "text_input": TensorInfo("text_input", "BYTES", (-1,)), "stop_words": words}
    unbatched = ModelInfo("demo", "unary", False, None, inputs, {})
    requests = [Request(0, "one", {"max_tokens": 4, "stop_words": [".", "!"]})]
    PERF.arguments(TARGET, unbatched, Load(concurrency=1, requests=1), requests, tmp_path)
    assert json.loads((tmp_path / "inputs.json").read_text())["data"] == [
        {
            "text_input": {"content": ["one"], "shape": [1]},
            "max_tokens": [4],
            "stop_words": {"content": [".", "!"], "shape": [2]},
        }
    ]


def test_perf_analyzer_gets_the_same_arrivals(tmp_path: Path) -> None:
    words = arguments_for(PERF, tmp_path, WHOLE, Load(rate=4.0, requests=2))
    assert (tmp_path / "intervals.txt").read_text() == "250000\n"
    assert words[-4:] == ["--request-intervals", "intervals.txt", "--request-count", "2"]
    assert "--streaming" not in words


def test_an_option_that_it_cannot_send_is_refused(tmp_path: Path) -> None:
    requests = [Request(0, "x", {"top_k": 1})]
    with pytest.raises(UsageError, match="has no top_k"):
        PERF.arguments(TARGET, WHOLE, Load(concurrency=1), requests, tmp_path)


def test_perf_analyzers_figures_are_read_in_seconds(tmp_path: Path) -> None:
    (tmp_path / "profile.json").write_text(json.dumps(PROFILE))
    figures = PERF.read(tmp_path)
    assert figures["latency_p50"] == 0.75
    # Its own rate includes the time until it checks whether all are done.
    assert figures["requests_per_second"] == 2.0
    assert figures["ttft_mean"] == pytest.approx(0.2)


def test_aiperf_gets_the_load(tmp_path: Path) -> None:
    target = Target("demo", "127.0.0.1:8001", tokenizer=tmp_path)
    load = Load(rate=4.0, requests=2, stream=True, seed=3)
    words = arguments_for(AIPERF, tmp_path, PIECES, load, target)
    assert " ".join(words) == (
        "profile -m demo -u http://127.0.0.1:8000 --endpoint-type raw --endpoint "
        "/v2/models/demo/generate_stream --input-file inputs.json --custom-dataset-type "
        "inputs-json --extra-inputs response_field:text_output --tokenizer "
        f"{tmp_path} --request-count 2 --artifact-dir artifacts --no-auto-plot --ui none "
        "--streaming --request-rate 4.0 --arrival-pattern poisson --random-seed 3"
    )
    whole = arguments_for(AIPERF, tmp_path, WHOLE, Load(concurrency=4, requests=2), target)
    assert whole[whole.index("--endpoint") + 1] == "/v2/models/demo/generate"
    assert whole[-2:] == ["--concurrency", "4"]
    with pytest.raises(UsageError, match="name a tokenizer"):
        arguments_for(AIPERF, tmp_path, WHOLE, load)


def test_aiperfs_figures_are_read_in_seconds(tmp_path: Path) -> None:
    content = {
        "request_throughput": {"unit": "requests/sec", "avg": 39.5},
        "request_latency": {"unit": "ms", "avg": 89.2, "p50": 98.0, "p99": 117.4},
        "time_to_first_token": {"unit": "ms", "avg": 15.4},
        "inter_token_latency": {"unit": "ms", "avg": 4.1},
    }
    (tmp_path / "artifacts").mkdir()
    (tmp_path / "artifacts" / "profile_export_aiperf.json").write_text(json.dumps(content))
    expected = {
        "requests_per_second": 39.5, "latency_mean": 0.0892, "latency_p50": 0.098,
        "latency_p99": 0.1174, "ttft_mean": 0.0154, "token_time_mean": 0.0041,
    }  # fmt: skip
    assert AIPERF.read(tmp_path) == pytest.approx(expected)


def install_program(folder: Path, name: str, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    path = folder / name
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    monkeypatch.setenv(f"LLMSERVE_{name.upper()}", str(path))


@pytest.mark.parametrize("name", TOOLS)
def test_a_failure_of_a_tool_is_a_one_line_error(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tool, load = TOOLS[name], Load(concurrency=1, requests=2)
    target = Target("demo", "127.0.0.1:8001", tokenizer=tmp_path)
    with pytest.raises(UsageError, match=f"leave out --tool {name}"):
        tool.measure(target, STEPS, load, REQUESTS)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv(f"LLMSERVE_{name.upper()}", raising=False)
    with pytest.raises(
        LLMServeError, match=f"there is no {name} at PATH: .*LLMSERVE_{name.upper()}"
    ):
        tool.check()
    monkeypatch.undo()
    install_program(tmp_path, name, "echo 1.2", monkeypatch)
    assert tool.check() == (tmp_path / name, "1.2")
    with pytest.raises(LLMServeError, match=f"{name} wrote no figures"):
        tool.measure(target, WHOLE, load, REQUESTS)
    line = "error while loading shared libraries: libb64.so.0d: cannot open"
    install_program(tmp_path, name, f"echo '{line}' >&2; exit 127", monkeypatch)
    with pytest.raises(LLMServeError, match=r"libb64\.so\.0d: cannot open: .*install"):
        tool.check()
    install_program(tmp_path, name, "echo first; echo the reason; exit 9", monkeypatch)
    with pytest.raises(LLMServeError, match=r"exit code 9\): first / the reason"):
        tool.check()
    install_program(tmp_path, name, "exec sleep 60", monkeypatch)
    with pytest.raises(LLMServeError, match="did not finish within"):
        tool.run([str(tmp_path / name)], tmp_path, timeout=0.3)
