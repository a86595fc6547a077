"""The command line as a user has it: serve, query, Ctrl-C, and what goes wrong."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from pathlib import Path
from urllib.request import Request, urlopen

import pytest

import llmserve
from tests.contract.test_hub import COMMIT
from tests.live.collector import Collector
from tests.live.servers import PROMPT, Serving, eventually
from tests.support import LLMSERVE, http_server, hub_cache, run


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cli")


@pytest.fixture(scope="module")
def repository(home: Path) -> Path:
    folder = home / "model_repository"
    llmserve.build("hf", "demo", output=folder, name="unary", decoupled=False)
    return folder


@pytest.fixture(scope="module")
def collector() -> Collector:
    return Collector()


@pytest.fixture(scope="module")
def serving(home: Path, repository: Path, collector: Collector) -> Iterator[Serving]:
    """A server that was told which models to load; one is of the hub, which is out of reach."""
    hub_cache(home / "hf", "acme/tiny", COMMIT)
    env = {**os.environ, "HF_HOME": str(home / "hf"), "HF_HUB_OFFLINE": "1"}
    env["OTEL_EXPORTER_OTLP_HEADERS"] = "authorization=Bearer%20sesame"
    words = ["build", "--plugin", "hf", "--model", "acme/tiny", "--output", str(repository)]
    built = run(*words, env=env)
    assert built.returncode == 0, built.stderr
    names = [word for name in ("unary", "tiny") for word in ("--model", name)]
    with http_server(collector.take) as url:
        served = Serving(str(repository), *names, "--otlp-endpoint", url, env=env)
        yield served
        if served.process.poll() is None:
            assert served.interrupt() == 0


def test_a_trace_leads_from_the_client_through_the_gateway_into_triton(
    serving: Serving, collector: Collector
) -> None:
    (front,) = serving.frontend
    trace, client = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
    body = {"model": "unary", "prompt": PROMPT, "max_tokens": 3, "temperature": 0.5}
    for headers in ({"traceparent": f"00-{trace}-{client}-01"}, {}):
        request = Request(f"http://{front}/v1/completions", json.dumps(body).encode(), headers)
        with urlopen(request, timeout=60) as answer:
            assert json.load(answer)["usage"]["completion_tokens"] == 3
    eventually(
        lambda: len(collector.named("text_completion")) == len(collector.named("InferRequest")) == 2
    )
    by_trace = {span.trace: span for span in collector.named("text_completion")}
    gateway, other = by_trace.pop(trace), by_trace.popitem()[1]
    assert (gateway.parent, other.parent) == (client, "")
    assert (gateway.service, gateway.name) == ("llmserve-gateway", "text_completion unary")
    assert gateway.attributes["gen_ai.request.temperature"] == 0.5
    assert gateway.attributes["gen_ai.usage.output_tokens"] == 3
    assert "llmserve.admitted" in gateway.events
    for above in (gateway, other):
        asked, model, compute = (
            next(span for span in collector.named(name) if span.trace == above.trace)
            for name in ("InferRequest", "unary", "compute")
        )
        assert [asked.parent, model.parent, compute.parent] == [above.id, asked.id, model.id]
        assert {asked.service, model.service} == {"triton"}
        assert "QUEUE_START" in model.events
        assert "COMPUTE_START" in compute.events
    # Both read the headers of OpenTelemetry's variable as it writes them.
    assert collector.keys == {"Bearer sesame"}
    # Nothing else is traced: no canary, and no client that does not say that it is part of one.
    assert serving.answers("unary", PROMPT)
    assert {span.trace for span in collector.spans} == {trace, other.trace}
    assert not [span for span in collector.spans if PROMPT in str(span)]


def query(serving: Serving, model: str, *words: str, stdin: str = "") -> str:
    """Ask for a few tokens and return what is printed."""
    env = {**os.environ, "LLMSERVE_URL": serving.url}
    done = run("query", model, *words, "--max-tokens", "12", stdin=stdin, env=env)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


def lines(folder: Path, *prompts: str) -> list[str]:
    path = folder / "prompts.txt"
    path.write_text("".join(f"{prompt}\n" for prompt in prompts))
    return ["--file", str(path)]


def test_a_query_prints_the_answer_and_nothing_else(serving: Serving, repository: Path) -> None:
    whole = query(serving, "unary", PROMPT)
    assert len(whole) > 20
    assert query(serving, "tiny", PROMPT) == whole
    assert query(serving, "tiny", "--no-stream", PROMPT) == whole
    assert query(serving, "tiny", stdin=f"{PROMPT}\n") == whole
    assert query(serving, "tiny", "-", stdin=PROMPT) == whole
    for name in ("tiny", "unary"):
        command = [sys.executable, str(repository / name / "client.py"), PROMPT]
        done = subprocess.run(
            [*command, "--url", serving.url, "--max-tokens", "12"],
            cwd=repository.parent, capture_output=True, text=True, check=True, timeout=60,
        )  # fmt: skip
        assert done.stdout == whole


def test_json_has_counts_and_log_probabilities_for_who_asks(
    serving: Serving, repository: Path
) -> None:
    answer = json.loads(query(serving, "tiny", PROMPT, "--json"))
    assert (answer["output_tokens"], answer["finish_reason"]) == (12, "length")
    assert "logprobs" not in answer
    asked = [PROMPT, "--json", "--logprobs", "2"]
    answer = json.loads(query(serving, "tiny", *asked))
    assert "".join(entry["token"] for entry in answer["logprobs"]) == answer["text"]
    assert [len(entry["top"]) for entry in answer["logprobs"]] == [2] * 12
    command = [sys.executable, str(repository / "tiny" / "client.py"), *asked]
    emitted = subprocess.run(
        [*command, "--max-tokens", "12", "--url", serving.url],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert json.loads(emitted.stdout)["logprobs"] == answer["logprobs"]


def test_any_option_of_the_model_can_be_set(serving: Serving) -> None:
    common = ["unary", PROMPT, "--json", "--set", "min_length=3"]
    done = query(serving, *common, "--set", "temperature=2.5", "--set", "seed=7")
    assert done == query(serving, *common, "--temperature", "2.5", "--seed", "7")
    refused = run("query", *common, "--url", serving.url, "--set", "temperature=hot")
    assert (refused.returncode, "temperature" in refused.stderr) == (7, True)


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        # A server that was told which models to load keeps its index, and yet this is told.
        (["gone", "Hi"], 5, "choose one of"),
        (["unary", "Hi", "--stream"], 2, "decoupled=true"),
        (["unary", "Hi", "--set", "tempreature=1"], 2, "did you mean 'temperature'?"),
        (["unary", "Hi", "--set", "beams=4"], 2, "unary takes no beams: choose one of bad_words, "),
        (["unary", "Hi", "--max-tokens", "0"], 7, "max_tokens"),
        (["unary", ""], 7, "empty"),
        (["tiny", "Hi", "--timeout", "0.000001"], 6, "time"),
    ],
)
def test_what_the_server_refuses_is_one_line(
    serving: Serving, words: list[str], code: int, message: str
) -> None:
    done = run("query", *words, "--url", serving.url)
    assert (done.returncode, done.stdout) == (code, "")
    assert message in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_a_line_that_is_refused_costs_no_other_its_answer(serving: Serving, tmp_path: Path) -> None:
    # A blank line is no prompt, but it keeps its place.
    prompts = [PROMPT, "", "word " * 5000, "Hello", *["Two"] * 12]
    common = [*lines(tmp_path, *prompts), "--url", serving.url, "--max-tokens", "12"]
    plain = run("query", "unary", *common)
    assert plain.returncode == 7
    answers = plain.stdout.splitlines()
    assert [bool(answer) for answer in answers] == [True, False, False, *[True] * 13]
    assert answers[0] == query(serving, "unary", PROMPT).strip()
    (told,) = plain.stderr.splitlines()
    assert "line 3" in told
    as_json = run("query", "unary", *common, "--json")
    found = [json.loads(line) for line in as_json.stdout.splitlines()]
    assert as_json.returncode == 7
    assert found[1] == {"error": "the line is blank", "line": 2}
    assert found[2]["line"] == 3
    assert found[2]["error"] in told
    texts = [one["text"].strip() for one in found if "text" in one]
    assert texts == [answer for answer in answers if answer]


def test_a_file_is_given_up_when_the_server_lacks_the_model(
    serving: Serving, tmp_path: Path
) -> None:
    done = run("query", "gone", *lines(tmp_path, *["Hi"] * 20), "--url", serving.url)
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
        [*LLMSERVE, "query", "unary", *file, "--url", serving.url, "--max-tokens", "64"],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, pipesize=4096,
    )  # fmt: skip
    try:
        # Nobody reads: when the pipe is full, it is printing that waits, and not an answer.
        eventually(lambda: waiting(asked) > 3500, seconds=120)
        time.sleep(0.5)
        asked.send_signal(signal.SIGINT)
        answers, told = asked.communicate(timeout=30)
    finally:
        asked.kill()
    assert (asked.returncode, told) == (130, "llmserve: interrupted\n")
    assert answers.count("\n") < 1900


def test_a_reader_that_has_seen_enough_ends_it_as_in_a_shell(serving: Serving) -> None:
    asked = subprocess.Popen(
        [*LLMSERVE, "query", "tiny", PROMPT, "--url", serving.url, "--max-tokens", "256"],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert asked.stdout is not None
    assert asked.stderr is not None
    assert asked.stdout.read(1)
    asked.stdout.close()
    assert asked.stderr.read() == ""
    assert asked.wait(timeout=60) == 141


def test_the_port_for_http_is_told_and_after_ctrl_c_nobody_answers(serving: Serving) -> None:
    wrong = run("query", "tiny", PROMPT, "--url", serving.http)
    assert (wrong.returncode, "speaks HTTP, not gRPC" in wrong.stderr) == (4, True)
    assert serving.interrupt() == 0
    gone = run("query", "tiny", PROMPT, "--url", serving.url)
    assert (gone.returncode, "llmserve serve" in gone.stderr) == (4, True)


def test_a_build_that_is_terminated_leaves_nothing_behind(tmp_path: Path) -> None:
    repository = tmp_path / "r"
    repository.mkdir()
    # Whoever holds this lock makes a build wait when all but the last step is done.
    held = os.open(repository, os.O_RDONLY)
    fcntl.flock(held, fcntl.LOCK_EX)
    words = ["build", "--plugin", "hf", "--model", "demo", "--output", str(repository)]
    build = subprocess.Popen([*LLMSERVE, *words], stderr=subprocess.PIPE, text=True)
    try:
        eventually(lambda: list(tmp_path.glob(".r*/models/demo/llmserve.json")), seconds=60)
        build.terminate()
        told = build.communicate(timeout=60)[1]
    finally:
        build.kill()
        os.close(held)
    assert (build.returncode, told.split()) == (130, ["llmserve:", "interrupted"])
    assert list(tmp_path.rglob("*")) == [repository]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["serve", "/nowhere/at/all"], "llmserve build"),
        (["check", "/nowhere/at/all"], ""),
        (["plugins", "hff"], "did you mean 'hf'"),
    ],
)
def test_bad_input_is_told_in_one_line_with_its_mend(
    words: list[str], message: str, tmp_path: Path
) -> None:
    done = run(*words, cwd=tmp_path)
    assert done.returncode == 3
    assert message in done.stderr
    assert len(done.stderr.splitlines()) <= 1
    assert not list(tmp_path.iterdir())


def test_all_that_keeps_a_repository_from_being_served_is_told_before_anything_starts(
    repository: Path, tmp_path: Path
) -> None:
    folder = shutil.copytree(repository, tmp_path / "r")
    (folder / "unary" / "1" / "model" / "model.safetensors").unlink()
    with socket.create_server(("127.0.0.1", 0)) as one, socket.create_server(("", 0)) as two:
        taken = [str(listener.getsockname()[1]) for listener in (one, two)]
        ports = ["--http-port", taken[0], "--grpc-port", "0", "--metrics-port", taken[1]]
        ports += ["--frontend-port", "0"]
        done = run("serve", str(folder), *ports, TMPDIR=str(tmp_path))
    assert done.returncode == 3
    assert "model.safetensors is missing" in done.stderr
    for port in taken:
        assert f"port {port} " in done.stderr
    assert "see /tmp" not in done.stderr
    # Not even a log: Triton was not started.
    assert list(tmp_path.iterdir()) == [folder]


def test_the_demo_shows_the_whole_way() -> None:
    done = run("demo", "--max-tokens", "12")
    assert done.returncode == 0, done.stderr
    for words in (PROMPT, "embedded Triton", "nothing is left running"):
        assert words in done.stdout
