"""`llmserve query` without a Triton: its input and output, and servers that are slow or silent."""

from __future__ import annotations

import json
import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from llmserve.client import aio
from llmserve.commands import print_table
from llmserve.commands.tables import fold_table
from llmserve.errors import UnreachableError, UsageError
from llmserve.testing import ScriptedTriton
from llmserve_cli import query as query_module
from llmserve_cli.group import cli


def query(*words: str, stdin: str | bytes | None = None) -> Result:
    return CliRunner().invoke(cli, ["query", "m", *words], input=stdin, standalone_mode=False)


PROMPTS = "one\r\n\ntwo\n   \nthree\n"


@pytest.mark.parametrize("from_stdin", [True, False])
def test_each_line_of_a_file_gets_an_answer_in_order(
    url: str, tmp_path: Path, from_stdin: bool
) -> None:
    (tmp_path / "prompts").write_bytes(PROMPTS.encode())
    words = ["--file", "-" if from_stdin else str(tmp_path / "prompts"), "--url", url]
    plain = query(*words, stdin=PROMPTS)
    assert plain.stdout.splitlines() == ["cut off", "", "cut off", "", "cut off"]
    assert (plain.return_value, plain.stderr) == (0, "")
    lines = [
        json.loads(line) for line in query(*words, "--json", stdin=PROMPTS).stdout.splitlines()
    ]
    assert [line.get("text") for line in lines] == ["cut off", None, "cut off", None, "cut off"]
    assert lines[1] == {"error": "the line is blank", "line": 2}


@pytest.mark.parametrize(
    ("words", "stdin", "message"),
    [
        ([], "", 'standard input is empty: write a prompt to it, or run llmserve query m "Once'),
        (["-"], "\n", "standard input is empty"),
        (["-"], b"\xff\xfe", "standard input is not UTF-8 text (byte 0): save it as UTF-8"),
        (["--file", "-"], "\n\n", "standard input is empty: write one prompt per line"),
        (["--file", "/dev/null"], "", "/dev/null is empty"),
        (["--file", "-", "Hi"], "", "a prompt and --file cannot be combined: give one of them"),
        (["--file", "-", "--stream"], "", "--file prints whole answers: leave out --stream"),
        (["--json", "--stream", "Hi"], "", "--json prints whole answers: leave out --stream"),
        (["--logprobs", "2", "Hi"], "", "--logprobs needs --json"),
        (["--set", "seed=1", "--seed", "2", "Hi"], "", "seed is given twice"),
        (["--set", "stream=true", "Hi"], "", "--set cannot set stream"),
        (["--set", "text_input=x", "Hi"], "", "--set cannot set text_input"),
    ],
)
def test_a_prompt_that_cannot_be_sent_is_refused_with_the_fix(
    words: list[str], stdin: str | bytes, message: str
) -> None:
    error = query(*words, "--url", "127.0.0.1:9", stdin=stdin).exception
    assert isinstance(error, UsageError)
    assert message in str(error)


@pytest.mark.parametrize("words", [["Hi"], ["Hi", "--json"], ["--file", __file__]])
def test_a_server_that_falls_silent_does_not_block_a_query(
    scripted: ScriptedTriton, url: str, monkeypatch: pytest.MonkeyPatch, words: list[str]
) -> None:
    monkeypatch.setattr(query_module, "SILENT_SECONDS", 0.2)
    monkeypatch.setattr(aio, "QUICK_SECONDS", 0.5)
    scripted.finish = "silent"
    result = query(*words, "--url", url)
    assert isinstance(result.exception, UnreachableError)
    assert str(result.exception).startswith("the server no longer answers: look at its log")


