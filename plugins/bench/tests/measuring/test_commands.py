"""The commands as a user runs them, against a server with scripted response times."""

from __future__ import annotations

import csv
import io
import json
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
from click.shell_completion import ShellComplete
from click.testing import CliRunner

from llmserve.plugin import Registry
from llmserve.testing import run
from llmserve.testing.command import LLMSERVE
from llmserve_bench.commands import bench, compare, sweep
from llmserve_bench.output import load
from llmserve_bench.targets import suited

from .servers import Running, scripted

pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with scripted(tokens=(1, 2, 2)) as running:
        yield running


def rows(text: str) -> dict[str, str]:
    cells = (line.strip("|").split("|") for line in text.splitlines() if line.startswith("| "))
    return {parts[0].strip(): parts[1].strip() for parts in cells}


def test_bench_prints_a_table_and_writes_files(server: Running, tmp_path: Path) -> None:
    result = run(
        "bench", "pieces", "--url", server.url, "--requests", "20", "--concurrency", "4",
        "--limit-ttft", "1", "--json", str(tmp_path / "run.json"), "--report", str(tmp_path / "r"),
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    figures = rows(result.stdout)
    assert figures["Requests"] == "20"
    assert float(figures["P50 time to first token (ms)"]) >= 50
    assert float(figures["Requests/s within limits"]) == 0
    # There is no tokenizer here, so lengths are estimated, and a note says so.
    assert "the model's tokenizer was not found" in result.stderr
    assert load(tmp_path / "run.json").runs[0].generator.cpu > 0
    again = run("report", str(tmp_path / "run.json"), "--output", str(tmp_path / "again"))
    assert again.stdout == f"{tmp_path / 'again' / 'report.html'}\n"
    pages = [(tmp_path / name / "report.html").read_bytes() for name in ("r", "again")]
    assert pages[0] == pages[1]


def test_a_closed_standard_output_does_not_lose_the_report(server: Running, tmp_path: Path) -> None:
    words = ["bench", "whole", "--url", server.url, "--requests", "2", "--report", str(tmp_path)]
    process = subprocess.Popen([*LLMSERVE, *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None
    process.stdout.close()
    _, err = process.communicate(timeout=60)
    assert (process.returncode, b"Traceback" in err) == (141, False)
    assert "P50 latency" in (tmp_path / "report.html").read_text()


def test_a_dash_prints_data_and_nothing_else(server: Running) -> None:
    as_csv = run("bench", "whole", "--url", server.url, "--requests", "3", "--csv", "-")
    assert [row["index"] for row in csv.DictReader(io.StringIO(as_csv.stdout))] == ["0", "1", "2"]
    as_json = run(
        "bench", "whole", "--url", server.url, "--rate", "30", "--requests", "3", "--json", "-"
    )
    assert json.loads(as_json.stdout)["summary"]["cases"][0]["load"] == "rate 30/s"


def test_compare_prints_ratios_and_figures(server: Running) -> None:
    result = run(
        "compare", "whole", f"other=pieces@{server.url}", "--url", server.url, "--rounds", "2",
        "--requests", "4", "--concurrency", "1,2",
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    assert "Compared with whole, concurrency 2" in result.stdout
    assert "round 2 of 2: other, concurrency 2" in result.stderr


def test_answers_that_cannot_be_compared_are_said_and_cost_no_figures(server: Running) -> None:
    result = run(
        "compare", "whole", f"other=pieces@{server.url}", "--url", server.url, "--rounds", "1",
        "--requests", "2", "--answers",
    )  # fmt: skip
    assert result.returncode == 1
    assert "the answers of whole are not compared: " in result.stderr
    assert "Compared with whole" in result.stdout


def test_a_model_alone_is_compared_as_it_suits_this_machine() -> None:
    ways = suited("demo", Registry.load())
    # Weights of the demo's size are widened where the processor has no type of 16 bits.
    assert ways[0].label in ("openvino", "iterative")
    assert {way.plugin for way in ways} >= {"openvino", "iterative"}
    smaller = [way.settings for way in ways if way.settings]
    assert smaller[-2:] == [{"weight_format": "int8"}, {"weight_format": "int4"}]


def test_ctrl_c_keeps_what_was_measured(tmp_path: Path) -> None:
    # A background job of a shell ignores Ctrl-C, and its child processes inherit that.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    with scripted(tokens=(1,)) as server:
        words = ["bench", "whole", "--url", server.url, "--duration", "600", "--warmup", "1"]
        process = subprocess.Popen(
            [*LLMSERVE, *words, "--json", str(tmp_path / "run.json")],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, encoding="utf-8",
        )  # fmt: skip
        while server.answered() <= 10:
            assert process.poll() is None
            time.sleep(0.1)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert int(rows(out)["Requests"].replace(",", "")) > 5
    assert "interrupted: these are the figures so far" in err
    assert "Traceback" not in err
    assert load(tmp_path / "run.json").interrupted


def test_a_run_without_a_good_request_has_an_exit_code_and_a_reason() -> None:
    with scripted(first=0.01, tokens=(1,), fail_every=1) as failing:
        result = run("bench", "whole", "--url", failing.url, "--requests", "3", "--warmup", "0")
    assert result.returncode == 7
    assert "scripted to fail" in result.stdout
    assert run("bench", "whole", "--url", "127.0.0.1:9").returncode == 4


def test_unwritable_outputs_are_refused_before_anything_is_measured(
    server: Running, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    words = ("bench", "whole", "--url", server.url)
    for output in (
        ("--report", "file"),
        ("--report", "file/x"),
        ("--json", "no/x"),
        ("--csv", "no/x"),
    ):
        result = run(*words, output[0], str(tmp_path / output[1]))
        errors = result.stderr.splitlines()
        assert (result.returncode, result.stdout, len(errors)) == (2, "", 1), output
    assert "measuring" not in result.stderr


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        ("bench m --concurrency 2 --rate 3", "--concurrency or --rate, not both"),
        ("bench m --requests 2 --duration 3", "--requests or --duration, not both"),
        ("bench m --duration nan", "must be above 0, and finite"),
        ("bench m --input-tokens x", "'x' is not a length"),
        ("bench m --max-input-tokens 3", "--max-input-tokens works only with --dataset"),
        ("bench m --json - --csv -", "only one of --json and --csv"),
        ("bench m --set stream=true", "--set does not accept stream"),
        ("bench m --tool perf_analyzer", "there is no perf_analyzer"),
        ("bench m --metrics-url http://127.0.0.1:9", "there are no metrics"),
        ("bench m --chat", "--chat works only with --openai"),
        ("bench m --openai ftp://127.0.0.1:8080", "is not an address"),
        ("bench m --openai http://h/v1 --tool aiperf", "do not work with --openai"),
        ("compare a", "two subjects or more"),
        ("compare a b --concurrency 1,x", "not a list of numbers"),
        ("compare a hf:", "name its --model"),
        ("sweep demo --plugin hf --vary x", "varies nothing"),
        ("sweep demo --plugin hf --vary foo=1", "no option 'foo'"),
        ("sweep demo --plugin hf --vary max_batch_size=x", "max_batch_size takes a whole number"),
        ("sweep demo --plugin hf --vary rate=1 --vary concurrency=1", "cannot both be varied"),
        ("sweep demo --plugin hf --vary concurrency=0", "concurrency cannot be 0"),
        ("sweep demo --plugin hf --vary dtype=a --build dtype=b", "in both --vary and --build"),
        ("sweep demo --plugin nope --vary a=1", "nope"),
    ],
)
def test_invalid_options_are_refused_at_once(
    words: str, problem: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LLMSERVE_PERF_ANALYZER", "/nowhere")
    name, *rest = words.split()
    result = CliRunner().invoke({"bench": bench, "compare": compare, "sweep": sweep}[name], rest)
    assert result.exit_code in (1, 2, 3)
    assert problem in f"{result.output}{result.exception}"
    assert "building" not in result.output
    assert "measuring" not in result.output


def completions(command: click.Command, words: list[str], incomplete: str) -> list[str]:
    items = ShellComplete(command, {}, "llmserve", "_X").get_completions(words, incomplete)
    return [item.value for item in items]


def test_names_are_completed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model_repository" / "demo").mkdir(parents=True)
    (tmp_path / "model_repository" / "demo" / "config.pbtxt").write_text("")
    assert completions(bench, [], "d") == ["demo"]
    assert completions(compare, ["demo"], "d") == ["demo"]
    assert "max_batch_size=" in completions(sweep, ["m", "--plugin", "hf", "--vary"], "max_")
    assert completions(sweep, ["m", "--vary"], "conc") == ["concurrency="]
    assert "hf" in completions(sweep, ["m", "--plugin"], "h")
