"""The command line as a user runs it: serve, query, Ctrl-C, and errors."""

from __future__ import annotations

import fcntl
import json
import os
import re
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
from llmserve.testing.command import LLMSERVE, run
from llmserve.testing.web import http_server
from tests.live.collector import Collector, Span
from tests.live.servers import PROMPT, Serving, eventually
from tests.loopback_hub import COMMIT
from tests.support import hub_cache


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
    """A server with selected models, one of them from the hub, which cannot be reached."""
    hub_cache(home / "hf", "acme/tiny", COMMIT)
    env = {**os.environ, "HF_HOME": str(home / "hf"), "HF_HUB_OFFLINE": "1"}
    env["OTEL_EXPORTER_OTLP_HEADERS"] = "authorization=Bearer%20sesame"
    args = ["build", "--plugin", "hf", "--model", "acme/tiny", "--output", str(repository)]
    built = run(*args, env=env)
    assert built.returncode == 0, built.stderr
    models = [arg for name in ("unary", "tiny") for arg in ("--model", name)]
    with http_server(collector.receive) as url:
        served = Serving(str(repository), *models, "--otlp-endpoint", url, env=env)
        yield served
        if served.process.poll() is None:
            assert served.interrupt() == 0


@pytest.mark.long
def test_a_trace_leads_from_the_client_through_the_gateway_into_triton(
    serving: Serving, collector: Collector
) -> None:
    (address,) = serving.frontend
    trace, client = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
    body = {"model": "unary", "prompt": PROMPT, "max_tokens": 3, "temperature": 0.5}
    # Several of each, because Triton loses the spans of about one request in twenty.
    for headers in [{"traceparent": f"00-{trace}-{client}-01"}] * 4 + [{}] * 4:
        request = Request(f"http://{address}/v1/completions", json.dumps(body).encode(), headers)
        with urlopen(request, timeout=60) as response:
            assert json.load(response)["usage"]["completion_tokens"] == 3

    def whole() -> list[tuple[Span, Span]]:
        """Return the spans of the gateway below which Triton has its own."""
        ours = {span.id: span for span in collector.named("text_completion")}
        return [
            (ours[span.parent], span)
            for span in collector.named("InferRequest")
            if span.parent in ours and len(ours) == 8
        ]

    eventually(lambda: {bool(gateway.parent) for gateway, _ in whole()} == {True, False})
    for gateway, infer in whole():
        assert gateway.parent in (client, "")
        assert (gateway.trace == trace) == (gateway.parent == client)
        assert (gateway.service, gateway.name) == ("llmserve-gateway", "text_completion unary")
        assert gateway.attributes["gen_ai.request.temperature"] == 0.5
        assert gateway.attributes["gen_ai.usage.output_tokens"] == 3
        assert gateway.attributes["http.response.status_code"] == 200
        assert "error.type" not in gateway.attributes
        assert "llmserve.admitted" in gateway.events
        (model,) = (span for span in collector.named("unary") if span.parent == infer.id)
        (compute,) = (span for span in collector.named("compute") if span.parent == model.id)
        assert {span.trace for span in (infer, model, compute)} == {gateway.trace}
        assert {infer.service, model.service} == {"triton"}
        assert "QUEUE_START" in model.events
        assert "COMPUTE_START" in compute.events
    # The gateway and Triton both decode the headers in OpenTelemetry's variable.
    assert collector.keys == {"Bearer sesame"}
    # Nothing else is traced: no canary, and no client of Triton that sends no trace context.
    assert serving.try_generate("unary", PROMPT)
    ours = {span.trace for span in collector.named("text_completion")}
    assert len(ours) == 5
    assert {span.trace for span in collector.spans} == ours
    assert not [span for span in collector.spans if PROMPT in str(span)]


def query(serving: Serving, model: str, *args: str, stdin: str = "") -> str:
    """Generate a few tokens and return what is printed."""
    env = {**os.environ, "LLMSERVE_URL": serving.url}
    done = run("query", model, *args, "--max-tokens", "12", stdin=stdin, env=env)
    notice = "" if "--json" in args else "[stopped at 12 tokens: --max-tokens]\n"
    assert (done.returncode, done.stderr) == (0, notice)
    return done.stdout


def prompt_file(folder: Path, *prompts: str) -> list[str]:
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


