"""The commands as a user has them, against a server whose answers come when a script says."""

from __future__ import annotations

import csv
import io
import json
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from threading import Timer

import pytest

from llmserve.measure.export import COLUMNS
from llmserve.measure.results import Comparison, Run, from_json, load
from llmserve.report.doubts import doubts
from tests.live.commands import LLMSERVE, run
from tests.unit.scripted_triton import Running, scripted

SEEDS_WORDS = (
    "Requests/Sec", "OP tokens/sec", "Avg. latency (ms)", "P50 latency (ms)", "P90 latency (ms)",
    "P99 latency (ms)", "Avg. IP tokens per request", "Avg. OP tokens per request",
    "Avg. InFlight requests", "Total latency (ms)", "Total requests",
)  # fmt: skip


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with scripted(first=0.04, gap=0.02, tokens=(1, 2, 2)) as running:
        yield running


def rows(text: str) -> dict[str, str]:
    cells = (line.strip("|").split("|") for line in text.splitlines() if line.startswith("| "))
    return {parts[0].strip(): parts[1].strip() for parts in cells}


def test_the_table_has_the_words_of_seed_003_and_goes_to_stdout(server: Running) -> None:
    done = run("bench", "whole", "--url", server.url, "--requests", "20", "--concurrency", "4")
    assert done.returncode == 0, done.stderr
    found = rows(done.stdout)
    assert [word for word in found if word in SEEDS_WORDS] == list(SEEDS_WORDS)
    assert float(found["Total requests"]) == 20
    assert 40 < float(found["P50 latency (ms)"]) < 80
    assert "Errors: rejected" not in found
    # It has no tokenizer here, so lengths are an estimate, and that is said.
    assert "the model's tokenizer is not at hand" in done.stderr


def test_a_stream_has_the_time_to_first_token_and_between_tokens(server: Running) -> None:
    done = run("bench", "pieces", "--url", server.url, "--requests", "8", "--limit-ttft", "1")
    found = rows(done.stdout)
    assert 40 < float(found["P50 time to first token (ms)"]) < 80
    assert 9 < float(found["Avg. time between tokens (ms)"]) < 14
    assert float(found["Goodput (requests/s within limits)"]) == 0


def test_json_is_a_result_and_csv_a_request_a_line(server: Running, tmp_path: Path) -> None:
    words = ("bench", "pieces", "--url", server.url, "--requests", "5")
    done = run(*words, "--json", "-", "--csv", str(tmp_path / "out.csv"))
    result = from_json(json.loads(done.stdout))
    assert isinstance(result, Run)
    assert result.records[0].tokens == (1, 2, 2)
    lines = list(csv.DictReader(io.StringIO((tmp_path / "out.csv").read_text())))
    assert tuple(lines[0]) == COLUMNS
    assert [line["output_tokens"] for line in lines] == ["5"] * 5
    assert float(lines[0]["ttft"]) == pytest.approx(result.records[0].first or 0, abs=0.01)
    again = run(*words, "--csv", "-")
    assert again.stdout.splitlines()[0] == ",".join(COLUMNS)
    both = run(*words, "--csv", "-", "--json", "-")
    assert both.returncode == 2
    assert "only one of --json and --csv" in both.stderr


def test_ctrl_c_gives_the_table_so_far(server: Running) -> None:
    process = subprocess.Popen(
        [*LLMSERVE, "bench", "whole", "--url", server.url, "--duration", "60"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    time.sleep(3)
    # As a terminal does it: to everything that runs in it.
    os.killpg(process.pid, signal.SIGINT)
    out, err = process.communicate(timeout=30)
    assert process.returncode == 130
    assert float(rows(out)["Total requests"]) > 3
    assert "interrupted, these are the figures until then" in err
    assert "Traceback" not in err


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["whole", "--requests", "1", "--duration", "1"], "not both"),
        (["whole", "--rate", "1", "--concurrency", "1"], "not both"),
        (["whole", "--rate", "-1"], "--rate must be above 0"),
        (["whole", "--rate", "inf", "--duration", "1"], "--rate must be above 0, and finite"),
        (["whole", "--max-input-tokens", "9"], "is for a --dataset"),
        (["whole", "--metrics-url", "127.0.0.1:9"], "there are no metrics at 127.0.0.1:9"),
        (["whole", "--input-tokens", "many"], "is no length"),
        (["whole", "--stream"], "answers in one piece"),
        (["whole", "--dataset", __file__, "--input-tokens", "3"], "has its own prompts"),
        (["nope"], "choose one of pieces, steps, whole"),
        (["whole", "--tool", "perf-analyzer"], "there is no perf_analyzer"),
    ],
)
def test_what_cannot_be_meant_is_one_line(server: Running, words: list[str], told: str) -> None:
    env = {"LLMSERVE_URL": server.url, "LLMSERVE_PERF_ANALYZER": "/nowhere/perf_analyzer"}
    done = run("bench", *words, **env)
    assert done.returncode != 0
    assert told in done.stderr
    assert done.stdout == ""
    assert "Traceback" not in done.stderr


