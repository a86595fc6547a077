"""The client that ``build`` emits: copied into a model's folder and run as its user runs it."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from llmserve.client import url as own_url

if TYPE_CHECKING:
    from tests.live.client.conftest import Journal

SCRIPT = Path(own_url.__file__).with_name("script.py")
LONG = "word " * 200


class Emitted:
    """The script in a folder of its own, which llmserve is not beside."""

    def __init__(self, folder: Path, url: str) -> None:
        self.path = Path(shutil.copy(SCRIPT, folder / "client.py"))
        self.environment = {**os.environ, "LLMSERVE_URL": url}
        self.environment.pop("PYTHONPATH", None)

    def start(self, *arguments: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, str(self.path), *arguments],
            env=self.environment,
            cwd=self.path.parent,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def run(self, *arguments: str, stdin: str = "") -> tuple[int, str, str]:
        process = self.start(*arguments)
        out, err = process.communicate(stdin, timeout=60)
        return process.returncode, out, err


@pytest.fixture
def emitted(tmp_path: Path, url: str) -> Emitted:
    (tmp_path / "words").mkdir()
    return Emitted(tmp_path / "words", url)


def test_it_streams_from_the_model_whose_folder_it_lies_in(emitted: Emitted) -> None:
    # The scripted model gives bare words, so pieces that are joined have no spaces.
    assert emitted.run("so long") == (0, "solong\n", "")
    assert emitted.run("--no-stream", stdin="so long\n") == (0, "so long\n", "")


def test_the_manifest_names_the_model(emitted: Emitted) -> None:
    (emitted.path.parent / "llmserve.json").write_text('{"name": "steps"}')
    assert emitted.run("a b c") == (0, "abc\n", "")


def test_options_and_json(emitted: Emitted) -> None:
    options = ["--max-tokens", "3", "--temperature", "0.5", "--top-p", "0.25", "--top-k", "4"]
    options += ["--seed", str(2**64 - 1), "--stop", "é", "--stop", "\n"]
    code, out, err = emitted.run("--model", "echo", "--json", "grün", *options)
    assert (code, err) == (0, "")
    answer = json.loads(out)
    seen = json.loads(answer.pop("text"))
    assert answer == {"finish_reason": "stop", "input_tokens": 5, "output_tokens": 5}
    assert seen["text"] == "grün"
    assert json.loads(seen["parameters"].pop("stop_words")) == ["é", "\n"]
    assert seen["parameters"] == {
        "max_tokens": 3,
        "temperature": 0.5,
        "top_p": 0.25,
        "top_k": 4,
        "seed": str(2**64 - 1),
    }


def test_it_speaks_to_unbatched_models(emitted: Emitted) -> None:
    code, out, _ = emitted.run("--model", "plain", "p")
    assert (code, json.loads(out)["text"]) == (0, "p")


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["--url", "127.0.0.1:9", "p"], 4, "no Triton answers at 127.0.0.1:9"),
        (["--url", "http://127.0.0.1:8000", "p"], 2, "gRPC port (usually 8001)"),
        (["--nonsense"], 2, "unrecognized arguments"),
        (["--model", "nothing", "p"], 5, "no model 'nothing' that is ready"),
        (["--timeout", "0.3", LONG], 6, "no complete answer in time"),
        (["one refuse"], 7, "refused: no such word"),
        (["--model", "steps", "refuse"], 7, "refused: no such word"),
        (["--model", "echo", "raise boom"], 7, "ValueError: boom"),
        (["--model", "echo", "bytes"], 1, "not UTF-8"),
    ],
)
def test_failures_have_their_exit_codes(
    emitted: Emitted, arguments: list[str], code: int, words: str
) -> None:
    returned, _, err = emitted.run(*arguments)
    assert (returned, words in err) == (code, True), err
    assert "Traceback" not in err


@pytest.mark.parametrize("model", ["words", "steps"])
def test_ctrl_c_leaves_nothing_behind(emitted: Emitted, journal: Journal, model: str) -> None:
    process = emitted.start("--model", model, f"interrupted {LONG}")
    assert process.stdout is not None
    assert process.stdout.read(11) == "interrupted"
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=30)
    assert (process.returncode, err) == (130, "")
    if model == "words":
        assert journal.shows_cancelled(f"interrupted {LONG}")
    else:
        assert journal.shows_all_ended(1)


def test_a_reader_that_has_seen_enough_is_no_error(emitted: Emitted) -> None:
    process = emitted.start(LONG)
    assert process.stdout is not None
    process.stdout.read(4)
    process.stdout.close()
    begin = time.monotonic()
    assert process.wait(timeout=30) == 0
    assert time.monotonic() - begin < 5
    assert process.stderr is not None
    assert process.stderr.read() == ""


def test_it_can_be_imported(emitted: Emitted) -> None:
    code = (
        "import client, sys\n"
        "print(client.generate('a b').text, [p.text for p in client.stream('a b')])\n"
        "print('llmserve' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=emitted.environment,
        cwd=emitted.path.parent,
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == "a b ['a', 'b']\nFalse\n"
