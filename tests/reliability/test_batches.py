"""A batch with a line that kills its model's process, in the gateway and from the command line."""

from __future__ import annotations

import json
import os
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from llmserve.testing.command import run
from tests.live.servers import WORDS, Serving, eventually, figure, repository

pytestmark = pytest.mark.long

ASKED = "ASKED_TO_DIE"
"""Names the file that has a line for each time that the model died."""
DEADLY = WORDS.replace(
    "        count, _, pause =",
    f"""        if prompt == b"deadly":
            import os
            with open(os.environ["{ASKED}"], "a") as asked:
                asked.write("x\\n")
            os.kill(os.getpid(), 9)
        count, _, pause =""",
)
PROMPTS = ["1", "2 0.1", "deadly", "3 0.1", "4", "5 0.1"]


@pytest.fixture
def asked(tmp_path: Path) -> Path:
    return tmp_path / "asked"


@pytest.fixture
def serve(tmp_path: Path, asked: Path) -> Iterator[Serving]:
    folder = repository(tmp_path / "models", words=DEADLY)
    batches = str(tmp_path / "batches")
    env = {**os.environ, ASKED: str(asked)}
    running = Serving(str(folder), "--batches", batches, env=env)
    yield running
    running.close()


@pytest.fixture
def source(tmp_path: Path) -> Path:
    bodies = [{"model": "words", "prompt": prompt, "max_tokens": 8} for prompt in PROMPTS]
    lines = [
        {"custom_id": body["prompt"], "method": "POST", "url": "/v1/completions", "body": body}
        for body in bodies
    ]
    path = tmp_path / "in.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    return path


def call(serve: Serving, path: str, data: bytes | None = None, kind: str = "") -> bytes:
    headers = {"content-type": kind or "application/json"}
    request = urllib.request.Request(f"http://{serve.frontend[0]}/v1{path}", data, headers)
    with urllib.request.urlopen(request, timeout=30) as response:
        return bytes(response.read())


def upload(serve: Serving, source: Path) -> str:
    parts = (
        b'--b\r\ncontent-disposition: form-data; name="purpose"\r\n\r\nbatch\r\n'
        b'--b\r\ncontent-disposition: form-data; name="file"; filename="in"\r\n\r\n'
        b"%b\r\n--b--\r\n" % source.read_bytes()
    )
    content = call(serve, "/files", parts, "multipart/form-data; boundary=b")
    return str(json.loads(content)["id"])


def of_gateway(serve: Serving, source: Path) -> list[dict[str, Any]]:
    wanted = {
        "input_file_id": upload(serve, source),
        "endpoint": "/v1/completions",
        "completion_window": "24h",
    }
    name = json.loads(call(serve, "/batches", json.dumps(wanted).encode()))["id"]

    def ended() -> Any:
        batch = json.loads(call(serve, f"/batches/{name}"))
        return batch if batch["completed_at"] else None

    batch = eventually(ended, 120)
    files = [batch["output_file_id"], batch["error_file_id"]]
    content = b"".join(call(serve, f"/files/{file}/content") for file in files if file)
    return [json.loads(line) for line in content.splitlines()]


def of_command_line(serve: Serving, source: Path) -> list[dict[str, Any]]:
    output = source.with_name("out.jsonl")
    run("batch", str(source), str(output), "--openai", f"http://{serve.frontend[0]}/v1")
    return [json.loads(line) for line in output.read_text(encoding="utf-8").splitlines()]


@pytest.mark.parametrize("engine", [of_gateway, of_command_line])
def test_a_line_that_kills_its_model_is_sent_twice_and_costs_no_other(
    serve: Serving, source: Path, asked: Path, engine: Any
) -> None:
    began = time.monotonic()
    lines = engine(serve, source)
    figure("a batch with a line that kills its model took", time.monotonic() - began)
    codes = {line["custom_id"]: line["error"] and line["error"]["code"] for line in lines}
    assert codes == {name: "model_died" if name == "deadly" else None for name in PROMPTS}
    assert asked.read_text(encoding="utf-8").count("x") == 2
