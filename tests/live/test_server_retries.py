"""A model whose process ends for no reason of its own while it loads is tried again."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from llmserve.errors import ServerError
from llmserve.server import start
from llmserve.testing.orders import Orders
from tests.live.servers import ECHO, echo, repository, settings

# Its process ends like this until it was started so often.
ENDS = (
    ECHO
    + """
    def initialize(self, args):
        import os, pathlib, sys, time
        # A process that has just begun only completes the configuration.
        time.sleep(0.3)
        counts = pathlib.Path("FOLDER", args["model_name"])
        tries = len(counts.read_text()) if counts.exists() else 0
        if tries < TIMES:
            counts.write_text("x" * (tries + 1))
            sys.stderr.write("WORDS")
            sys.stderr.flush()
            os._exit(CODE)
"""
)


def ends(folder: Path, times: int, code: int, words: str = "") -> str:
    source = ENDS.replace("FOLDER", str(folder)).replace("TIMES", str(times))
    return source.replace("WORDS", words).replace("CODE", str(code))


@pytest.mark.long
def test_each_model_that_ends_by_chance_is_tried_again(tmp_path: Path) -> None:
    models = {
        "one": ends(tmp_path, 1, 0),
        "two": ends(tmp_path, 2, 1, "cannot allocate a thing\\n"),
        "never": ends(tmp_path, 99, 1),
        "well": ECHO,
    }
    lines: list[str] = []
    folder = repository(tmp_path / "models", **models)
    with start(settings(folder, partial=True), notify=lines.append) as server:
        for name in ("one", "two", "well"):
            assert echo(server, "hello", name) == "hello"
        assert server.failures.keys() == {"never"}
        assert "(exit code 1)" in server.failures["never"]
    assert any("the last words in the log: cannot allocate a thing; " in line for line in lines)
    machine = r"\d+\.\d processes want the \d+ processors, and \d+ of \d+ MB of memory are free"
    assert all(re.search(machine, line) for line in lines), lines
    assert lines[-1].startswith("starting again without never: model 'never' failed to load: ")


def test_a_model_that_dies_once_while_it_loads_is_loaded(tmp_path: Path) -> None:
    lines: list[str] = []
    folder = repository(tmp_path / "models", one=ends(tmp_path, 1, 0))
    with start(settings(folder), notify=lines.append) as server:
        assert echo(server, "hello", "one") == "hello"
    (line,) = lines
    assert line.startswith("starting again: model 'one' failed to load: ")
    assert "exit code 0" in line
    assert "the log says no more" in line


# Its process stops for three seconds while it loads, as it would if the machine stalled.
STOPS_ONCE = (
    ECHO
    + """
    def initialize(self, args):
        import os, pathlib, signal, subprocess
        marker = pathlib.Path("FOLDER", "stopped")
        if not marker.exists():
            marker.touch()
            subprocess.Popen(["sh", "-c", f"sleep 3; kill -CONT {os.getpid()}"])
            os.kill(os.getpid(), signal.SIGSTOP)
"""
)


@pytest.mark.long
def test_a_model_that_stalls_while_it_is_loaded_into_a_server_is_tried_again(
    tmp_path: Path,
) -> None:
    folder = repository(tmp_path / "models", one=ECHO)
    with Orders.start(settings(folder, renewable=True)) as orders:
        repository(folder, late=STOPS_ONCE.replace("FOLDER", str(tmp_path)))
        orders.load("late")
        assert echo(orders.server, "hello", "late") == "hello"


@pytest.mark.long
def test_a_server_without_it_is_none_if_all_have_to_be_there(tmp_path: Path) -> None:
    folder = repository(tmp_path / "models", never=ends(tmp_path, 99, 3), well=ECHO)
    with pytest.raises(ServerError, match=r"'never' failed to load: .*exit code 3") as caught:
        start(settings(folder))
    assert "the log says no more" in str(caught.value)
    assert caught.value.hint is not None
    Path(re.findall(r"see (\S+)", caught.value.hint)[0]).unlink()