def test_a_slow_server_is_waited_for(
    scripted: ScriptedTriton, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(query_module, "SILENT_SECONDS", 0.05)
    scripted.first = 0.5
    assert query("Hi", "--url", url).stdout == "cut off\n"


def test_escapes_in_an_answer_reach_a_pipe_but_no_terminal(
    scripted: ScriptedTriton, url: str
) -> None:
    scripted.pieces = ["red: \x1b[31m", "\x07 done"]
    command = [sys.executable, "-m", "llmserve_cli", "query", "m", "Hi", "--url", url]
    piped = subprocess.run(command, capture_output=True, check=True, timeout=60)
    assert piped.stdout == b"red: \x1b[31m\x07 done\n"
    controller, terminal = pty.openpty()
    try:
        subprocess.run(command, stdout=terminal, check=True, timeout=60)
        assert os.read(controller, 1000) == b"red: \\x1b[31m\\x07 done\r\n"
    finally:
        os.close(controller)
        os.close(terminal)


def test_images_go_to_a_model_that_reads_them_beside_the_message_that_shows_them(
    scripted: ScriptedTriton, url: str, tmp_path: Path
) -> None:
    (tmp_path / "photo").write_bytes(b"\xff\xd8\xff\xe0")
    (tmp_path / "drawing").write_bytes(b"\x89PNG")
    words = ["What?", "--image", str(tmp_path / "photo"), "--image", str(tmp_path / "drawing")]
    refused = query(*words, "--url", url).exception
    assert str(refused) == "m reads only text: leave out --image"
    scripted.inputs = ["image_url"]
    assert query(*words, "--url", url).stdout == "cut off\n"
    shown = [{"type": "image"}, {"type": "image"}, {"type": "text", "text": "What?"}]
    assert json.loads(scripted.messages[-1]) == [{"role": "user", "content": shown}]
    sent = str(scripted.requests[-1])
    assert "data:image/jpeg;base64,/9j/4A==" in sent
    assert "data:image/png;base64,iVBORw==" in sent


TABLE = [["NAME", "FROM", "WHAT IT IS"], ["short", "here", "Some words that do not fit here"]]


def test_a_table_folds_between_words() -> None:
    assert fold_table(TABLE, 0)[1] == "short  here  Some words that do not fit here"
    assert fold_table(TABLE, 44)[1:] == fold_table(TABLE, 0)[1:]
    assert fold_table(TABLE, 40) == [
        "NAME   FROM  WHAT IT IS",
        "short  here  Some words that do not fit",
        "             here",
    ]
    assert fold_table(TABLE, 20) == [
        "short",
        "  from: here",
        "  what it is: Some",
        "              words",
        "              that",
        "              do not",
        "              fit",
        "              here",
    ]


def test_a_pipe_gets_one_line_per_row(capsys: pytest.CaptureFixture[str]) -> None:
    print_table([["A", "B"], ["x", "words " * 50 + "end"]])
    assert len(capsys.readouterr().out.splitlines()) == 2


@pytest.mark.parametrize("locale", ["", "C", "POSIX", "xx_YY.UTF-8"])
def test_text_survives_any_locale(scripted: ScriptedTriton, url: str, locale: str) -> None:
    scripted.pieces = ["grün ", "🙂"]
    unset = {"LC_ALL", "LC_CTYPE", "LANG"}
    environment = {name: value for name, value in os.environ.items() if name not in unset}
    environment |= {"LC_ALL": locale} if locale else {}
    command = [sys.executable, "-m", "llmserve_cli", "query", "m", "wie schön", "--url", url]
    result = subprocess.run(command, env=environment, capture_output=True, check=True, timeout=60)
    assert result.stdout == "grün 🙂\n".encode()
    assert scripted.prompts == ["wie schön"]


@pytest.mark.parametrize(
    ("words", "notice"),
    [
        (["Hi"], "[stopped at 2 tokens: --max-tokens]\n"),
        (["Hi", "--no-stream"], "[stopped at 2 tokens: --max-tokens]\n"),
        (["--file", "-"], "[2 answers stopped at the limit: --max-tokens]\n"),
        (["Hi", "--json"], ""),
    ],
)
@pytest.mark.parametrize("reason", ["length", "stop"])
def test_an_answer_that_was_cut_off_says_so(
    scripted: ScriptedTriton, url: str, reason: str, words: list[str], notice: str
) -> None:
    scripted.reason = reason
    result = query(*words, "--url", url, stdin="one\ntwo\n")
    assert "cut off" in result.stdout
    assert result.stderr == (notice if reason == "length" else "")


@pytest.mark.parametrize("words", [["--chat"], ["--system", "Be brief."]])
def test_a_chat_may_begin_with_a_system_message(
    scripted: ScriptedTriton, url: str, words: list[str]
) -> None:
    assert query("Hi", *words, "--url", url).stdout == "cut off\n"
    system = [{"role": "system", "content": text} for text in words[1:]]
    assert json.loads(scripted.messages[0]) == [
        *system,
        {"role": "user", "content": "Hi"},
    ]


def test_what_follows_a_gap_is_sent_with_a_text(scripted: ScriptedTriton, url: str) -> None:
    assert query("def f(", "--suffix", "): pass", "--url", url).stdout == "cut off\n"
    assert scripted.requests[0].parameters["suffix"].string_param == "): pass"
    for words in (["--chat"], ["--system", "You help."]):
        error = query("def f(", "--suffix", "): pass", *words, "--url", url).exception
        assert "--suffix is for a text" in str(error)
    assert len(scripted.requests) == 1


PINNED = "fp_" + "-".join(["aaaaa"] * 6)


@pytest.mark.parametrize(
    ("fingerprint", "message"),
    [
        (PINNED, ""),
        (PINNED.replace("_aaaaa", "_bbbbb"), "it has other weights"),
        ("fp_" + "-".join(["aaaaa", "aaaab", "aaaab", "aaaaa", "aaaaa", "aaaaa"]),
         "it has other tokenizer and chat template"),
        ("", "it has other weights and tokenizer"),
    ],
)  # fmt: skip
def test_a_pinned_model_that_has_changed_is_not_asked(
    scripted: ScriptedTriton, url: str, fingerprint: str, message: str
) -> None:
    scripted.fingerprint = fingerprint
    result = query("Hi", "--pin", PINNED, "--url", url)
    assert message in str(result.exception or "")
    assert bool(scripted.requests) == (fingerprint == PINNED)


def test_a_pin_is_a_fingerprint() -> None:
    error = query("Hi", "--pin", "latest", "--url", "127.0.0.1:9").exception
    assert isinstance(error, UsageError)
    assert "latest is not a fingerprint" in str(error)
