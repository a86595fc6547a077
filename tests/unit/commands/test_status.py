"""What an operation that takes long shows on a terminal."""

from __future__ import annotations

import io
import sys
import time

import pytest

from llmserve.builder.progress import Note, PartDone
from llmserve.commands import Status


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def terminal_of(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    """Return what standard error writes to from now on: a terminal of 80 columns."""
    monkeypatch.setenv("COLUMNS", "80")
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
    shown = terminal.getvalue()
    assert "llmserve: note: it cannot be loaded here\n" in shown


def test_a_bar_is_one_line_however_long_the_words_are(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = terminal_of(monkeypatch)
    with Status("building m") as status:
        status.update(PartDone(f"converting {'long' * 40}.gguf to OpenVINO", 0.25))
        time.sleep(0.3)  # It is drawn ten times in a second.
    drawn = [line for line in terminal.getvalue().splitlines() if "longlong" in line]
    assert drawn
    assert all("…" in line and "25%" in line for line in drawn)
