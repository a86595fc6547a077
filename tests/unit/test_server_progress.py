"""What is read from a log. The lines are those that Triton 2.51 wrote."""

from __future__ import annotations

from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from llmserve.server.log import Progress, ServerLog, in_plain_words

STAMP = "I1121 10:26:56.078072 3523 model_lifecycle.cc:472] "
LOADING = f'{STAMP}"loading: gpt2:1"\n'
LOADED = f"{STAMP}\"successfully loaded 'gpt2'\"\n"
FAILED = (
    "E1121 10:27:08.431067 3621 model_lifecycle.cc:642] \"failed to load 'bad' version 1: "
    r"Internal: ValueError: two\nlines: 'x'\n\nAt:\n  /m/bad/1/model.py(3): initialize\n"
    '"\n'
)
TAKEN = (
    'E1121 10:33:01.593574 4898 main.cc:245] "failed to start GRPC service: Unavailable - '
    "Socket '127.0.0.1:18050' already in use \"\n"
)
STUCK = (
    "I1121 10:45:23.528517 10507 pb_stub.cc:2105]  Failed to preinitialize Python stub: "
    "Python model file not found in '/m/x/1/model.py'\n"
)


def read(path: Path, text: str) -> ServerLog:
    path.write_text("", encoding="utf-8")
    log = ServerLog(path)
    path.write_text(text, encoding="utf-8")
    log.read()
    return log


def test_models_go_from_loading_to_ready(tmp_path: Path) -> None:
    log = read(tmp_path / "log", LOADING)
    assert log.progress(1.0) == Progress(1.0, loading=("gpt2",), ready=())
    with log.path.open("a") as file:
        file.write(LOADED)
    log.read()
    assert log.progress(2.0) == Progress(2.0, loading=(), ready=("gpt2",))


def test_progress_is_told_in_words_and_never_back_to_the_start() -> None:
    told = [Progress(1.0, (), ()), Progress(2.0, ("a", "b"), ("c",)), Progress(3.0, (), ("a",))]
    assert list(map(str, told)) == ["starting Triton", "loading a, b", "waiting until it is ready"]


def test_a_failure_is_one_line_without_its_traceback(tmp_path: Path) -> None:
    assert read(tmp_path / "log", FAILED).failures == {"bad": "ValueError: two lines: 'x'"}


def test_a_lost_port_is_named(tmp_path: Path) -> None:
    assert read(tmp_path / "log", TAKEN).port_lost == "grpc"


def test_a_stub_that_never_starts_is_seen(tmp_path: Path) -> None:
    log = read(tmp_path / "log", STUCK)
    assert log.stuck == "Python model file not found in '/m/x/1/model.py'"


def test_an_argument_that_triton_does_not_know_is_why_it_ended(tmp_path: Path) -> None:
    text = "/opt/bin/tritonserver: unrecognized option '--nonsense'\nUsage: tritonserver\n"
    assert read(tmp_path / "log", text).why_it_ended() == "unrecognized option '--nonsense'"


def test_what_an_earlier_server_wrote_does_not_count(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_text(FAILED)
    log = ServerLog(path)
    log.read()
    assert log.failures == {}


@given(st.lists(st.integers(1, 40), max_size=60))
def test_it_does_not_matter_how_the_lines_are_cut(cuts: list[int]) -> None:
    from tempfile import TemporaryDirectory

    with TemporaryDirectory() as folder:
        path = Path(folder, "log")
        path.touch()
        log = ServerLog(path)
        rest = (LOADING + LOADED + FAILED + TAKEN).encode()
        for cut in [*cuts, len(rest)]:
            with path.open("ab") as file:
                file.write(rest[:cut])
            rest = rest[cut:]
            log.read()
        assert log.progress(0).ready == ("gpt2",)
        assert (list(log.failures), log.port_lost) == (["bad"], "grpc")


@given(st.text())
def test_plain_words_are_one_line(reason: str) -> None:
    assert len(in_plain_words(reason).splitlines()) <= 1
