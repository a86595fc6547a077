"""The options of `serve` for models that are loaded on demand, and what `status` shows of them."""

from __future__ import annotations

from math import inf
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner

from llmserve.builder.server_file import ServerFile
from llmserve.contract.report import (
    ModelReport,
    OnDemandReport,
    ReplicaReport,
    ServerReport,
    State,
)
from llmserve.errors import LLMServeError, UsageError
from llmserve.hardware import MachineMemory
from llmserve.repository.repository import Repository
from llmserve.server import OnDemand, ServeOptions, ServerSettings
from llmserve.server.checks import at_start, check_runtime
from llmserve_cli.group import cli
from llmserve_cli.model_descriptions import Described, Description
from llmserve_cli.on_demand import (
    limited,
    offered_models,
    take_on_demand,
)
from llmserve_cli.options import serve_options
from llmserve_cli.running import table_of


def read(*words: str, defaults: dict[str, Any] | None = None) -> OnDemand | None:
    """Read the options of a command line, and of a file."""

    @click.command()
    @serve_options
    @click.pass_context
    def command(ctx: click.Context, /, **options: Any) -> OnDemand | None:
        return take_on_demand(ctx, ServeOptions(**options))

    chosen: OnDemand | None = command.main(
        [*words], standalone_mode=False, default_map=defaults or {}
    )
    return chosen


def refused(*words: str) -> str:
    with pytest.raises(UsageError) as error:
        read(*words)
    return str(error.value)


def test_the_options_say_how_many_models_are_loaded_and_for_how_long() -> None:
    assert read() is None
    words = ["--on-demand", "--max-loaded", "2", "--memory", "1.5", "--unload-after", "60"]
    assert read(*words, "--pin", "a", "--pin", "b") == OnDemand(2, 1.5e9, 60.0, ("a", "b"))
    assert read(*words[:3], defaults={"pinned": ("c",)}) == OnDemand(2, pinned=("c",))
    assert read(defaults={"pinned": ("c",)}) is None, "the file is for both"


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["--max-loaded", "2"], "--max-loaded is for models that are loaded when they are needed"),
        (["--unload-after", "2"], "--unload-after is for models"),
        (["--pin", "a"], "--pin is for models"),
        (["--on-demand", "--max-loaded", "1", "--pin", "a", "--pin", "b"],
         "2 models are pinned, and --max-loaded 1 allows fewer"),
    ],
)  # fmt: skip
def test_options_that_make_no_sense_are_refused(words: list[str], why: str) -> None:
    assert refused(*words).startswith(why)


def test_without_a_limit_the_machine_has_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("llmserve.hardware.memory", lambda: MachineMemory(10e9, 20e9))
    assert limited(OnDemand()) == OnDemand(memory=9e9)
    assert limited(OnDemand(max_loaded=2)) == OnDemand(max_loaded=2)
    monkeypatch.setattr("llmserve.hardware.memory", lambda: MachineMemory(inf, 20e9))
    assert limited(OnDemand()) == OnDemand()


