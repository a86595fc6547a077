"""Parts of a build run as programs; how they end is said in words that a user can act on."""

from __future__ import annotations

import sys

import pytest

from llmserve.builder.programs import PROGRAM_DONE, Ended, run_program
from llmserve.builder.progress import PartDone
from llmserve.errors import ShortageError
from llmserve.hardware import MemoryKills


def run(code: str) -> tuple[Ended, list[str]]:
    said: list[str] = []
    arguments = [sys.executable, "-c", code]
    return run_program(arguments, words="converting it", report=said.append), said


def test_what_is_done_is_reported() -> None:
    ended, said = run(f"print('{PROGRAM_DONE}0.25'); print('other'); print('{PROGRAM_DONE}1')")
    assert ended == Ended(0)
    assert [(str(part), part.share) for part in said if isinstance(part, PartDone)] == [
        ("converting it", 0), ("converting it", 0.25), ("converting it", 1),
    ]  # fmt: skip


@pytest.mark.parametrize("own", [{}, {"GOMP_SPINCOUNT": "7"}, {"OMP_WAIT_POLICY": "passive"}])
def test_its_threads_leave_a_core_while_they_wait(
    own: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY"):
        monkeypatch.delenv(name, raising=False)
    for name, value in own.items():
        monkeypatch.setenv(name, value)
    ended, _ = run("import os, sys; sys.exit(f'spins: {os.environ.get(\"GOMP_SPINCOUNT\")}')")
    few = own.get("GOMP_SPINCOUNT", None if own else "1000")
    assert ended.reason == f"spins: {few}"


def test_its_last_words_are_whole() -> None:
    words = "x" * 2000
    ended, _ = run(f"import sys; sys.exit('{words}')")
    assert (ended.code, ended.reason) == (1, words)


def test_a_signal_has_its_name() -> None:
    ended, _ = run("import os, signal; os.kill(os.getpid(), signal.SIGTERM)")
    assert ended.reason == "it was ended by SIGTERM"
    ended, _ = run("import os; os._exit(7)")
    assert ended.reason == "exit status 7"


def test_a_kill_for_want_of_memory_is_named_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """``tests/unit/test_hardware.py`` has a real one; elsewhere, a kill may be anybody's."""
    code = "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"
    ended, _ = run(code)
    assert ended.reason == "it was ended by SIGKILL"
    monkeypatch.setattr(MemoryKills, "happened", lambda _: True)
    with pytest.raises(ShortageError, match=r"converting it was killed by the system, which has"):
        run(code)
