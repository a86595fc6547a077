"""`llmserve query` against a server: one prompt, a file of them, and what goes wrong."""

from __future__ import annotations

import fcntl
import json
import signal
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.live.commands import LLMSERVE, PROMPT, Serving, run
from tests.live.servers import eventually


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("cli") / "model_repository"
    for words in ([], ["--name", "unary", "--set", "decoupled=false"]):
        done = run("build", "--plugin", "hf", "--model", "demo", "--output", str(folder), *words)
        assert done.returncode == 0, done.stderr
    return folder


@pytest.fixture(scope="module")
def serving(repository: Path) -> Iterator[Serving]:
    served = Serving(repository)
    yield served
    if served.process.poll() is None:
        assert served.interrupt() == 0


def test_a_query_prints_the_answer_and_nothing_else(serving: Serving) -> None:
    whole = run("query", "unary", PROMPT, "--url", serving.url, "--max-tokens", "16")
    assert whole.returncode == 0
    assert whole.stderr == ""
    streamed = run("query", "demo", PROMPT, "--url", serving.url, "--max-tokens", "16")
    assert streamed.stdout == whole.stdout
    assert len(whole.stdout) > 20


def test_a_query_reads_standard_input_and_the_environment(serving: Serving) -> None:
    plain = run("query", "demo", PROMPT, "--url", serving.url, "--max-tokens", "8").stdout
    assert run("query", "demo", "--max-tokens", "8", stdin=PROMPT + "\n",
               LLMSERVE_URL=serving.url).stdout == plain  # fmt: skip
    assert run("query", "demo", "-", "--max-tokens", "8", stdin=PROMPT,
               LLMSERVE_URL=serving.url).stdout == plain  # fmt: skip


def test_json_has_the_counts(serving: Serving) -> None:
    done = run("query", "demo", PROMPT, "--json", "--max-tokens", "8", "--url", serving.url)
    answer = json.loads(done.stdout)
    assert answer["output_tokens"] == 8
    assert answer["finish_reason"] == "length"
    assert answer["text"]


def test_json_has_log_probabilities_for_who_asks(serving: Serving, repository: Path) -> None:
    common = [PROMPT, "--json", "--max-tokens", "4", "--url", serving.url]
    assert "logprobs" not in json.loads(run("query", "demo", *common).stdout)
    answer = json.loads(run("query", "demo", *common, "--logprobs", "2").stdout)
    assert "".join(entry["token"] for entry in answer["logprobs"]) == answer["text"]
    assert [len(entry["top"]) for entry in answer["logprobs"]] == [2] * 4
    command = [sys.executable, str(repository / "demo" / "client.py"), *common, "--logprobs", "2"]
    emitted = subprocess.run(command, capture_output=True, text=True, check=True)
    assert json.loads(emitted.stdout)["logprobs"] == answer["logprobs"]


def test_a_file_of_prompts_is_answered_in_its_order(serving: Serving, tmp_path: Path) -> None:
    prompts = [PROMPT, "The capital of France is", "Once upon a time", "Hello"]
    (tmp_path / "prompts.txt").write_text("\n".join(prompts) + "\n")
    common = ["--url", serving.url, "--max-tokens", "12"]
    done = run("query", "unary", "--file", str(tmp_path / "prompts.txt"), "--json", *common)
    answers = [json.loads(line)["text"] for line in done.stdout.splitlines()]
    alone = [
        json.loads(run("query", "unary", p, "--json", *common).stdout)["text"] for p in prompts
    ]
    assert answers == alone


def test_the_emitted_client_runs_by_itself(
    serving: Serving, repository: Path, tmp_path: Path
) -> None:
    for name in ("demo", "unary"):
        client = repository / name / "client.py"
        command = [sys.executable, str(client), PROMPT, "--url", serving.url, "--max-tokens", "16"]
        done = subprocess.run(
            command, cwd=tmp_path, capture_output=True, text=True, check=True, timeout=60
        )
        expected = run("query", name, PROMPT, "--url", serving.url, "--max-tokens", "16")
        assert done.stdout == expected.stdout


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (["query", "gone", "Hi"], 5, "demo"),
        (["query", "unary", "Hi", "--stream"], 2, "decoupled=true"),
        (["query", "unary", "Hi", "--max-tokens", "0"], 7, "max_tokens"),
        (["query", "unary", ""], 7, "empty"),
        (["query", "demo", "Hi", "--timeout", "0.000001"], 6, "time"),
    ],
)
def test_what_the_server_refuses_is_one_line(
    serving: Serving, words: list[str], code: int, message: str
) -> None:
    done = run(*words, LLMSERVE_URL=serving.url)
    assert (done.returncode, done.stdout) == (code, "")
    assert message in done.stderr
    assert "Traceback" not in done.stderr


