"""The command line as a user has it: build, serve, query, Ctrl-C, and what goes wrong."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.contract.test_hub import cache

LLMSERVE = [sys.executable, "-m", "llmserve_cli"]
FREE = ["--http-port", "0", "--grpc-port", "0", "--metrics-port", "0"]
PROMPT = "Programming in C++ is like"


def run(*words: str, stdin: str = "", **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*LLMSERVE, *words],
        env={**os.environ, **env},
        input=stdin,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )


class Serving:
    """`llmserve serve` in a process of its own, as in a second terminal."""

    def __init__(self, repository: Path, *words: str, **env: str) -> None:
        self.process = subprocess.Popen(
            [*LLMSERVE, "serve", str(repository), *FREE, *words],
            env={**os.environ, **env},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert self.process.stderr is not None
        self.told = ""
        for line in self.process.stderr:
            self.told += line
            if "Ctrl-C stops it" in line:
                break
        assert "Ctrl-C stops it" in self.told, self.told

    @property
    def url(self) -> str:
        found = re.search(r"grpc +(\S+)", self.told)
        assert found
        return found[1]

    def interrupt(self) -> int:
        self.process.send_signal(signal.SIGINT)
        try:
            self.process.communicate(timeout=60)
        finally:
            self.process.kill()
        return self.process.returncode


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("cli") / "model_repository"
    for words in (["--set", "decoupled=true"], ["--name", "unary"]):
        done = run("build", "--plugin", "hf", "--model", "demo", "--output", str(folder), *words)
        assert done.returncode == 0, done.stderr
    return folder


@pytest.fixture(scope="module")
def serving(repository: Path) -> Iterator[Serving]:
    served = Serving(repository)
    yield served
    if served.process.poll() is None:
        assert served.interrupt() == 0


def test_build_prints_where_the_model_is_and_says_what_next(tmp_path: Path) -> None:
    done = run("build", "--plugin", "hf", "--model", "demo", "--output", str(tmp_path / "r"))
    assert done.stdout == f"{tmp_path}/r/demo\n"
    for part in ("llmserve serve", "docker run", "llmserve query demo", "client.py"):
        assert part in done.stderr


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


def test_a_file_of_prompts_is_answered_in_its_order(serving: Serving, tmp_path: Path) -> None:
    prompts = [PROMPT, "The capital of France is", "Once upon a time", "Hello"]
    (tmp_path / "prompts.txt").write_text("\n".join(prompts) + "\n\n")
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


def closed_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (["query", "demo", "Hi", "--url", f"127.0.0.1:{closed_port()}"], 4, "llmserve serve"),
        (["query", "demo", "Hi", "--url", "http://127.0.0.1:8000"], 2, "8001"),
        (["query", "demo", "Hi", "--file", __file__], 2, "not both"),
        (["build", "--plugin", "hff", "--model", "demo"], 3, "did you mean 'hf'"),
        (["build", "--plugin", "hf", "--model", "./gone"], 3, "--model takes"),
        (["build", "--plugin", "hf", "--model", "demo", "--set", "x"], 2, "key=value"),
        (["build", "--plugin", "hf"], 2, "--model"),
        (["serve", "/nowhere/at/all"], 1, "llmserve build"),
        (["check", "/nowhere/at/all"], 3, ""),
        (["plugins", "hff"], 3, "did you mean 'hf'"),
        (["sreve"], 2, "sreve"),
    ],
)
def test_bad_input_is_told_in_one_line_with_its_mend(
    words: list[str], code: int, message: str, tmp_path: Path
) -> None:
    done = subprocess.run(
        [*LLMSERVE, *words], cwd=tmp_path, capture_output=True, text=True, check=False, timeout=60
    )
    assert done.returncode == code
    assert message in done.stderr
    assert "Traceback" not in done.stderr
    assert not list(tmp_path.iterdir())


def test_a_port_in_use_is_named(repository: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        done = run("serve", str(repository), *FREE, "--http-port", port)
    assert done.returncode == 1
    assert port in done.stderr
    assert "--http-port" in done.stderr


def test_a_model_that_cannot_load_is_named_with_the_reason(tmp_path: Path) -> None:
    run("build", "--plugin", "hf", "--model", "demo", "--output", str(tmp_path / "r"))
    (tmp_path / "r" / "demo" / "1" / "model" / "config.json").write_text("{}")
    done = run("serve", str(tmp_path / "r"), *FREE)
    assert done.returncode == 1
    assert "demo" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_model_of_the_hub_is_served_offline_and_ctrl_c_ends_it_in_order(tmp_path: Path) -> None:
    cache(tmp_path / "home", "acme/tiny")
    env = {"HF_HOME": str(tmp_path / "home"), "HF_HUB_OFFLINE": "1"}
    built = run("build", "--plugin", "hf", "--model", "acme/tiny",
                "--output", str(tmp_path / "r"), **env)  # fmt: skip
    assert built.returncode == 0, built.stderr
    served = Serving(tmp_path / "r", "--model", "tiny", **env)
    answer = run("query", "tiny", PROMPT, "--url", served.url, "--max-tokens", "8")
    assert answer.returncode == 0, answer.stderr
    assert served.interrupt() == 0
    gone = run("query", "tiny", PROMPT, "--url", served.url)
    assert gone.returncode == 4


def test_the_demo_shows_the_whole_way() -> None:
    done = run("demo", "--max-tokens", "12")
    assert done.returncode == 0, done.stderr
    assert PROMPT in done.stdout
    assert "embedded Triton" in done.stdout
    assert "nothing is left running" in done.stdout


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_shells_get_a_completion(shell: str) -> None:
    script = run("completion", shell).stdout
    assert "_LLMSERVE_COMPLETE" in script
    done = run(_LLMSERVE_COMPLETE="bash_complete", COMP_WORDS="llmserve build --plugin h",
               COMP_CWORD="3")  # fmt: skip
    assert "hf" in done.stdout


def test_every_command_has_an_example() -> None:
    from llmserve_cli.main import COMMANDS

    assert run("--help").stdout.count("\n") > len(COMMANDS)
    for command in COMMANDS:
        done = run(command, "--help")
        assert done.returncode == 0
        assert re.search(rf"\n +(eval )?.*llmserve {command}", done.stdout.split("Usage", 1)[1]), (
            command
        )
