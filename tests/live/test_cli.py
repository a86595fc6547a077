"""The command line as a user has it: build, serve, query, Ctrl-C, and what goes wrong."""

from __future__ import annotations

import fcntl
import os
import re
import shlex
import socket
import subprocess
from pathlib import Path

import click
import pytest

from tests.contract.test_hub import COMMIT
from tests.live.commands import FREE, LLMSERVE, PROMPT, Serving, run
from tests.live.servers import eventually
from tests.support import hub_cache


def test_what_to_type_next_survives_a_shell(tmp_path: Path) -> None:
    folder = tmp_path / "two words"
    words = ["build", "--plugin", "hf", "--model", "demo", "--output", str(folder), "--verbose"]
    typed = [shlex.split(line) for line in run(*words).stderr.splitlines()]
    assert any(words[-3:] == ["llmserve", "serve", str(folder)] for words in typed)
    assert any(words[-2:] == ["llmserve-triton", str(folder)] for words in typed)
    assert any(str(folder / "demo" / "client.py") in words for words in typed)


def test_a_build_that_is_terminated_leaves_nothing_behind(tmp_path: Path) -> None:
    repository = tmp_path / "r"
    repository.mkdir()
    # Whoever holds this lock makes a build wait when all but the last step is done.
    held = os.open(repository, os.O_RDONLY)
    fcntl.flock(held, fcntl.LOCK_EX)
    words = ["build", "--plugin", "hf", "--model", "demo", "--output", str(repository)]
    build = subprocess.Popen([*LLMSERVE, *words], stderr=subprocess.PIPE, text=True)
    try:
        eventually(lambda: list(tmp_path.glob(".r*/models/demo/llmserve.json")))
        build.terminate()
        told = build.communicate(timeout=20)[1]
    finally:
        build.kill()
        os.close(held)
    assert build.returncode == 130
    assert told.split() == ["llmserve:", "interrupted"]
    assert list(tmp_path.rglob("*")) == [repository]


def closed_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (["query", "demo", "Hi", "--url", f"127.0.0.1:{closed_port()}"], 4, "llmserve serve"),
        (["query", "demo", "Hi", "--url", "http://127.0.0.1:8000"], 2, "8001"),
        (["query", "demo", "Hi", "--set", "top_k"], 2, "key=value"),
        (["build", "--plugin", "hff", "--model", "demo"], 3, "did you mean 'hf'"),
        (["build", "--plugin", "hf", "--model", "./gone"], 3, "--model takes"),
        (["build", "--plugin", "hf", "--model", "demo", "--set", "x"], 2, "key=value"),
        (["serve", "/nowhere/at/all"], 3, "llmserve build"),
        (["check", "/nowhere/at/all"], 3, ""),
        (["plugins", "hff"], 3, "did you mean 'hf'"),
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


def test_a_port_in_use_is_named(tmp_path: Path) -> None:
    run("build", "--plugin", "hf", "--model", "demo", "--output", str(tmp_path / "r"))
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        done = run("serve", str(tmp_path / "r"), *FREE, "--http-port", port)
    assert done.returncode == 1
    assert port in done.stderr
    assert "--http-port" in done.stderr


def test_all_that_keeps_a_repository_from_being_served_is_named_at_once(tmp_path: Path) -> None:
    run("build", "--plugin", "hf", "--model", "demo", "--output", str(tmp_path / "r"))
    weights = tmp_path / "r" / "demo" / "1" / "model" / "model.safetensors"
    weights.unlink()
    with socket.create_server(("127.0.0.1", 0)) as one, socket.create_server(("", 0)) as two:
        taken = [str(listener.getsockname()[1]) for listener in (one, two)]
        ports = ["--http-port", taken[0], "--grpc-port", "0", "--metrics-port", taken[1]]
        ports += ["--frontend-port", "0"]
        done = run("serve", str(tmp_path / "r"), *ports)
    assert done.returncode == 3
    assert [line for line in done.stderr.splitlines() if "model.safetensors is missing" in line]
    for port in taken:
        assert f"port {port} " in done.stderr
    assert "see /tmp" not in done.stderr, "Triton was not started"


def test_a_model_that_cannot_load_is_named_with_the_reason(tmp_path: Path) -> None:
    run("build", "--plugin", "hf", "--model", "demo", "--output", str(tmp_path / "r"))
    (tmp_path / "r" / "demo" / "1" / "model" / "config.json").write_text("{}")
    done = run("serve", str(tmp_path / "r"), *FREE)
    assert done.returncode == 1
    assert "demo" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_model_of_the_hub_is_served_offline_and_ctrl_c_ends_it_in_order(tmp_path: Path) -> None:
    hub_cache(tmp_path / "home", "acme/tiny", COMMIT)
    env = {"HF_HOME": str(tmp_path / "home"), "HF_HUB_OFFLINE": "1"}
    built = run("build", "--plugin", "hf", "--model", "acme/tiny",
                "--output", str(tmp_path / "r"), **env)  # fmt: skip
    assert built.returncode == 0, built.stderr
    served = Serving(tmp_path / "r", "--model", "tiny", **env)
    answer = run("query", "tiny", PROMPT, "--url", served.url, "--max-tokens", "8")
    assert answer.returncode == 0, answer.stderr
    # Loading one keeps the index to the server itself, and yet it is told what there is.
    unknown = run("query", "nope", PROMPT, "--url", served.url)
    assert (unknown.returncode, "choose one of tiny" in unknown.stderr) == (5, True)
    http = re.search(r"http +http://(\S+)", served.told)
    assert http
    wrong = run("query", "tiny", PROMPT, "--url", http[1])
    assert (wrong.returncode, "speaks HTTP, not gRPC" in wrong.stderr) == (4, True)
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
    from llmserve_cli.commands import llmserve_register_commands

    group = click.Group()
    llmserve_register_commands(group)
    for command in group.commands:
        done = run(command, "--help")
        assert done.returncode == 0
        assert re.search(rf"\n +(eval )?.*llmserve {command}", done.stdout.split("Usage", 1)[1]), (
            command
        )
