"""What an operation that takes long shows on a terminal."""

from __future__ import annotations

import io
import re
import sys
import time

import pytest

from llmserve.builder.progress import Note, PartDone
from llmserve.commands import Status
from llmserve.commands import status as status_module


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def terminal_of(monkeypatch: pytest.MonkeyPatch, columns: int = 80) -> Terminal:
    """Return what standard error writes to from now on: a terminal of so many columns."""
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    stream = Terminal()
    monkeypatch.setattr(sys, "stderr", stream)
    return stream


def test_a_note_of_a_build_stays_when_the_next_report_comes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    terminal = terminal_of(monkeypatch)
    with Status("building m") as status:
        status.update(Note("note: it cannot be loaded here"))
        status.update("copying weights")
        status.update(Note("note: it cannot be loaded here"))
    shown = terminal.getvalue()
    assert shown.count("llmserve: note: it cannot be loaded here\n") == 1


def test_a_bar_is_one_line_however_long_the_words_are(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = terminal_of(monkeypatch)
    with Status("building m") as status:
        status.update(PartDone(f"converting {'long' * 40}.gguf to OpenVINO", 0.25))
        time.sleep(0.3)  # It is drawn ten times in a second.
    drawn = [line for line in terminal.getvalue().splitlines() if "longlong" in line]
    assert drawn
    assert all("…" in line and "25%" in line for line in drawn)


@pytest.mark.parametrize(
    ("columns", "has_words", "has_bar"),
    [
        (120, True, True),
        (100, True, True),
        (60, True, False),
        (34, False, False),
        (20, False, False),
    ],
)
def test_what_is_least_needed_gives_way_on_a_narrow_terminal(
    monkeypatch: pytest.MonkeyPatch, columns: int, has_words: bool, has_bar: bool
) -> None:
    terminal = terminal_of(monkeypatch, columns)
    with Status("building m") as status:
        status.update(
            PartDone("downloading acme/tiny", 0.25, amount="1.2 of 4.8 GB, 40 MB/s", left=90.4)
        )
        time.sleep(0.3)
    drawn = [line for line in re.split(r"[\r\n]|\x1b\[2K", terminal.getvalue()) if "25%" in line]
    texts = [re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", line) for line in drawn]
    assert texts
    for text in texts:
        assert len(text.rstrip()) <= columns
        assert ("downloading" in text, "━" in text) == (has_words, has_bar)
        assert (columns < 60) or "25% 1.2 of 4.8 GB, 40 MB/s 1:30 left" in text


def test_without_a_terminal_a_part_is_a_line_now_and_then(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    now = 0.0
    monkeypatch.setattr(status_module, "monotonic", lambda: now)
    with Status("building m") as status:
        for _ in range(700):
            now += 0.1
            amount = f"{now / 10:.0f} of 9 GB"
            status.update(PartDone("downloading m", now / 100, amount=amount, left=3800))
        status.update("copying weights")
        status.update("copying weights")
    assert capsys.readouterr().err.splitlines() == [
        "llmserve: downloading m",
        "llmserve: downloading m: 30%, 3 of 9 GB, 1:03:20 left",
        "llmserve: downloading m: 60%, 6 of 9 GB, 1:03:20 left",
        "llmserve: copying weights",
    ]


def test_a_part_that_says_no_time_takes_as_long_as_what_is_done(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    now = 0.0
    monkeypatch.setattr(status_module, "monotonic", lambda: now)
    with Status("building m") as status:
        for share in (0.1, 0.25):
            status.update(PartDone("converting m", share))
            now += 40
        status.update(PartDone("converting m", 0.5))
    assert capsys.readouterr().err.splitlines()[1:] == [
        "llmserve: converting m: 25%, 2:00 left",
        "llmserve: converting m: 50%, 1:20 left",
    ]