def test_nothing_that_came_through_is_an_exit_code_and_a_reason() -> None:
    with scripted(first=0.01, tokens=(1,), fail_every=1) as failing:
        done = run("bench", "whole", "--url", failing.url, "--requests", "3", "--warmup", "0")
        assert done.returncode == 7
        assert "3 x rejected" in done.stderr
        assert "scripted to fail" in done.stderr
        warm = run("bench", "whole", "--url", failing.url, "--requests", "3")
        assert warm.returncode == 7
        assert "scripted to fail" in warm.stderr


def test_a_server_that_is_gone_is_an_exit_code_and_a_reason(tmp_path: Path) -> None:
    with scripted(first=0.02, tokens=(1,)) as dying:
        path = tmp_path / "run.json"
        words = ("bench", "whole", "--url", dying.url, "--duration", "60", "--json", str(path))
        Timer(3.0, dying.process.kill).start()
        done = run(*words)
    assert done.returncode == 4
    assert "llmserve: ended early: no Triton answers at" in done.stderr
    assert "Traceback" not in done.stderr
    assert float(rows(done.stdout)["Total requests"]) > 10
    found = load(path)
    assert isinstance(found, Run)
    assert found.seconds < 5
    assert any("it ended early" in line for line in doubts([("whole", found)]))


def test_a_duration_in_which_nothing_is_done_says_so() -> None:
    with scripted(first=1.5, tokens=(1,)) as slow:
        words = ("bench", "whole", "--url", slow.url, "--duration", "0.5", "--warmup", "0")
        done = run(*words, "--concurrency", "3")
    assert done.returncode == 7
    assert "no request was done within 0.5 s, 3 were under way: measure for longer" in done.stderr


@pytest.mark.parametrize(
    "words",
    [
        ("bench", "whole", "--json", "nowhere/run.json"),
        ("bench", "whole", "--csv", "nowhere/run.csv"),
        ("compare", "a", "b", "--json", "nowhere/run.json"),
        ("sweep", "demo", "--plugin", "hf", "--vary", "dtype=float32", "--state", "nowhere/state"),
    ],
)
def test_a_file_that_cannot_be_written_is_told_before_anything_is_measured(
    words: tuple[str, ...],
) -> None:
    done = run(*words, LLMSERVE_URL="127.0.0.1:9")
    assert done.returncode == 2
    assert "is no folder" in done.stderr


def test_compare_prints_means_and_ratios(server: Running, tmp_path: Path) -> None:
    path = tmp_path / "comparison.json"
    with scripted(first=0.3, tokens=(5,)) as slow:
        done = run(
            "compare", f"quick=whole@{server.url}", f"slow=whole@{slow.url}",
            "--requests", "4", "--rounds", "3", "--concurrency", "2", "--json", str(path),
        )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "concurrency 2, means of 3 rounds" in done.stdout
    assert "slow / quick: latency p50" in done.stdout
    result = load(path)
    assert isinstance(result, Comparison)
    found = next(ratio for ratio in result.ratios if ratio.metric == "latency_p50")
    assert found.ratio > 1.5
    assert f"{found.ratio:.2f}" in done.stdout
    assert found.verdict in done.stdout
    assert len(result.cells) == 2
    assert "6/6 round 3 of 3" in done.stderr


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["a"], "give two subjects or more"),
        (["a", "b", "--pair", "static-inflight"], "a pair or subjects"),
        (["--pair", "nope"], "choose one of static-inflight"),
        (["hf:", "iterative:"], "name its --model"),
        (["a", "b", "--concurrency", "1,x"], "no list of numbers"),
    ],
)
def test_comparisons_that_cannot_be_meant_are_one_line(words: list[str], told: str) -> None:
    done = run("compare", *words)
    assert done.returncode == 2
    assert told in done.stderr


def test_the_pairs_can_be_listed() -> None:
    assert "static-inflight: static=iterative:batching=static inflight=iterative:\n" in (
        told := run("compare", "--pair", "list").stdout
    )
    assert "hf-trtllm: hf=hf: trtllm=trtllm: --build layout=llmapi --build stand_in=true" in told


def test_a_sweep_that_varies_nothing_is_one_line(tmp_path: Path) -> None:
    state = ("--state", str(tmp_path / "state.json"))
    done = run("sweep", "demo", "--plugin", "hf", "--vary", "max_batch_size", *state)
    assert done.returncode == 2
    assert "varies nothing" in done.stderr
    twice = run(
        "sweep", "demo", "--plugin", "hf", "--vary", "dtype=a,b", "--build", "dtype=a", *state
    )
    assert twice.returncode == 2
    assert "is varied and given" in twice.stderr