def test_json_has_counts_and_optional_log_probabilities(serving: Serving, repository: Path) -> None:
    answer = json.loads(query(serving, "tiny", PROMPT, "--json"))
    assert (answer["output_tokens"], answer["finish_reason"]) == (12, "length")
    assert "logprobs" not in answer
    args = [PROMPT, "--json", "--logprobs", "2"]
    answer = json.loads(query(serving, "tiny", *args))
    assert "".join(entry["token"] for entry in answer["logprobs"]) == answer["text"]
    assert [len(entry["top"]) for entry in answer["logprobs"]] == [2] * 12
    command = [sys.executable, str(repository / "tiny" / "client.py"), *args]
    emitted = subprocess.run(
        [*command, "--max-tokens", "12", "--url", serving.url],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert json.loads(emitted.stdout)["logprobs"] == answer["logprobs"]


def test_the_emitted_client_refuses_a_model_that_is_not_the_pinned_one(
    serving: Serving, repository: Path
) -> None:
    own = serving.client.model("tiny").fingerprint
    assert own
    other = own.replace("fp_", "fp_7", 1)
    other = f"{other[:8]}{other[9:]}"
    words = [sys.executable, str(repository / "tiny" / "client.py"), PROMPT, "--url", serving.url]
    done = [
        subprocess.run([*words, "--pin", pin], capture_output=True, text=True, check=False)
        for pin in (own, other)
    ]
    assert [each.returncode for each in done] == [0, 3]
    assert done[0].stdout
    assert done[1].stdout == ""
    assert f"it has other weights (its own is {own})" in done[1].stderr


def test_any_option_of_the_model_can_be_set(serving: Serving) -> None:
    common = ["unary", PROMPT, "--json", "--set", "min_length=3"]
    output = query(serving, *common, "--set", "temperature=2.5", "--set", "seed=7")
    assert output == query(serving, *common, "--temperature", "2.5", "--seed", "7")
    refused = run("query", *common, "--url", serving.url, "--set", "temperature=hot")
    assert (refused.returncode, "temperature" in refused.stderr) == (7, True)


@pytest.mark.parametrize(
    ("args", "code", "message"),
    [
        # A server with selected models hides its index, but the error still lists the models.
        (["gone", "Hi"], 5, "choose one of"),
        (["unary", "Hi", "--stream"], 2, "decoupled=true"),
        (["unary", "Hi", "--set", "tempreature=1"], 2, "did you mean 'temperature'?"),
        (["unary", "Hi", "--set", "beams=4"], 2, "has no option beams: see docs/"),
        (["unary", "Hi", "--max-tokens", "0"], 7, "max_tokens"),
        (["unary", ""], 7, "empty"),
        (["tiny", "Hi", "--timeout", "0.000001"], 6, "time"),
    ],
)
def test_what_the_server_refuses_is_one_line(
    serving: Serving, args: list[str], code: int, message: str
) -> None:
    done = run("query", *args, "--url", serving.url)
    assert (done.returncode, done.stdout) == (code, "")
    assert message in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_a_refused_line_does_not_affect_the_others(serving: Serving, tmp_path: Path) -> None:
    # A blank line is not a prompt, but the output has a line for it.
    prompts = [PROMPT, "", "word " * 5000, "Hello", *["Two"] * 12]
    common = [*prompt_file(tmp_path, *prompts), "--url", serving.url, "--max-tokens", "12"]
    plain = run("query", "unary", *common)
    assert plain.returncode == 7
    answers = plain.stdout.splitlines()
    assert [bool(answer) for answer in answers] == [True, False, False, *[True] * 13]
    assert answers[0] == query(serving, "unary", PROMPT).strip()
    error, notice = plain.stderr.splitlines()
    assert "line 3" in error
    assert re.fullmatch(r"\[\d+ answers stopped at the limit: --max-tokens\]", notice)
    as_json = run("query", "unary", *common, "--json")
    entries = [json.loads(line) for line in as_json.stdout.splitlines()]
    assert as_json.returncode == 7
    assert entries[1] == {"error": "the line is blank", "line": 2}
    assert entries[2]["line"] == 3
    assert entries[2]["error"] in error
    texts = [entry["text"].strip() for entry in entries if "text" in entry]
    assert texts == [answer for answer in answers if answer]


def test_a_file_is_dropped_if_the_server_lacks_the_model(serving: Serving, tmp_path: Path) -> None:
    done = run("query", "gone", *prompt_file(tmp_path, *["Hi"] * 20), "--url", serving.url)
    assert (done.returncode, done.stdout) == (5, "")
    assert len(done.stderr.splitlines()) == 1


def unread_bytes(process: subprocess.Popen[str]) -> int:
    """Return how many bytes of a process's output have not been read."""
    assert process.stdout is not None
    count = fcntl.ioctl(process.stdout, termios.FIONREAD, bytes(4))
    return int.from_bytes(count, sys.byteorder)


def test_ctrl_c_ends_a_file_of_prompts_at_once(serving: Serving, tmp_path: Path) -> None:
    file = prompt_file(tmp_path, *["Once upon a time"] * 2000)
    process = subprocess.Popen(
        [*LLMSERVE, "query", "unary", *file, "--url", serving.url, "--max-tokens", "64"],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, pipesize=4096,
    )  # fmt: skip
    try:
        # The output is not read: once the pipe is full, printing blocks and not a request.
        eventually(lambda: unread_bytes(process) > 3500, seconds=120)
        time.sleep(0.5)
        process.send_signal(signal.SIGINT)
        answers, errors = process.communicate(timeout=30)
    finally:
        process.kill()
    assert (process.returncode, errors) == (130, "llmserve: interrupted\n")
    assert answers.count("\n") < 1900


def test_a_closed_output_pipe_ends_it_as_in_a_shell(serving: Serving) -> None:
    process = subprocess.Popen(
        [*LLMSERVE, "query", "tiny", PROMPT, "--url", serving.url, "--max-tokens", "256"],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert process.stdout is not None
    assert process.stderr is not None
    assert process.stdout.read(1)
    process.stdout.close()
    assert process.stderr.read() == ""
    assert process.wait(timeout=60) == 141


def test_the_http_port_is_recognized_and_nothing_answers_after_ctrl_c(serving: Serving) -> None:
    wrong = run("query", "tiny", PROMPT, "--url", serving.http)
    assert (wrong.returncode, "speaks HTTP, not gRPC" in wrong.stderr) == (4, True)
    assert serving.interrupt() == 0
    gone = run("query", "tiny", PROMPT, "--url", serving.url)
    assert (gone.returncode, "llmserve serve" in gone.stderr) == (4, True)


def test_a_build_that_is_terminated_leaves_nothing_behind(tmp_path: Path) -> None:
    repository = tmp_path / "r"
    repository.mkdir()
    # The build waits for this lock when all but its last step is done.
    lock = os.open(repository, os.O_RDONLY)
    fcntl.flock(lock, fcntl.LOCK_EX)
    args = ["build", "--plugin", "hf", "--model", "demo", "--output", str(repository)]
    build = subprocess.Popen([*LLMSERVE, *args], stderr=subprocess.PIPE, text=True)
    try:
        eventually(lambda: list(tmp_path.glob(".r*/models/demo/llmserve.json")), seconds=60)
        build.terminate()
        errors = build.communicate(timeout=60)[1]
    finally:
        build.kill()
        os.close(lock)
    assert (build.returncode, errors.split()) == (130, ["llmserve:", "interrupted"])
    assert list(tmp_path.rglob("*")) == [repository]


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["serve", "/nowhere/at/all", "--port", "0"], "llmserve build"),
        (["check", "/nowhere/at/all"], ""),
        (["plugins", "hff"], "did you mean 'hf'"),
    ],
)
def test_bad_input_gets_one_line_that_names_the_fix(
    args: list[str], message: str, tmp_path: Path
) -> None:
    done = run(*args, cwd=tmp_path)
    assert done.returncode == 3
    assert message in done.stderr
    assert len(done.stderr.splitlines()) <= 1
    assert not list(tmp_path.iterdir())


