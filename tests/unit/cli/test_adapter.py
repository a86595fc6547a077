"""Adapters of a model that is built, by the command line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

import llmserve
from llmserve.errors import IncompatibleError, ModelSourceError, OptionError, OutputError
from llmserve.plugin import Repository
from llmserve.repository.check import check_files
from llmserve_cli.group import cli

WEIGHTS = "adapter_model.safetensors"


@pytest.fixture(scope="module")
def adapter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from llmserve.demo import demo_model_path
    from llmserve.testing.tiny_adapters import save_adapter

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(demo_model_path()))
    return save_adapter(tmp_path_factory.mktemp("adapters") / "one", model, targets=("c_attn",))


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    llmserve.build("iterative", "demo", name="demo", output=tmp_path / "models")
    return tmp_path / "models"


def run(repository: Path, *words: object) -> Result:
    words = ("adapter", *words, "--repository", repository)
    return CliRunner().invoke(cli, [str(word) for word in words])


def test_adapters_are_added_listed_replaced_and_removed(repository: Path, adapter: Path) -> None:
    assert "has no adapters" in run(repository, "list", "demo").output
    added = run(repository, "add", "demo", f"sql={adapter}")
    assert added.exit_code == 0
    assert "demo has the adapter sql: rank 4, " in added.stderr
    assert "llmserve: note: the adapter sql was trained on tiny" in added.stderr
    folder = repository / "demo" / "1" / "adapters"
    assert sorted(path.name for path in folder.rglob("*")) == [
        "adapter_config.json",
        WEIGHTS,
        "sql",
    ]
    assert run(repository, "add", "demo", f"sql={adapter}").exit_code == 0
    assert [path.name for path in folder.iterdir()] == ["sql"], "nothing is left over"
    (listed,) = json.loads(run(repository, "list", "demo", "--json").stdout)
    assert (listed["name"], listed["rank"], listed["base"]) == ("sql", 4, "tiny")
    assert not [*check_files(Repository.open(repository).model("demo"), quick=False)]
    assert run(repository, "remove", "demo", "sql").exit_code == 0
    assert not [*folder.iterdir()]
    again = run(repository, "remove", "demo", "sql")
    assert isinstance(again.exception, ModelSourceError)


def test_a_build_has_adapters_and_another_does_not_lose_them(
    repository: Path, adapter: Path, tmp_path: Path
) -> None:
    words = ["build", "--plugin", "iterative", "--model", "demo", "--output", str(repository)]
    built = CliRunner().invoke(
        cli, [*words, "--adapter", f"a={adapter}", "--adapter", f"b={adapter}"]
    )
    assert built.exit_code == 0, built.output
    assert "note: the adapter a was trained on tiny" in built.stderr
    assert [path.name for path in sorted((repository / "demo/1/adapters").iterdir())] == ["a", "b"]
    run(repository, "add", "demo", f"c={adapter}")
    again = CliRunner().invoke(cli, words)
    assert isinstance(again.exception, OutputError)
    assert "was edited since it was built: 1/adapters/c/" in str(again.exception)


@pytest.mark.parametrize("name", ["../x", "a:b", "a/b", ".x", "", "x" * 65])
def test_a_name_cannot_lead_elsewhere(name: str, repository: Path, adapter: Path) -> None:
    for words in (("add", "demo", f"{name}={adapter}"), ("remove", "demo", name)):
        assert isinstance(run(repository, *words).exception, OptionError)
    assert not [*(repository / "demo" / "1").glob("adapters/*")]


def test_what_is_no_adapter_of_the_model_is_refused_and_leaves_nothing(
    repository: Path, adapter: Path, tmp_path: Path
) -> None:
    for name, content in (("empty", None), ("pickled", b"x"), ("linked", b"")):
        folder = tmp_path / name
        folder.mkdir()
        (folder / "adapter_config.json").write_bytes((adapter / "adapter_config.json").read_bytes())
        if name == "pickled":
            (folder / "adapter_model.bin").write_bytes(content or b"")
        elif name == "linked":
            secret = tmp_path / "secret"
            secret.write_bytes((adapter / WEIGHTS).read_bytes())
            (folder / WEIGHTS).symlink_to(secret)
        refused = run(repository, "add", "demo", f"x={folder}")
        assert isinstance(refused.exception, ModelSourceError), name
    assert not [*(repository / "demo" / "1").glob("adapters/*")]
    missing = run(repository, "add", "demo", "x=/nowhere")
    assert "there is no folder /nowhere" in str(missing.exception)


@pytest.mark.parametrize("is_empty", [True, False])
def test_a_build_refuses_one_before_it_reads_the_model(tmp_path: Path, is_empty: bool) -> None:
    """A conversion may take an hour."""
    model, folder = tmp_path / "model", tmp_path / "sql"
    model.mkdir()
    if is_empty:
        folder.mkdir()
    with pytest.raises(ModelSourceError, match=r"the adapter sql|there is no folder"):
        llmserve.build("iterative", str(model), adapters=f"sql={folder}", output=tmp_path / "out")


def test_a_model_that_takes_none_says_so(tmp_path: Path, adapter: Path) -> None:
    llmserve.build("gpt2-torchscript", "demo", name="demo", output=tmp_path)
    refused = run(tmp_path, "add", "demo", f"a={adapter}")
    assert isinstance(refused.exception, IncompatibleError)