def lines(folder: Path, *prompts: str) -> str:
    path = folder / "prompts.txt"
    path.write_text("".join(f"{prompt}\n" for prompt in prompts))
    return str(path)


def test_a_line_that_is_refused_costs_no_other_its_answer(serving: Serving, tmp_path: Path) -> None:
    # A blank line is no prompt, but it keeps its place.
    file = lines(tmp_path, "One", "", "word " * 5000, *["Two"] * 12)
    common = ["--file", file, "--url", serving.url, "--max-tokens", "4"]
    plain = run("query", "unary", *common)
    assert plain.returncode == 7
    answers = plain.stdout.splitlines()
    assert [bool(answer) for answer in answers] == [True, False, False, *[True] * 12]
    (told,) = plain.stderr.splitlines()
    assert "line 3" in told
    as_json = run("query", "unary", *common, "--json")
    assert as_json.returncode == 7
    blank, refused = (json.loads(line) for line in as_json.stdout.splitlines()[1:3])
    assert blank == {"error": "the line is blank", "line": 2}
    assert refused["line"] == 3
    assert refused["error"] in told
    assert sum("text" in json.loads(line) for line in as_json.stdout.splitlines()) == 13


def test_a_file_is_given_up_when_the_server_lacks_the_model(
    serving: Serving, tmp_path: Path
) -> None:
    done = run("query", "gone", "--file", lines(tmp_path, *["Hi"] * 20), "--url", serving.url)
    assert (done.returncode, done.stdout) == (5, "")
    assert len(done.stderr.splitlines()) == 1


def waiting(process: subprocess.Popen[str]) -> int:
    """Return how many bytes a process has written that nobody has read yet."""
    assert process.stdout is not None
    count = fcntl.ioctl(process.stdout, termios.FIONREAD, bytes(4))
    return int.from_bytes(count, sys.byteorder)


def test_ctrl_c_ends_a_file_of_prompts_at_once(serving: Serving, tmp_path: Path) -> None:
    file = lines(tmp_path, *["Once upon a time"] * 2000)
    asked = subprocess.Popen(
        [*LLMSERVE, "query", "unary", "--file", file, "--url", serving.url, "--max-tokens", "64"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        pipesize=4096,
    )
    try:
        # Nobody reads: when the pipe is full, it is printing that waits, and not an answer.
        eventually(lambda: waiting(asked) > 3500, seconds=60)
        time.sleep(0.5)
        asked.send_signal(signal.SIGINT)
        answers, told = asked.communicate(timeout=5)
    finally:
        asked.kill()
    assert asked.returncode == 130
    assert told.split() == ["llmserve:", "interrupted"]
    assert answers.count("\n") < 1900


def test_any_option_of_the_model_can_be_set(serving: Serving) -> None:
    common = ["unary", PROMPT, "--url", serving.url, "--json"]
    values = {"max-tokens": "5", "temperature": "2.5", "seed": "7"}
    flags = [word for name, value in values.items() for word in (f"--{name}", value)]
    sets = [w for n, v in values.items() for w in ("--set", f"{n.replace('-', '_')}={v}")]
    done = run("query", *common, *sets)
    assert json.loads(done.stdout)["output_tokens"] == 5
    assert done.stdout == run("query", *common, *flags).stdout
    refused = run("query", *common, "--set", "temperature=hot")
    assert refused.returncode == 7
    assert "temperature" in refused.stderr


def test_a_reader_that_has_seen_enough_ends_it_as_in_a_shell(serving: Serving) -> None:
    asked = subprocess.Popen(
        [*LLMSERVE, "query", "demo", PROMPT, "--url", serving.url, "--max-tokens", "256"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert asked.stdout is not None
    assert asked.stderr is not None
    assert asked.stdout.read(1)
    asked.stdout.close()
    assert asked.stderr.read() == ""
    assert asked.wait(timeout=20) == 141