def test_everything_that_prevents_serving_is_reported_before_anything_starts(
    repository: Path, tmp_path: Path
) -> None:
    folder = shutil.copytree(repository, tmp_path / "r")
    llmserve.build("hf", "demo", output=folder, name="other")
    (folder / "unary" / "1" / "model" / "model.safetensors").unlink()
    with socket.create_server(("127.0.0.1", 0)) as http, socket.create_server(("", 0)) as metrics:
        taken = [str(listener.getsockname()[1]) for listener in (http, metrics)]
        ports = ["--http-port", taken[0], "--grpc-port", "0", "--metrics-port", taken[1]]
        ports += ["--port", "0"]
        done = run("serve", str(folder), *ports, TMPDIR=str(tmp_path))
    assert done.returncode == 1
    # The others could be served without it.
    assert "unary is left out: 1/model/model.safetensors is missing" in done.stderr
    assert f"ports {taken[0]} for http and {taken[1]} for metrics are in use" in done.stderr
    assert "see /tmp" not in done.stderr
    # There is not even a log, because Triton was not started.
    assert list(tmp_path.iterdir()) == [folder]


def test_the_demo_shows_the_whole_workflow() -> None:
    done = run("demo", "--max-tokens", "12")
    assert done.returncode == 0, done.stderr
    for text in (PROMPT, "embedded Triton", "nothing is left running"):
        assert text in done.stdout
