"""`llmserve query` without a Triton: what it reads and prints, and a server that falls silent."""

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
from llmserve.errors import UnreachableError, UsageError
from llmserve_cli import query as query_module
from llmserve_cli.group import cli
from llmserve_cli.terminal import fold_table, print_table
from tests.unit.scripted import Scripted


def query(*words: str, stdin: str | bytes | None = None) -> Result:
    return CliRunner().invoke(cli, ["query", "m", *words], input=stdin, standalone_mode=False)


PROMPTS = "one\r\n\ntwo\n   \nthree\n"


@pytest.mark.parametrize("stdin", [True, False])
def test_each_line_of_a_file_has_its_answer_in_its_place(
    url: str, tmp_path: Path, stdin: bool
) -> None:
    (tmp_path / "prompts").write_bytes(PROMPTS.encode())
    words = ["--file", "-" if stdin else str(tmp_path / "prompts"), "--url", url]
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
        ([], "", 'standard input is empty: write a prompt to it, or llmserve query m "Once upon'),
        (["-"], "\n", "standard input is empty"),
        (["-"], b"\xff\xfe", "standard input is not UTF-8 text (byte 0): save it as UTF-8"),
        (["--file", "-"], "\n\n", "standard input is empty: write a prompt into each line"),
        (["--file", "/dev/null"], "", "/dev/null is empty"),
        (["--file", "-", "Hi"], "", "a prompt and --file: give one of them, not both"),
        (["--file", "-", "--stream"], "", "--file gives whole answers: leave out --stream"),
        (["--json", "--stream", "Hi"], "", "--json gives whole answers: leave out --stream"),
        (["--logprobs", "2", "Hi"], "", "--logprobs needs --json"),
        (["--set", "seed=1", "--seed", "2", "Hi"], "", "seed is given twice"),
        (["--set", "stream=true", "Hi"], "", "--set cannot give stream"),
        (["--set", "text_input=x", "Hi"], "", "--set cannot give text_input"),
    ],
)
def test_what_cannot_be_sent_is_told_with_what_would_do(
    words: list[str], stdin: str | bytes, message: str
) -> None:
    error = query(*words, "--url", "127.0.0.1:9", stdin=stdin).exception
    assert isinstance(error, UsageError)
    assert message in str(error)


@pytest.mark.parametrize("words", [["Hi"], ["Hi", "--json"], ["--file", __file__]])
def test_a_server_that_falls_silent_does_not_hold_it(
    scripted: Scripted, url: str, monkeypatch: pytest.MonkeyPatch, words: list[str]
) -> None:
    monkeypatch.setattr(query_module, "SILENT_SECONDS", 0.2)
    monkeypatch.setattr(aio, "QUICK_SECONDS", 0.5)
    scripted.ends = "silent"
    done = query(*words, "--url", url)
    assert isinstance(done.exception, UnreachableError)
    assert str(done.exception).startswith("the server no longer answers: look at its log")


def test_a_server_that_takes_its_time_is_waited_for(
    scripted: Scripted, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(query_module, "SILENT_SECONDS", 0.05)
    scripted.delay = 0.5
    assert query("Hi", "--url", url).stdout == "cut off\n"


def test_escapes_in_an_answer_reach_a_pipe_and_no_terminal(scripted: Scripted, url: str) -> None:
    scripted.pieces = ["red: \x1b[31m", "\x07 done"]
    command = [sys.executable, "-m", "llmserve_cli", "query", "m", "Hi", "--url", url]
    piped = subprocess.run(command, capture_output=True, check=True, timeout=60)
    assert piped.stdout == b"red: \x1b[31m\x07 done\n"
    ours, theirs = pty.openpty()
    try:
        subprocess.run(command, stdout=theirs, check=True, timeout=60)
        assert os.read(ours, 1000) == b"red: \\x1b[31m\\x07 done\r\n"
    finally:
        os.close(ours)
        os.close(theirs)


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


def test_a_pipe_gets_a_row_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    print_table([["A", "B"], ["x", "words " * 50 + "end"]])
    assert len(capsys.readouterr().out.splitlines()) == 2


@pytest.mark.parametrize("locale", ["", "C", "POSIX", "xx_YY.UTF-8"])
def test_text_goes_through_whatever_the_locale(scripted: Scripted, url: str, locale: str) -> None:
    scripted.pieces = ["grün ", "🙂"]
    unset = {"LC_ALL", "LC_CTYPE", "LANG"}
    environment = {name: value for name, value in os.environ.items() if name not in unset}
    environment |= {"LC_ALL": locale} if locale else {}
    command = [sys.executable, "-m", "llmserve_cli", "query", "m", "wie schön", "--url", url]
    done = subprocess.run(command, env=environment, capture_output=True, check=True, timeout=60)
    assert done.stdout == "grün 🙂\n".encode()
    assert scripted.prompts == ["wie schön"]
