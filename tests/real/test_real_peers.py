"""What was served by llama.cpp or vLLM is adopted, and answers as they do: a real chat model."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from llmserve.testing.command import LLMSERVE
from plugins.tools.bench.peers import server
from tests import llama_environment
from tests.real.model import NotHad, widened_file
from tests.real.reference import CHATS

pytestmark = [pytest.mark.real, pytest.mark.long]
_MOST_DIFFERENCE = 0.02
"""Of the log-probabilities of a token, both computed in float32."""


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


@contextmanager
def llama_server(file: Path, log: Path) -> Iterator[tuple[str, str]]:
    """Yield the line that starts it, and its address."""
    port = free_port()
    # With more threads than cores are free, they wait for one another in a loop.
    options = llama_environment.options(
        file, "real", port, 4, 1, cache_type_k="f32", cache_type_v="f32"
    )
    with server([*llama_environment.llama_server(), *options], port, log) as url:
        yield " ".join(["llama-server", *options]), url


def check_equal(report: Path) -> None:
    found: dict[str, Any] = json.loads((report / "answers-real.json").read_text(encoding="utf-8"))
    verdicts = [pair["verdict"] for pair in found["pairs"]]
    assert verdicts == ["equal"] * len(CHATS[:4]), found["pairs"]
    assert found["tokens"] > 40, "log-probabilities were compared"
    assert found["largest_difference"] < _MOST_DIFFERENCE
    page = (report / "report.md").read_text(encoding="utf-8")
    speeds = [row.split("|") for row in page.splitlines() if row.startswith(("| old |", "| new |"))]
    assert [float(cells[2]) > 0 for cells in speeds] == [True, True], page
    sizes = [line for line in page.splitlines() if line.startswith(("- old: ", "- new: "))]
    assert len(sizes) == 2
    assert all(float(line.split()[2]) > 300 for line in sizes), "each has the weights in memory"


def requests_file(folder: Path) -> Path:
    """Write what a client's log of requests has."""
    path = folder / "requests.jsonl"
    bodies = [{"model": "x", "messages": [{"role": "user", "content": each}]} for each in CHATS[:4]]
    lines = [json.dumps({"custom_id": "1", "body": body}) for body in bodies]
    path.write_text("\n".join(lines), encoding="utf-8")
    return path


def compare(line: str, url: str, folder: Path, plugin: str, *words: str) -> None:
    done = subprocess.run(
        [*LLMSERVE, "adopt", line, "--plugin", plugin, "--out", str(folder / "llmserve.toml"),
        "--compare", url, "--prompts", str(requests_file(folder)),
        "--report", str(folder / "report"), *words],
        capture_output=True, encoding="utf-8", check=False, timeout=1200,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    check_equal(folder / "report")


@pytest.mark.skipif(find_spec("vllm") is not None, reason="`make test-long` runs it")
@pytest.mark.skipif(not llama_environment.is_here(), reason="`make bench-peers` fetches llama.cpp")
def test_a_model_of_llama_cpp_answers_the_same(real_file: Path, tmp_path: Path) -> None:
    del real_file
    try:
        widened = widened_file()
    except NotHad as error:
        pytest.skip(f"the model cannot be had: {error}")
    with llama_server(widened, tmp_path / "llama.log") as (line, url):
        compare(line, url, tmp_path, "iterative")


@pytest.mark.skipif(find_spec("vllm") is None, reason="only `make test-vllm` installs vLLM")
def test_a_model_of_vllm_answers_the_same(real_folder: Path, tmp_path: Path) -> None:
    port = free_port()
    words = [
        "serve", str(real_folder), "--served-model-name", "real", "--dtype", "float32",
        "--max-model-len", "1024", "--enforce-eager", "--gpu-memory-utilization", "0.1",
        "--host", "127.0.0.1", "--port", str(port),
    ]  # fmt: skip
    program = Path(sys.executable).with_name("vllm")
    with server([str(program), *words], port, tmp_path / "vllm.log", HF_HUB_OFFLINE="1") as url:
        compare(f"vllm {' '.join(words)}", url, tmp_path, "iterative", "--model", str(real_folder))
