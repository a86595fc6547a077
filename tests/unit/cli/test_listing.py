"""`llmserve list` and `llmserve remove`: the kept models, and those of the current folder."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from click.shell_completion import ShellComplete
from click.testing import CliRunner, Result

import llmserve
from llmserve.builder.plan import BuildSpec
from llmserve.builder.store import Store
from llmserve.contract.passport import is_fingerprint
from llmserve.contract.report import ModelReport, ServerReport, State
from llmserve.errors import ConfigError
from llmserve.plugins.registry import Registry
from llmserve.server import Running
from llmserve_cli import listing
from llmserve_cli.group import cli


def invoke(*words: str) -> Result:
    return CliRunner().invoke(cli, words, standalone_mode=False)


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Store:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("LLMSERVE_HOME", str(tmp_path / "home"))
    return Store()


def test_the_list_is_empty_and_says_what_fills_it(store: Store) -> None:
    result = invoke("list")
    assert (result.stdout, result.exception) == ("", None)
    assert result.stderr == "no model is built: llmserve run MODEL builds one\n"
    assert json.loads(invoke("list", "--json").stdout) == []
    assert not store.folder.exists(), "looking creates nothing"


def test_the_list_has_the_kept_models_and_those_of_this_folder(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = store.build(BuildSpec("hf", "demo", name="kept"), Registry.load())
    llmserve.build("iterative", "demo", name="here")
    status = ServerReport(
        State.READY,
        url="127.0.0.1:1",
        repository=str(kept.repository.resolve()),
        models=(ModelReport("kept", State.READY),),
    )
    monkeypatch.setattr(listing, "find_servers", lambda: [Running(Path("s"), status)])
    result = invoke("list")
    assert result.exception is None
    lines = result.stdout.splitlines()
    heading = ["NAME", "PLUGIN", "SIZE", "BUILT", "SERVED", "AT", "SOURCE"]
    assert [lines[0], lines[3]] == [str(store.models_folder), "model_repository"]
    assert lines[1].split() == lines[4].split() == heading
    when = r"\d{4}-\d\d-\d\d \d\d:\d\d"
    assert re.fullmatch(rf"kept  hf +\S+ MB +{when}  127.0.0.1:1  demo", lines[2])
    assert re.fullmatch(rf"here  iterative +\S+ MB +{when} +demo", lines[5])
    first, second = json.loads(invoke("list", "--json").stdout)
    assert (first["name"], first["plugin"], first["source"]) == ("kept", "hf", "demo")
    assert (second["repository"], second["served"]) == ("model_repository", "")
    assert first["size"] > 1e6
    assert invoke("list", "--repository", "model_repository").stdout.split()[0] == lines[3]


def test_a_model_that_is_named_is_shown_with_what_it_was_built_as(store: Store) -> None:
    llmserve.build("hf", "demo", max_batch_size=2)
    llmserve.build("hf", "demo", name="other")
    folder = Path("model_repository/own")
    folder.mkdir()
    (folder / "config.pbtxt").write_text('platform: "ensemble"')
    lines = invoke("show", "demo").stdout.splitlines()
    assert (lines[0], len(lines)) == ("model_repository", 11)
    found = {word: " ".join(rest) for word, *rest in map(str.split, lines[3:])}
    assert found["folder"] == "model_repository/demo"
    assert found["model"] == "generates text"
    assert found["weights"] == "1.483 million, float16"
    assert found["context"] == "512 tokens"
    assert is_fingerprint(found["passport"])
    assert found["components"].startswith("batching dynamic, formatter text, generator")
    assert "decoupled=true" in found["options"].split()
    assert "max_batch_size=2" in found["options"].split()
    assert found["llmserve"] == llmserve.__version__
    assert invoke("list", "own").stdout.endswith("  folder      model_repository/own\n")
    assert "folder" not in invoke("list").stdout


def test_a_failed_attempt_says_so_and_how_it_goes(store: Store) -> None:
    kept = store.build(BuildSpec("hf", "demo", name="tried"), Registry.load())
    store.build(BuildSpec("hf", "demo", name="half"), Registry.load())
    assert invoke("list").stderr == ""
    store.note(kept, "no memory is left")
    # What an interruption between a model and its record leaves.
    store.forget("half")
    assert invoke("list").stderr.splitlines() == [
        "half: its build was not finished: llmserve remove half deletes it",
        "tried: it could not be served (no memory is left): llmserve remove tried deletes it",
    ]
    found = {
        entry["name"]: entry["problem"] for entry in json.loads(invoke("list", "--json").stdout)
    }
    assert found["tried"].startswith("it could not be served")
    again = store.find("tried")
    assert again is not None
    store.note(again, "")
    assert "tried" not in invoke("list").stderr


def test_a_name_is_removed_from_this_folder_and_else_from_the_kept_ones(store: Store) -> None:
    kept = store.build(BuildSpec("hf", "demo"), Registry.load())
    llmserve.build("hf", "demo")
    assert str(invoke("remove", "demo").exception).startswith("remove deletes model_repository/d")
    assert invoke("remove", "demo", "--yes").exception is None
    assert not Path("model_repository/demo").exists()
    assert kept.model.folder.is_dir()
    assert invoke("remove", "demo", "--yes").stderr.endswith(f"{kept.model.folder} is deleted\n")
    assert store.models() == []
    error = invoke("remove", "demo", "--yes").exception
    assert isinstance(error, ConfigError)
    assert str(error) == "no model 'demo' is built: none is, and llmserve run MODEL builds one"


def test_a_misspelt_name_is_corrected(store: Store) -> None:
    store.build(BuildSpec("hf", "demo"), Registry.load())
    error = invoke("remove", "dmeo", "--yes").exception
    assert str(error) == "no model 'dmeo' is built: did you mean 'demo'?"


def test_a_name_that_is_built_in_two_places_is_offered_once(store: Store) -> None:
    store.build(BuildSpec("hf", "demo"), Registry.load())
    llmserve.build("hf", "demo")
    error = invoke("remove", "nothing-like-it", "--yes").exception
    assert str(error) == "no model 'nothing-like-it' is built: choose one of demo"


def test_the_shell_completes_kept_models(store: Store) -> None:
    store.build(BuildSpec("hf", "demo", name="kept"), Registry.load())
    complete = ShellComplete(cli, {}, "llmserve", "_LLMSERVE_COMPLETE")
    for command in ("query", "remove"):
        assert [item.value for item in complete.get_completions([command], "ke")] == ["kept"]
