from __future__ import annotations

import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from llmserve.measure.results import save
from llmserve.report.canvas import legend_rows
from llmserve.report.facts import loads_in_words
from llmserve.report.markdown import block, escape
from llmserve.report.palette import DARK, LIGHT, SERIES
from llmserve.report.paths import compact
from llmserve.report.plots.pareto import Point, front
from llmserve.report.plots.rows import bars
from llmserve.report.words import clean, number, seconds, shorten
from tests.unit.report_examples import make_run


def luminance(colour: str) -> float:
    parts = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    red, green, blue = (
        part / 12.92 if part <= 0.03928 else ((part + 0.055) / 1.055) ** 2.4 for part in parts
    )
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def contrast(one: str, other: str) -> float:
    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("colours", [LIGHT, DARK], ids=["light", "dark"])
def test_colours_can_be_told_from_the_ground(colours: dict[str, str]) -> None:
    # What WCAG 2 asks for: 4.5 for text, 3 for what only has to be seen.
    for ground in (colours["paper"], colours["panel"]):
        for key in ("ink", "soft", "link", "bad", "good"):
            assert contrast(colours[key], ground) >= 4.5, key
    # Names of subjects stand in the colours of their series.
    for key in (key for key in colours if key.isdigit()):
        assert contrast(colours[key], colours["paper"]) >= 4.5, key


def test_light_and_dark_have_the_same_keys_and_no_light_colour_is_there_twice() -> None:
    assert LIGHT.keys() == DARK.keys()
    assert len(set(LIGHT.values())) == len(LIGHT)
    assert len(SERIES) == 8


def points(path: str) -> list[tuple[float, float]]:
    """Read a relative path back."""
    x = y = 0.0
    found = []
    for command, rest in re.findall(r"([mlhvz])([^mlhvz]*)", path):
        steps = [float(part) for part in re.findall(r"-?\d*\.?\d+", rest)]
        if command in "ml":
            x, y = x + steps[0], y + steps[1]
        elif command == "h":
            x += steps[0]
        elif command == "v":
            y += steps[0]
        found.append((round(x, 1), round(y, 1)))
    return found


def test_short_paths_go_through_the_same_points() -> None:
    wanted = [(at * 0.123 + 5, 100 - at * 0.077) for at in range(2000)]
    path = "".join(f"{'M' if at % 2 == 0 else 'L'} {x} {y} " for at, (x, y) in enumerate(wanted))
    for (x, y), (found_x, found_y) in zip(wanted, points(compact(path)), strict=True):
        assert abs(x - found_x) <= 0.051
        assert abs(y - found_y) <= 0.051


def test_marks_join_only_where_they_cannot_be_told_apart() -> None:
    assert len(bars([0.1 * at for at in range(10)], [1] * 10, scale=100)) == 10
    (joined,) = bars([0.001 * at for at in range(10)], [1] * 10, scale=100)
    assert joined[1] == pytest.approx(0.009)
    narrow, wide = bars([1.0, 2.0], [1, 9], scale=100)
    assert wide[1] - wide[0] > 2 * (narrow[1] - narrow[0])


def test_the_front_is_what_nothing_beats_in_both() -> None:
    kept = [Point("a", "1", 1.0, 10.0), Point("b", "2", 2.0, 20.0)]
    beaten = [Point("a", "3", 1.0, 9.0), Point("a", "4", 2.5, 20.0), Point("a", "5", 1.5, 10.0)]
    assert front([*beaten, *kept]) == kept


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.9996, "1.00 s"), (0.99951e-3, "1.00 ms"), (99.97, "100 s"), (1234.5, "1,234 s")],
)
def test_times_have_the_unit_that_fits(value: float, text: str) -> None:
    assert seconds(value) == text


def test_numbers_keep_three_digits_that_count() -> None:
    assert [number(value) for value in (9.996, 99.96, 0.5, 0.0, 7, None)] == [
        "10.0", "100", "0.5", "0", "7", "-",
    ]  # fmt: skip