def test_a_server_starts_with_the_pinned_models(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("a", "b", "part"):
        (tmp_path / name).mkdir()
    repository = Repository.open(tmp_path)
    monkeypatch.setattr(
        type(repository.models["a"]), "parts", property(lambda m: ("part",) * (m.name == "a"))
    )
    assert offered_models(repository, (), OnDemand()) == ["a", "b"]
    assert offered_models(repository, ("b",), OnDemand()) == ["b"]
    with pytest.raises(UsageError, match="--pin part: there is no such model"):
        offered_models(repository, (), OnDemand(pinned=("part",)))
    settings = ServerSettings(tmp_path, on_demand=True)
    pinned = at_start(settings, repository, OnDemand(pinned=("a",)))
    assert (pinned.models, pinned.empty) == (("part", "a"), False)
    assert at_start(settings, repository, OnDemand()).names() == []
    broken = ServerSettings(tmp_path, on_demand=True, models=("b",))
    assert at_start(broken, repository, OnDemand(pinned=("a",))).names() == []
    assert check_runtime(settings, repository) is None
    docker = ServerSettings(tmp_path, runtime="docker")
    assert "cannot load models while it runs" in str(check_runtime(docker, repository))


def test_a_launch_script_is_refused_only_if_its_model_is_offered(tmp_path: Path) -> None:
    for name in ("a", "many"):
        (tmp_path / name / "1").mkdir(parents=True)
        (tmp_path / name / "config.pbtxt").touch()
    (tmp_path / "many" / "launch.sh").touch()
    repository = Repository.open(tmp_path)
    all_of_them = ServerSettings(tmp_path, on_demand=True)
    assert str(check_runtime(all_of_them, repository)).startswith("many starts a server of several")
    some = ServerSettings(tmp_path, on_demand=True, models=("a",))
    assert check_runtime(some, repository) is None
    # The one at the start is not the only one on offer.
    words = ["serve", str(tmp_path), "--on-demand", "--pin", "a", "--runtime", "binary"]
    result = CliRunner().invoke(cli, words, standalone_mode=False)
    assert "many starts a server of several" in f"{result.output}{result.exception}"


def test_serve_refuses_before_anything_is_started(tmp_path: Path) -> None:
    (tmp_path / "m" / "1").mkdir(parents=True)
    (tmp_path / "m" / "config.pbtxt").touch()
    words = ["serve", str(tmp_path), "--on-demand", "--pin", "n"]
    error = CliRunner().invoke(cli, words, standalone_mode=False).exception
    assert isinstance(error, LLMServeError)
    assert str(error) == "--pin n: there is no such model: choose one of m"


def test_a_file_says_all_of_it(tmp_path: Path) -> None:
    path = tmp_path / "llmserve.toml"
    path.write_text(
        '[models.a]\nsource = "demo"\npin = true\n[models.b]\nsource = "demo"\n'
        "[serve]\non_demand = true\nmax_loaded = 1\nmemory = 1.5\nunload_after = 60\n"
    )
    file = ServerFile.read(path)
    assert file.pinned == ("a",)
    assert file.serve == {
        "on_demand": True, "max_loaded": 1, "memory": 1.5, "unload_after": 60
    }  # fmt: skip


@pytest.mark.parametrize("option", ["--memory", "--unload-after", "--grace"])
@pytest.mark.parametrize("number", ["nan", "inf"])
def test_an_amount_is_a_number(option: str, number: str) -> None:
    done = CliRunner().invoke(cli, ["serve", "--on-demand", option, number], standalone_mode=False)
    assert f"{number} is no amount" in str(done.exception)


def test_status_has_a_column_for_memory() -> None:
    loaded = OnDemandReport(loaded=True, size=88_000_000, pinned=True)
    models = (
        ModelReport("a", State.READY, demand=loaded),
        ModelReport("b", State.UNLOADED, demand=OnDemandReport(loaded=False, size=7)),
        ModelReport("c", State.READY, demand=loaded, reading=True, fingerprint="1a2b"),
    )
    report = ServerReport(State.READY, on_demand=True, models=models)
    known = {
        "a": Description("hf", disk=9_000_000, context=512), "b": Description("hf", disk=9_000_000)
    }  # fmt: skip
    assert table_of(Described(report, known)) == [
        ["", "STATE", "PLUGIN", "SIZE", "MEMORY", "CONTEXT", "RESTARTS", ""],
        ["a", "ready", "hf", "9 MB", "88 MB", "512", "0", "pinned"],
        ["b", "unloaded", "hf", "9 MB", "", "", "0", ""],
        ["c", "ready", "", "", "88 MB", "", "0", "pinned, reads its warm prompts, 1a2b"],
    ]


def test_status_says_which_replica_has_yet_to_read_its_warm_prompts() -> None:
    both = [ModelReport("m", State.READY, reading=reading) for reading in (True, False)]
    replicas = tuple(ReplicaReport(State.READY, models=(each,)) for each in both)
    rows = table_of(Described(ServerReport(State.READY, models=(both[0],), replicas=replicas), {}))
    assert [(row[0], row[-1]) for row in rows[1:]] == [
        ("m (1)", "reads its warm prompts"),
        ("m (2)", ""),
    ]
