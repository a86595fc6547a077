"""`llmserve batch` against a scripted server: its files, its retries, and its interruptions."""

from __future__ import annotations

import errno
import gc
import json
import os
import signal
import stat
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from hypothesis import given, settings
from hypothesis import strategies as st

from llmserve.client import BatchClient, BatchRequests, answer_line, open_answers
from llmserve.contract.report import FrontendReport, ModelReport, ServerReport, State
from llmserve.errors import RequestRejectedError, UnreachableError, UsageError
from llmserve.server import Running
from llmserve_cli.group import cli


class Script(ThreadingHTTPServer):
    """A server with OpenAI's API that does to each prompt what the prompt says."""

    daemon_threads = True
    request_queue_size = 128

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.received: Counter[str] = Counter()
        self.keys: set[str] = set()
        self.status = 200
        self.busy_until = 1
        self.delay = 0.0
        self.running = self.most = 0
        self.lock = threading.Lock()
        self.connections = 0
        self.hangs_up = False
        self.loading: list[int] = [404]
        """What it answers, one after the other, to whether the model is ready."""
        self.crash = 0
        """How many crashes there were; each breaks what is in flight."""

    def finish_request(self, *arguments: Any) -> None:
        with self.lock:
            self.connections += 1
        super().finish_request(*arguments)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/v1"


class Handler(BaseHTTPRequestHandler):
    server: Script

    def log_message(self, *_: Any) -> None:
        pass

    def do_GET(self) -> None:
        if self.path == "/readyz/m":
            states = self.server.loading
            self.reply(states.pop(0) if len(states) > 1 else states[0], {})
            return
        self.reply(self.server.status, {"object": "list", "data": []})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        prompt, script = body["prompt"], self.server
        with script.lock:
            script.received[prompt] += 1
            script.keys.add(self.headers.get("authorization", ""))
            script.running += 1
            script.most = max(script.most, script.running)
            crashes = script.crash
        time.sleep(script.delay)
        with script.lock:
            script.running -= 1
            if script.crash > crashes:
                self.crashed()
                return
            if prompt.startswith("deadly"):
                script.crash += 1
                self.crashed()
                return
        self.answer(prompt, script.received[prompt])

    def crashed(self) -> None:
        if self.server.loading == [404]:
            self.close_connection = True
        else:
            self.server.loading[:] = [503, 503, 200]
            error = {"message": "gone", "code": "model_died"}
            self.reply(503, {"error": error}, "0.05")

    def answer(self, prompt: str, attempt: int) -> None:
        if prompt == "refused":
            self.reply(400, {"error": {"message": "too long", "code": "context_length_exceeded"}})
        elif prompt == "busy" and attempt <= self.server.busy_until:
            # The second is what a proxy answers while the server behind it starts again.
            status = 429 if attempt % 2 else 502
            self.reply(status, {"error": {"message": "full", "code": "queue_full"}}, "0.05")
        elif prompt == "broken" and attempt == 1:
            self.connection.close()
        elif prompt == "always broken":
            self.close_connection = True
        elif prompt == "missing" and attempt == 1:
            self.reply(404, {"error": {"message": "no model", "code": "model_not_found"}})
        elif prompt == "denied":
            self.reply(401, {"error": {"message": "no such key"}})
        elif prompt == "slow":
            time.sleep(1)
        elif prompt == "odd":
            self.reply(200, "not an object")
        else:
            self.reply(200, {"choices": [{"index": 0, "text": f"to {prompt}"}]})

    def reply(self, status: int, body: Any, retry_after: str = "") -> None:
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("content-length", str(len(data)))
        self.send_header("x-request-id", "r-1")
        if retry_after:
            self.send_header("retry-after", retry_after)
        self.end_headers()
        self.wfile.write(data)
        # It does not say so: the next request finds it out.
        self.close_connection = self.close_connection or self.server.hangs_up