def test_names_become_one_line_that_can_be_shown() -> None:
    assert clean("a\tb\r\nc\x00\ud800\u202e\u2066") == "a b c\ufffd\ufffd"
    assert shorten("x" * 50, 9) == "xxxx…xxxx"


@pytest.mark.parametrize("text", ["# x", "- x", "+ x", "1. x", "2) x", "> x", "=== x", "* x"])
def test_no_text_begins_a_block_of_markdown(text: str) -> None:
    assert re.match(r"\\|\d+\\", block(text))


def test_figures_stay_readable_in_markdown() -> None:
    assert escape("1.27 s (max_batch_size 8)") == "1.27 s (max_batch_size 8)"
    assert block("1.27 s") == "1.27 s"


def test_loads_that_differ_only_in_how_many_are_one_line() -> None:
    loads = [replace(make_run("static", requests=5).load, concurrency=at) for at in (4, 8)]
    rest = "requests under way at all times, 5 requests in all, after"
    assert loads_in_words(loads) == [f"4 and 8 {rest} 8 to warm up"]
    alike = [replace(load, warmup=load.concurrency or 0) for load in loads]
    assert loads_in_words(alike) == [f"4 and 8 {rest} as many to warm up"]
    assert len(loads_in_words([loads[0], replace(loads[1], warmup=3)])) == 2


def test_legends_break_where_the_picture_ends() -> None:
    assert legend_rows(["static", "inflight"], 340) == [[0, 1]]
    assert legend_rows(["a" * 40, "b" * 40], 340) == [[0], [1]]


@pytest.mark.parametrize("name", ["matplotlib", "jinja2"])
def test_what_is_missing_is_told_before_anything_is_measured(name: str, tmp_path: Path) -> None:
    save(make_run("static", requests=5), tmp_path / "run.json")
    hide = (
        "import importlib.util as u, sys; find = u.find_spec;"
        f"u.find_spec = lambda name, *a: None if name == '{name}' else find(name, *a);"
        "from llmserve_cli.main import main; main(sys.argv[1:])"
    )
    # Nothing is served at that port: the line that counts comes before anybody asks.
    for words in (
        ["report", str(tmp_path / "run.json"), "--output", str(tmp_path / "out")],
        ["bench", "demo", "--url", "127.0.0.1:9", "--report", str(tmp_path / "out")],
    ):
        command = [sys.executable, "-c", hide, *words]
        run = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
        assert run.returncode == 3
        assert run.stderr == (
            f"llmserve: reports need {name}, which is not installed: "
            "pip install 'llmserve[report]'\n"
        )
    assert not (tmp_path / "out").exists()


def test_the_command_prints_what_it_wrote(tmp_path: Path) -> None:
    from click.testing import CliRunner

    from llmserve_cli.main import cli

    save(make_run("static", requests=5), tmp_path / "run.json")
    out = tmp_path / "deep" / "out"
    ran = CliRunner().invoke(cli, ["report", str(tmp_path / "run.json"), "--output", str(out)])
    assert ran.exit_code == 0, ran.output
    assert ran.stdout.splitlines()[:2] == [str(out / "report.html"), str(out / "report.md")]
    assert all(Path(line).is_file() for line in ran.stdout.splitlines())


def test_measuring_commands_tell_what_they_wrote_beside_their_figures(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from llmserve_cli.output import write_report

    write_report(make_run("static", requests=5), tmp_path / "out")
    told = capsys.readouterr()
    assert told.out == ""
    lines = [line.removeprefix("llmserve: wrote ") for line in told.err.splitlines()]
    assert sorted(lines) == sorted(map(str, (tmp_path / "out").iterdir()))


def test_the_command_refuses_what_is_no_result(tmp_path: Path) -> None:
    (tmp_path / "other.json").write_text("{}")
    command = [sys.executable, "-m", "llmserve_cli", "report", str(tmp_path / "other.json")]
    run = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert run.returncode == 3
    assert run.stderr == "llmserve: this is no result of llmserve's measurements\n"
