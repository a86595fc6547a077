"""What a build writes and what it refuses, without a server."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import llmserve
from llmserve.builder.context import BuildContext
from llmserve.builder.plan import BuildSpec, make_plan
from llmserve.contract.container import DOCKERFILE
from llmserve.errors import (
    IncompatibleError,
    LLMServeError,
    ModelSourceError,
    OptionError,
    OutputError,
    PluginError,
    UsageError,
)
from llmserve.plugins.registry import Entry, Registry
from llmserve.plugins.roles import Batching
from llmserve.repository import config as modelconfig
from llmserve.repository.check import check_repository
from llmserve.repository.manifest import hashes
from llmserve.repository.repository import Repository
from tests.contract.golden import GOLDEN, build_all, compared_files, without_versions
from tests.support import ROOT, edit_json


def test_a_local_folder_is_copied_and_served_under_its_own_name(repo: Path, folder: Path) -> None:
    result = llmserve.build("hf", str(folder), output=repo)
    assert result.name == "my-model"
    assert (result.folder / "1" / "model" / "model.safetensors").is_file()
    assert (result.folder / "1" / "model.py").read_text().count("\n") == 1
    assert str(folder) not in (result.folder / "llmserve.json").read_text()


def test_weights_can_be_referenced_in_place(repo: Path, folder: Path) -> None:
    result = llmserve.build("hf", str(folder), output=repo, weights="reference")
    assert not (result.folder / "1" / "model").exists()
    assert Repository.open(repo).references() == [str(folder)]
    assert f"{folder}:{folder}:ro" in result.docker_run


@pytest.mark.parametrize(("copy", "copied"), [(None, False), (False, False), (True, True)])
def test_a_plugin_may_copy_small_files_while_weights_are_referenced(
    copy: bool | None, copied: bool, folder: Path, tmp_path: Path
) -> None:
    options: dict[str, bool | str] = {
        "revision": "", "pickle": False, "weights": "reference", "trust_remote_code": False
    }  # fmt: skip
    config = modelconfig.new_config("m", backend="python", max_batch_size=1)
    context = BuildContext(
        name="m", model=str(folder), options={**options}, folder=tmp_path / "1", config=config,
        report=print,
    )  # fmt: skip
    settings = context.place([folder / "tokenizer.json"], "tokens", copy=copy)
    assert (tmp_path / "1" / "tokens" / "tokenizer.json").is_file() == copied
    assert settings == {"path": "tokens" if copied else str(folder)}


def test_several_models_share_a_repository_and_its_dockerfile(repo: Path) -> None:
    llmserve.build("hf", "demo", output=repo)
    llmserve.build("hf", "demo", name="other", output=repo)
    assert {path.name for path in repo.iterdir()} == {"demo", "other", DOCKERFILE}
    text = (repo / DOCKERFILE).read_text()
    assert text.count("transformers==") == 1
    assert "nvcr.io/nvidia/tritonserver:" in text


def test_an_unbatched_model_has_no_batch_dimension(repo: Path) -> None:
    result = llmserve.build("hf", "demo", output=repo, max_batch_size=0)
    config = modelconfig.read(result.folder)
    assert config.max_batch_size == 0
    assert not config.HasField("dynamic_batching")
    dims = {tensor.name: tuple(tensor.dims) for tensor in config.output}
    # The first dimension is the prompts; an output with a value per token has a second one.
    assert dims.pop("output_log_probs") == (-1, -1)
    assert set(dims.values()) == {(-1,)}


def test_a_recipes_default_applies_only_to_the_part_that_has_the_option(repo: Path) -> None:
    result = llmserve.build("hf", "demo", output=repo, decoupled=False)
    assert not modelconfig.read(result.folder).model_transaction_policy.decoupled
    result = llmserve.build("hf", "demo", output=repo, batching="static")
    assert "decoupled" not in result.manifest.options
    assert result.manifest.exchange == "stream"


def test_remote_code_is_refused_unless_allowed_and_then_recorded(repo: Path, folder: Path) -> None:
    own = {"AutoConfig": "own.Config", "AutoModelForCausalLM": "own.Model"}
    (folder / "own.py").write_text("raise SystemExit('nothing allowed this code')")
    result = llmserve.build("hf", str(folder), output=repo)
    assert not list(result.folder.rglob("own.py"))
    edit_json(folder / "config.json", auto_map=own, model_type="own", architectures=["Own"])
    with pytest.raises(ModelSourceError, match="trust_remote_code=true"):
        llmserve.build("hf", str(folder), output=repo)
    result = llmserve.build("hf", str(folder), output=repo, trust_remote_code=True)
    assert json.loads((result.folder / "llmserve.json").read_text())["trust_remote_code"] is True
    assert (result.folder / "1" / "model" / "own.py").is_file()


@pytest.mark.parametrize(
    ("file", "code"),
    [
        ("config.json", {"auto_map": {"AutoModelForCausalLM": "someone/else--own.Model"}}),
        ("tokenizer_config.json", {"auto_map": {"AutoTokenizer": [None, "someone/else--own.T"]}}),
    ],
)
def test_allowed_code_that_would_be_fetched_from_elsewhere_is_refused(
    repo: Path, folder: Path, file: str, code: dict[str, Any]
) -> None:
    edit_json(folder / file, **code)
    with pytest.raises(ModelSourceError, match=f"{file} takes its Python code from someone/else"):
        llmserve.build("hf", str(folder), output=repo, trust_remote_code=True)


KERNELS: list[tuple[str, dict[str, Any]]] = [
    ("config.json", {"attn_implementation": "someone/else"}),
    ("config.json", {"attn_implementation": "paged|someone/else@main:forward"}),
    ("config.json", {"attn_implementation": {"text_config": "someone/else"}}),
    ("config.json", {"_attn_implementation": "someone/else"}),
    ("config.json", {"_attn_implementation_internal": "someone/else"}),
    ("config.json", {"experts_implementation": "someone/else"}),
    ("config.json", {"text_config": {"attn_implementation": "someone/else"}}),
    ("config.json", {"layers": [{"sub": {"attn_implementation": ["sdpa", "someone/else"]}}]}),
    ("config.json", {"kernel_config": {"RMSNorm": "someone/else:RMSNorm"}}),
    ("config.json", {"quantization_config": {"quant_method": "x", "kernel": "someone/else"}}),
    ("generation_config.json", {"attn_implementation": "someone/else"}),
    ("tokenizer_config.json", {"attn_implementation": "someone/else"}),
]


@pytest.mark.parametrize(("file", "code"), KERNELS)
def test_kernels_from_elsewhere_are_refused_with_and_without_trust(
    repo: Path, folder: Path, file: str, code: dict[str, Any]
) -> None:
    built = llmserve.build("hf", str(folder), output=repo).folder
    if not (folder / file).exists():
        (folder / file).write_text("{}")
    edit_json(folder / file, **code)
    for plugin, trusted in (("hf", False), ("hf", True), ("iterative", False), ("openvino", False)):
        refused = f"{file} takes its Python code from .*someone/else"
        with pytest.raises(ModelSourceError, match=refused):
            llmserve.build(plugin, str(folder), output=repo, force=True, trust_remote_code=trusted)
    # A model that an earlier version built, or that was edited.
    part = "tokenizer" if file.startswith("tokenizer") else "model"
    shutil.copyfile(folder / file, built / "1" / part / file)
    for quick in (True, False):
        problems = [problem for problem in check_repository(repo, quick=quick) if problem.fatal]
        assert len(problems) == 1
        assert "someone/else" in problems[0].message


def test_attention_of_transformers_itself_is_accepted(repo: Path, folder: Path) -> None:
    edit_json(folder / "config.json", attn_implementation="sdpa", conv_kernel=4)
    assert llmserve.build("hf", str(folder), output=repo).folder.is_dir()


def test_pickled_weights_are_refused_unless_allowed(repo: Path, folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(ModelSourceError, match="pickle=true"):
        llmserve.build("hf", str(folder), output=repo)
    result = llmserve.build("hf", str(folder), output=repo, pickle=True)
    assert (result.folder / "1" / "model" / "pytorch_model.bin").is_file()


def test_chat_needs_a_template(repo: Path, folder: Path) -> None:
    path = folder / "tokenizer_config.json"
    path.write_text(path.read_text().replace("chat_template", "another_template"))
    with pytest.raises(OptionError, match="no chat template"):
        llmserve.build("hf", str(folder), output=repo, chat=True)


def without(*names: str) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        for name in names:
            (folder / name).unlink()

    return damage


def no_language_model(folder: Path) -> None:
    edit_json(folder / "config.json", architectures=["BertModel"], model_type="bert-like")


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (without("config.json"), "no config.json"),
        (without("model.safetensors"), "no weights"),
        (without("tokenizer.json", "tokenizer_config.json"), "no tokenizer"),
        (no_language_model, "not a causal language model"),
    ],
)
def test_a_folder_that_is_not_a_model_is_refused_and_nothing_is_written(
    repo: Path, folder: Path, damage: Callable[[Path], None], message: str
) -> None:
    llmserve.build("hf", "demo", output=repo, name="kept")
    before = hashes(repo)
    damage(folder)
    with pytest.raises(ModelSourceError, match=message) as caught:
        llmserve.build("hf", str(folder), output=repo)
    assert "\n" not in str(caught.value)
    assert hashes(repo) == before
    assert sorted(path.name for path in repo.parent.iterdir()) == ["my model", "repo"]


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"plugin": "hff"}, PluginError, "did you mean 'hf'"),
        ({"model": "./nothing/here"}, ModelSourceError, "no folder at"),
        ({"model": "a/b/c"}, ModelSourceError, "no folder at"),
        ({"model": "~nobody-here/x"}, ModelSourceError, "no folder at ~nobody-here/x"),
        ({"model": ""}, ModelSourceError, "the model is not named"),
        ({"model": __file__}, ModelSourceError, "is a file"),
        ({"name": "a/b"}, UsageError, "--name"),
        ({"tokenizer": "transformer"}, PluginError, "did you mean 'transformers'"),
        ({"batching": "none"}, PluginError, "no batching"),
        ({"dtype": "float64"}, OptionError, "choose one of"),
        ({"device": "gpu"}, OptionError, "choose auto"),
        ({"max_batch_size": -1}, OptionError, "at least 0"),
        ({"max_batchsize": 8}, OptionError, "did you mean 'max_batch_size'"),
        ({"output": __file__}, OutputError, "is a file"),
        ({"output": Path(__file__).parents[1]}, OutputError, "contains something else"),
    ],
)
def test_bad_input_gets_one_line_that_names_the_fix(
    tmp_path: Path, options: dict[str, Any], error: type[LLMServeError], message: str
) -> None:
    spec: dict[str, Any] = {"plugin": "hf", "model": "demo", "output": tmp_path / "r", **options}
    with pytest.raises(error, match=message) as caught:
        llmserve.build(spec.pop("plugin"), spec.pop("model"), **spec)
    assert "\n" not in str(caught.value)
    assert not list(tmp_path.iterdir())


def test_an_incompatible_combination_is_refused_with_alternatives(repo: Path) -> None:
    registry = Registry.load()
    stepping = Batching(name="stepping", summary="", runtime="x:Y", mode="step")
    registry.entries.append(Entry(stepping, "batching", registry.plugins[0]))
    with pytest.raises(IncompatibleError, match="choose one of dynamic"):
        make_plan(BuildSpec("hf", "demo", output=repo, batching="stepping"), registry)


def test_a_token_reaches_no_file(repo: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    secret = "hf_thisIsNotARealToken"
    monkeypatch.setenv("HF_TOKEN", secret)
    result = llmserve.build("hf", "demo", output=repo)
    assert secret not in result.docker_run
    assert "-e HF_TOKEN" in result.docker_run
    for path in repo.rglob("*"):
        assert path.is_dir() or secret.encode() not in path.read_bytes()


def test_builds_of_the_demo_model_match_the_golden_files(tmp_path: Path) -> None:
    build_all(tmp_path / "r")
    built, golden = compared_files(tmp_path / "r"), compared_files(GOLDEN)
    assert built.keys() == golden.keys()
    for name, text in built.items():
        expected = without_versions(golden[name])
        assert without_versions(text) == expected, (
            f"{name}: run `python -m tests.contract.golden` if the change is intended"
        )


def test_a_build_leaves_a_checkout_clean(tmp_path: Path) -> None:
    """By default, a build writes into model_repository/, which git ignores except its README."""
    shutil.copytree(ROOT / "model_repository", tmp_path / "model_repository")
    shutil.copy(ROOT / ".gitignore", tmp_path)
    subprocess.run(["git", "init", "-q", tmp_path], check=True)
    status = ["git", "-C", str(tmp_path), "status", "--porcelain", "--untracked-files=all"]
    before = subprocess.run(status, check=True, capture_output=True, text=True).stdout
    assert "model_repository/README.md" in before
    llmserve.build("hf", "demo", output=tmp_path / "model_repository")
    assert subprocess.run(status, check=True, capture_output=True, text=True).stdout == before