@pytest.fixture
def server() -> Iterator[Script]:
    script = Script()
    thread = threading.Thread(target=script.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    yield script
    script.shutdown()
    script.server_close()


def request(name: str, prompt: str = "", **fields: Any) -> dict[str, Any]:
    body = {"model": "m", "prompt": prompt or name}
    line = {"custom_id": name, "method": "POST", "url": "/v1/completions", "body": body}
    return line | fields


def write(path: Path, lines: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    return path


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_bytes().splitlines()]


def batch(source: Path, output: Path, server: Script, *words: str) -> Result:
    arguments = ["batch", str(source), str(output), "--openai", server.url, *words]
    return CliRunner().invoke(cli, arguments, standalone_mode=False)


def names(count: int) -> list[str]:
    return [str(number) for number in range(count)]


def test_each_request_is_answered_once_by_many_at_a_time(
    tmp_path: Path, server: Script, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "secret")
    source = write(tmp_path / "in", [request(name) for name in names(60)])
    server.delay = 0.02
    result = batch(source, tmp_path / "out", server, "--concurrency", "7")
    assert (result.return_value, result.stdout) == (0, "")
    assert result.stderr == f"[60 of 60 requests are answered, in {tmp_path / 'out'}]\n"
    lines = read(tmp_path / "out")
    assert {line["custom_id"] for line in lines} == set(names(60))
    assert server.received == Counter(names(60))
    assert server.keys == {"Bearer secret"}
    assert 1 < server.most <= 7
    for line in lines:
        assert (line["error"], line["response"]["status_code"]) == (None, 200)
        assert line["response"]["request_id"] == "r-1"
        assert line["response"]["body"]["choices"][0]["text"] == f"to {line['custom_id']}"
    assert len({line["id"] for line in lines}) == 60
    assert stat.S_IMODE((tmp_path / "out").stat().st_mode) == 0o600


def test_a_failed_request_is_a_line_with_an_error_and_the_others_go_on(
    tmp_path: Path, server: Script
) -> None:
    prompts = ["refused", "odd", "slow", "busy", "broken", "fine"]
    source = write(tmp_path / "in", [request(prompt) for prompt in prompts])
    result = batch(source, tmp_path / "out", server, "--timeout", "0.3", "--in-order")
    assert isinstance(result.exception, RequestRejectedError)
    assert str(result.exception).startswith("3 of 6 requests failed: see their errors in ")
    lines = read(tmp_path / "out")
    assert [line["custom_id"] for line in lines] == prompts
    codes = [line["error"] and line["error"]["code"] for line in lines]
    assert codes == ["context_length_exceeded", "bad_answer", "timeout", None, None, None]
    assert lines[0]["error"]["message"] == "too long"
    assert lines[0]["response"]["status_code"] == 400
    assert server.received["busy"] == server.received["broken"] == 2
    assert server.received["refused"] == 1
    again = batch(source, tmp_path / "out", server)
    assert isinstance(again.exception, RequestRejectedError)
    assert server.received["refused"] == 1


def test_a_model_that_stays_full_costs_the_patience_once(tmp_path: Path, server: Script) -> None:
    server.busy_until = 1000
    source = write(tmp_path / "in", [*(request(n, "busy") for n in names(20)), request("fine")])
    began = time.monotonic()
    batch(source, tmp_path / "out", server, "--patience", "0.3", "--concurrency", "1")
    assert time.monotonic() - began < 2
    failed = [line for line in read(tmp_path / "out") if line["error"]]
    assert [line["error"]["code"] for line in failed] == ["queue_full"] * 20


def test_the_server_that_runs_here_is_found(
    tmp_path: Path, server: Script, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As `query` finds it: by the model that is asked, where several run."""
    others = [
        Running(
            Path(name),
            ServerReport(
                State.READY, url=name, repository=f"/{name}",
                models=(ModelReport(model, State.READY),),
                frontends=(FrontendReport("openai", State.READY, url=url),),
            ),
        )
        for name, model, url in (("a", "other", "http://127.0.0.1:9/v1"), ("b", "m", server.url))
    ]  # fmt: skip
    monkeypatch.setattr("llmserve.server.running.find_servers", lambda: others)
    source = write(tmp_path / "in.jsonl", [request("0")])
    words = ["batch", str(source), str(tmp_path / "out")]
    assert CliRunner().invoke(cli, words, standalone_mode=False).exception is None
    assert server.received == Counter(["0"])


@pytest.mark.parametrize("status", [401, 404])
def test_a_wrong_key_or_address_is_an_error_of_the_batch(
    tmp_path: Path, server: Script, status: int
) -> None:
    server.status = status
    source = write(tmp_path / "in", [request("1")])
    result = batch(source, tmp_path / "out", server)
    expected = RequestRejectedError if status == 401 else UnreachableError
    assert isinstance(result.exception, expected)
    assert not server.received
    assert not (tmp_path / "out").exists()
    (tmp_path / "out").touch()
    again = batch(source, tmp_path / "out", server)
    assert isinstance(again.exception, expected)
    assert not server.received


def test_a_key_that_is_withdrawn_ends_the_batch_and_costs_no_line(
    tmp_path: Path, server: Script
) -> None:
    source = write(tmp_path / "in", [request("1"), request("denied"), request("2")])
    result = batch(source, tmp_path / "out", server, "--concurrency", "1")
    assert isinstance(result.exception, RequestRejectedError)
    assert [line["custom_id"] for line in read(tmp_path / "out")] == ["1"]


def test_no_server_is_an_error_at_once(tmp_path: Path, server: Script) -> None:
    source = write(tmp_path / "in", [request("1")])
    result = batch(source, tmp_path / "out", server, "--openai", "http://127.0.0.1:9/v1")
    assert isinstance(result.exception, UnreachableError)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("kept", [False, True])
def test_a_request_that_always_breaks_its_connection_costs_the_others_nothing(
    tmp_path: Path, server: Script, monkeypatch: pytest.MonkeyPatch, kept: bool
) -> None:
    monkeypatch.setattr("llmserve.client.batches.jobs.FIRST_PAUSE", 0.01)
    monkeypatch.setattr(Handler, "protocol_version", "HTTP/1.1" if kept else "HTTP/1.0")
    prompts = ["1", "always broken", *names(5)[2:]]
    source = write(tmp_path / "in", [request(prompt) for prompt in prompts])
    result = batch(source, tmp_path / "out", server, "--concurrency", "1")
    assert str(result.exception).startswith("1 of 5 requests failed")
    lines = {line["custom_id"]: line["error"] for line in read(tmp_path / "out")}
    assert lines.keys() == set(prompts)
    assert lines["always broken"]["code"] == "connection_broken"
    assert "broke 2 times: the server closed the connection" in lines["always broken"]["message"]
    assert all(server.received[name] == 1 for name in prompts if name != "always broken")


def test_a_server_that_breaks_every_connection_costs_no_line(
    tmp_path: Path, server: Script, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("llmserve.client.batches.jobs.FIRST_PAUSE", 0.01)
    source = write(tmp_path / "in", [request(name, "always broken") for name in names(5)])
    result = batch(source, tmp_path / "out", server, "--patience", "0.2")
    assert isinstance(result.exception, UnreachableError)
    assert read(tmp_path / "out") == []


@pytest.mark.parametrize("says_so", [False, True])
def test_a_request_that_ends_the_server_costs_only_itself(
    tmp_path: Path, server: Script, monkeypatch: pytest.MonkeyPatch, says_so: bool
) -> None:
    monkeypatch.setattr("llmserve.client.batches.jobs.FIRST_PAUSE", 0.02)
    server.loading = [200] if says_so else [404]
    server.delay = 0.02
    prompts = ["1", *(f"deadly {n}" for n in range(2)), *names(30)[2:]]
    # It has answered one: without any, it would be the server that is at fault.
    batch(write(tmp_path / "in", [request("1")]), tmp_path / "out", server)
    source = write(tmp_path / "in", [request(prompt) for prompt in prompts])
    began = time.monotonic()
    result = batch(source, tmp_path / "out", server, "--concurrency", "12")
    assert time.monotonic() - began < 5
    assert str(result.exception).startswith("2 of 31 requests failed")
    errors = {line["custom_id"]: line["error"] for line in read(tmp_path / "out")}
    codes = {name: error and error["code"] for name, error in errors.items()}
    expected = "model_died" if says_so else "connection_broken"
    assert codes == {name: expected if "deadly" in name else None for name in prompts}
    assert {server.received[name] for name in prompts if "deadly" in name} == {2}


def test_a_model_that_still_loads_is_waited_for_and_one_that_is_missing_is_not(
    tmp_path: Path, server: Script, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("llmserve.client.batches.jobs.FIRST_PAUSE", 0.02)
    source = write(tmp_path / "in", [request("missing")])
    server.loading = [503, 200]
    assert batch(source, tmp_path / "out", server).return_value == 0
    assert server.received["missing"] == 2
    server.received.clear()
    server.loading = [404]
    assert batch(source, tmp_path / "none", server).exception
    assert [line["error"]["code"] for line in read(tmp_path / "none")] == ["model_not_found"]
    # One that has answered before is loaded again.
    server.received.clear()
    source = write(tmp_path / "more", [request("1"), request("missing")])
    result = batch(source, tmp_path / "two", server, "--concurrency", "1")
    assert result.return_value == 0


def test_errors_are_asked_again_if_that_is_wanted(tmp_path: Path, server: Script) -> None:
    source = write(tmp_path / "in", [request("missing"), request("1"), request("refused")])
    output = tmp_path / "out"
    first = batch(source, output, server, "--concurrency", "1")
    assert str(first.exception).startswith("2 of 3 requests failed")
    before = output.read_bytes()
    elsewhere = batch(source, output, server, "--retry-errors", "--openai", "http://127.0.0.1:9")
    assert isinstance(elsewhere.exception, UnreachableError)
    assert output.read_bytes() == before
    again = batch(source, output, server, "--retry-errors", "--in-order")
    assert str(again.exception).startswith("1 of 3 requests failed")
    assert [line["custom_id"] for line in read(output)] == ["missing", "1", "refused"]
    assert (server.received["1"], server.received["missing"]) == (1, 2)
    assert stat.S_IMODE(output.stat().st_mode) == 0o600


def test_connections_are_kept_and_made_anew_when_the_server_closes_them(
    tmp_path: Path, server: Script, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Handler, "protocol_version", "HTTP/1.1")
    source = write(tmp_path / "in", [request(name) for name in names(40)])
    assert batch(source, tmp_path / "out", server, "--concurrency", "4").return_value == 0
    assert server.connections <= 1 + 4
    server.connections, server.hangs_up = 0, True
    assert batch(source, tmp_path / "again", server, "--concurrency", "4").return_value == 0
    assert server.connections == 1 + 40
    assert server.received == Counter(names(40) * 2)


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ([], "is empty: write one request per line"),
        (["{"], "line 1 of"),
        (["[1]"], "is not an object"),
        ([request("")], "line 1 of"),
        ([request("1"), request("2"), request("1")], "has the custom_id of line 1"),
        ([request("1"), request("2", method="GET")], "has another method: use POST"),
        ([request("1", url="/v1/models")], "has no url that a batch can ask: use one of /v1/"),
        ([request("1", body={"prompt": "x"})], "has no body with a model"),
        ([request("1", body={"model": "m", "stream": True})], "asks for a stream"),
    ],
)
def test_an_input_is_refused_before_anything_is_sent(
    tmp_path: Path, server: Script, lines: list[Any], message: str
) -> None:
    texts = (line if isinstance(line, str) else json.dumps(line) for line in lines)
    (tmp_path / "in").write_text("\n".join(texts), encoding="utf-8")
    result = batch(tmp_path / "in", tmp_path / "out", server)
    assert isinstance(result.exception, UsageError)
    assert message in str(result.exception)
    assert not server.received
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("end", ["", "\n"])
def test_a_file_that_is_no_output_of_this_batch_stays_as_it_is(
    tmp_path: Path, server: Script, end: str
) -> None:
    source = write(tmp_path / "in", [request("1")])
    other = {"id": "batch_req_1", "custom_id": "9", "response": None, "error": None}
    for text in ("my notes", json.dumps(other) + "\n", "{}"):
        (tmp_path / "out").write_text(text + end, encoding="utf-8")
        result = batch(source, tmp_path / "out", server)
        assert isinstance(result.exception, UsageError)
        assert "something other than answers to this input" in str(result.exception)
        assert (tmp_path / "out").read_text(encoding="utf-8") == text + end
    result = batch(source, source, server)
    assert "input and output are the same file" in str(result.exception)
    assert read(source) == [request("1")]


def test_two_batches_do_not_write_to_one_file(tmp_path: Path, server: Script) -> None:
    source = write(tmp_path / "in", [request("1")])
    requests = BatchRequests(source)
    with open_answers(tmp_path / "out", requests):
        result = batch(source, tmp_path / "out", server)
    requests.close()
    assert "another batch writes to" in str(result.exception)


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_an_output_that_is_cut_off_anywhere_is_continued(
    data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("cut")
    ids = data.draw(st.lists(st.text(min_size=1, max_size=5), min_size=1, max_size=5, unique=True))
    source = write(folder / "in", [request(name) for name in ids])

    def line(name: str) -> dict[str, Any]:
        return {"id": "batch_req_1", "custom_id": name, "response": {}, "error": None}

    whole = b"".join(json.dumps(line(name)).encode() + b"\n" for name in ids)
    (folder / "out").write_bytes(whole[: data.draw(st.integers(0, len(whole)))])
    requests = BatchRequests(source)
    with open_answers(folder / "out", requests) as answers:
        for entry in requests.all:
            if entry.custom_id not in answers:
                answers.append(line(entry.custom_id))
    requests.close()
    assert (folder / "out").read_bytes() == whole


BODY_TEXT = st.text(st.sampled_from('a\\"\n\r\x85\u2028\u2029\u732b'), max_size=6)


@settings(max_examples=60, deadline=None)
@given(
    text=BODY_TEXT,
    indent=st.sampled_from([None, 1]),
    name=st.sampled_from(["1", '"body": null', '\\"body": null']),
)
def test_a_body_that_is_not_parsed_is_in_its_line_as_it_was(
    text: str, indent: int | None, name: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("out")
    body = json.dumps({"text": text, text: None}, ensure_ascii=False, indent=indent).encode()
    requests = BatchRequests(write(folder / "in", [request(name)]))
    with open_answers(folder / "out", requests) as answers:
        answers.append(answer_line(name, status=200), body)
    with open_answers(folder / "out", requests) as answers:
        assert (name in answers, answers.failed) == (True, 0)
    requests.close()
    (line,) = (folder / "out").read_text(encoding="utf-8").splitlines()
    found = json.loads(line)
    assert found["custom_id"] == name
    assert found["response"]["body"] == {"text": text, text: None}


def test_a_disk_that_is_full_leaves_no_part_of_a_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = write(tmp_path / "in", [request(name) for name in names(3)])
    requests, written = BatchRequests(source), os.write

    def write_half(handle: int, data: bytes) -> int:
        if len(data) < 20:
            raise OSError(errno.ENOSPC, "full")
        return written(handle, data[: len(data) // 2])

    with open_answers(tmp_path / "out", requests) as answers:
        answers.append(answer_line("0", status=200))
        with monkeypatch.context() as patch:
            patch.setattr(os, "write", write_half)
            with pytest.raises(UsageError, match="cannot be used: full"):
                answers.append(answer_line("1", status=200))
        answers.append(answer_line("2", status=200))
    with open_answers(tmp_path / "out", requests) as answers:
        assert [name in answers for name in names(3)] == [True, False, True]
    requests.close()


@contextmanager
def started(source: Path, output: Path, server: Script) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-m", "llmserve_cli", "batch", str(source), str(output)]
    words = ["--openai", server.url, "--concurrency", "4"]
    with subprocess.Popen([*command, *words], stderr=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


def wait_for_lines(output: Path, count: int) -> None:
    deadline = time.monotonic() + 20
    while not output.exists() or output.read_bytes().count(b"\n") < count:
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_an_interrupt_in_the_middle_of_a_line_is_told_once(
    tmp_path: Path, server: Script, caplog: pytest.LogCaptureFixture
) -> None:
    def interrupted(line: dict[str, Any]) -> None:
        raise KeyboardInterrupt

    requests = BatchRequests(write(tmp_path / "in", [request(n) for n in names(8)]))
    with open_answers(tmp_path / "out", requests) as answers, pytest.raises(KeyboardInterrupt):
        BatchClient(server.url).answer(requests, answers, interrupted)
    gc.collect()
    assert not caplog.records


def test_a_batch_that_is_killed_three_times_asks_nothing_twice_that_is_answered(
    tmp_path: Path, server: Script
) -> None:
    source, output = write(tmp_path / "in", [request(n) for n in names(200)]), tmp_path / "out"
    server.delay = 0.02
    answered: list[str] = []
    for number, end in ((3, signal.SIGKILL), (60, signal.SIGTERM), (120, signal.SIGINT)):
        with started(source, output, server) as process:
            wait_for_lines(output, number)
            os.kill(process.pid, end)
            _, words = process.communicate(timeout=20)
        assert process.returncode != 0
        if end == signal.SIGINT:
            assert words.splitlines()[-1] == "llmserve: interrupted"
            assert "Traceback" not in words
            assert "of 200 requests are answered: run the same command again" in words
        whole = output.read_bytes().rpartition(b"\n")[0].splitlines()
        answered = [json.loads(line)["custom_id"] for line in whole]
        before = {name: server.received[name] for name in answered}
        assert len(answered) < 200
    result = batch(source, output, server, "--in-order")
    assert result.return_value == 0
    assert [line["custom_id"] for line in read(output)] == names(200)
    assert all(server.received[name] == count for name, count in before.items())
    assert sum(server.received.values()) <= 200 + 3 * 4
