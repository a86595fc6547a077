"""Each option of the other servers has a row: it is taken over, or told with a reason."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from llmserve_cli.adopting.engines import ENGINES, Engine, engine_named

FOLDER = Path(__file__).parent / "options"
"""What the servers have, at the versions that the files name: all spellings of an option in a line,
under whether a value follows, or several."""
SERVERS = {path.stem: path for path in sorted(FOLDER.glob("*.txt"))}
NAMES = {"vllm": "vLLM"}
_TELLS = {"unneeded", "unmatched"}
_TURNS_OFF = ("--no-", "-no", "-nkvo", "-nr")


def engine_of(server: str) -> Engine:
    return engine_named(NAMES.get(server, server))


def options_in(path: Path) -> Iterator[tuple[str, list[str]]]:
    kind = ""
    for line in path.read_text(encoding="utf-8").splitlines():
        if line.startswith("["):
            kind = line.strip("[]")
        elif line and not line.startswith("#"):
            yield kind, line.split()


@pytest.mark.parametrize("server", SERVERS)
def test_no_option_of_the_server_is_missing(server: str) -> None:
    engine = engine_of(server)
    missing = [
        spelling
        for _, spellings in options_in(SERVERS[server])
        for spelling in spellings
        if engine.row(spelling) is None
    ]
    assert not missing


@pytest.mark.parametrize("server", SERVERS)
def test_a_row_takes_as_many_values_as_the_server_does(server: str) -> None:
    engine = engine_of(server)
    wrong = [
        (spelling, kind)
        for kind, spellings in options_in(SERVERS[server])
        for spelling in spellings
        if (row := engine.row(spelling))
        and (row.takes, row.many) != (kind != "none", kind == "many")
    ]
    assert not wrong


@pytest.mark.parametrize("server", SERVERS)
def test_the_spellings_of_an_option_mean_the_same(server: str) -> None:
    engine = engine_of(server)
    for _, spellings in options_in(SERVERS[server]):
        turned_on = [each for each in spellings if not each.startswith(_TURNS_OFF)]
        rows = [row for each in turned_on or spellings if (row := engine.row(each))]
        assert len({(row.goal, row.key) for row in rows}) == 1, spellings


@pytest.mark.parametrize("server", SERVERS)
def test_the_file_says_of_which_version_it_is(server: str) -> None:
    first = SERVERS[server].read_text(encoding="utf-8").partition("\n")[0]
    assert any(character.isdigit() for character in first)


@pytest.mark.parametrize("engine", ENGINES, ids=lambda engine: engine.name)
def test_a_table_is_whole(engine: Engine) -> None:
    own = engine.rows
    if engine.name.startswith("KServe"):
        # Behind its own stand those of vLLM, some of which it calls otherwise.
        own = tuple(row for row in own if row not in engine_named("vLLM").rows)
    spellings = [spelling for row in own for spelling in row.names]
    assert sorted(spellings) == sorted(set(spellings))
    for row in own:
        assert row.says or row.goal not in _TELLS, row.names
        assert row.key or row.goal not in ("option", "engine_arg", "serve", "gateway"), row.names
