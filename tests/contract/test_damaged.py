"""Damaged or inconsistent models and manifests are refused by name, in one line."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import llmserve
from llmserve.builder.build import BuildSpec, build_spec
from llmserve.builder.source import resolve
from llmserve.builder.source_files import vocabulary_size
from llmserve.contract.names import MANIFEST
from llmserve.demo import demo_model_path
from llmserve.errors import ConfigError, ModelSourceError
from llmserve.repository.manifest import Manifest
from llmserve.repository.repository import Repository
from tests.support import edit_json


def safetensors(content: object, data: bytes = b"") -> bytes:
    text = json.dumps(content).encode()
    return len(text).to_bytes(8, "little") + text + data


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def with_changes(name: str, **changes: Any) -> Callable[[Path], None]:
    return lambda folder: edit_json(folder / name, **changes)


def truncated(name: str) -> Any:
    return pytest.param(lambda folder: truncate(folder / name), f"{name} cannot be read: ", id=name)


def bad_weights(content: bytes, why: str) -> Any:
    def damage(folder: Path) -> None:
        (folder / "model.safetensors").write_bytes(content)

    return pytest.param(damage, f"model.safetensors cannot be read: .*{why}", id=str(content)[:20])


CONFIGURATION = "is not a model's configuration"


@pytest.mark.parametrize(("weights", "chat"), [("copy", True), ("reference", False)])
@pytest.mark.parametrize(
    ("damage", "message"),
    [
        truncated("config.json"),
        truncated("generation_config.json"),
        truncated("model.safetensors"),
        truncated("tokenizer.json"),
        truncated("tokenizer_config.json"),
        bad_weights(b"", "does not begin as"),
        bad_weights(b"version https://git-lfs.github.com/spec/v1\n", "does not begin as"),
        bad_weights(safetensors([]), "describes no tensors"),
        bad_weights(safetensors({"x": 1}), "describes no tensors"),
        bad_weights(
            safetensors({"x": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}, b"1234567"),
            r"\d+ bytes of \d+",
        ),
        bad_weights((9).to_bytes(8, "little") + b"{", "Expecting"),
        (with_changes("config.json", architectures=[1]), CONFIGURATION),
        (with_changes("config.json", architectures="LlamaForCausalLM"), CONFIGURATION),
        (with_changes("config.json", architectures=["Own"], model_type=["x"]), CONFIGURATION),
        (with_changes("config.json", architectures=["Own"], auto_map=["x"]), CONFIGURATION),
        (with_changes("config.json", vocab_size=1023), "has 1024 tokens and the model only 1023"),
    ],
)
def test_a_damaged_or_inconsistent_model_is_refused(
    folder: Path,
    repo: Path,
    damage: Callable[[Path], None],
    message: str,
    weights: str,
    chat: bool,
) -> None:
    damage(folder)
    with pytest.raises(ModelSourceError, match=message) as caught:
        llmserve.build("hf", str(folder), output=repo, weights=weights, chat=chat)
    assert "\n" not in str(caught.value)
    assert not repo.exists()


@pytest.mark.parametrize("recipe", ["gpt2-torchscript", "openvino"])
def test_recipes_that_convert_a_model_refuse_it_too(folder: Path, repo: Path, recipe: str) -> None:
    truncate(folder / "model.safetensors")
    with pytest.raises(ModelSourceError, match=r"model\.safetensors cannot be read: "):
        llmserve.build(recipe, str(folder), output=repo)


def test_a_tokenizer_configuration_that_is_a_list_is_refused(folder: Path, repo: Path) -> None:
    (folder / "tokenizer_config.json").write_text('["chat_template"]')
    with pytest.raises(ModelSourceError, match="is not a JSON object"):
        llmserve.build("hf", str(folder), output=repo, chat=True)


def test_a_tokenizer_that_hardly_fits_the_model_is_reported(folder: Path, repo: Path) -> None:
    edit_json(folder / "config.json", vocab_size=2100)
    weights = load_file(folder / "model.safetensors")
    rows = weights["transformer.wte.weight"]
    weights["transformer.wte.weight"] = np.concatenate([rows, rows, rows])[:2100]
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    reports: list[str] = []
    build_spec(BuildSpec("hf", str(folder), output=repo), report=reports.append)
    assert any("has 1024 tokens and the model 2100: does it belong" in line for line in reports)


def test_one_kind_of_the_generators_weights_is_enough(tmp_path: Path) -> None:
    own = ("*.safetensors", "engine_model.xml")
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ModelSourceError, match=r"no \*\.safetensors or engine_model\.xml in"):
        resolve(str(tmp_path), weights=own, report=print)
    (tmp_path / "engine_model.xml").touch()
    assert resolve(str(tmp_path), weights=own, report=print).path == tmp_path
    with pytest.raises(ModelSourceError, match=r"no weights: no \*\.safetensors in"):
        resolve(str(tmp_path), report=print)


def test_the_demo_model_has_the_weights_that_a_generator_wants_or_is_refused() -> None:
    with pytest.raises(ModelSourceError, match=r"demo has no weights: no \*\.gguf in"):
        resolve("demo", weights=("*.gguf",), kind="folder", report=print)
    assert resolve("demo", weights=("*.gguf",), kind=None, report=print).path.is_dir()


def test_a_model_can_be_a_file(tmp_path: Path, repo: Path) -> None:
    file = tmp_path / "words.txt"
    kinds: dict[str, Any] = {"weights": ("*.txt",), "kind": "file", "report": print}
    for asked, why in (
        ("demo", "the demo is a folder"),
        (str(tmp_path), "is a folder: name a file in it: "),
        (str(file), "no file at"),
    ):
        with pytest.raises(ModelSourceError, match=why):
            resolve(asked, **kinds)
    file.write_text("a b")
    (tmp_path / "words.bin").touch()
    with pytest.raises(ModelSourceError, match=r"is not a file of this kind: name one: \*\.txt"):
        resolve(str(tmp_path / "words.bin"), **kinds)
    source = resolve(str(file), **kinds)
    assert (source.path, source.folder) == (file, tmp_path)
    assert source.described() == {"kind": "local", "file": "words.txt"}


@pytest.mark.parametrize(
    ("tokenizer", "size"),
    [
        ({"model": {"vocab": {"a": 0, "b": 7}}}, 8),
        ({"model": {"vocab": [["a", -1.0], ["b", -2.0]]}}, 2),
        ({"model": {"vocab": {}}, "added_tokens": [{"id": 9}]}, None),
        ({"model": 1}, None),
    ],
)
def test_the_size_of_a_tokenizer_is_that_of_its_own_vocabulary(
    tmp_path: Path, tokenizer: dict[str, Any], size: int | None
) -> None:
    (tmp_path / "vocab.txt").write_text("[PAD]\n[UNK]\nthe\n")
    assert vocabulary_size(tmp_path) == 3
    (tmp_path / "tokenizer.json").write_text(json.dumps(tokenizer))
    assert vocabulary_size(tmp_path) == size


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that references its weights, and a copy of it with a manifest to damage."""
    home = tmp_path_factory.mktemp("damaged")
    model = shutil.copytree(demo_model_path(), home / "model")
    llmserve.build("hf", str(model), output=home / "repo", weights="reference")
    shutil.copytree(home / "repo" / "model", home / "repo" / "copy")
    return home / "repo"


@pytest.mark.parametrize(
    ("changes", "generator_changes"),
    [
        ({}, {"settings": None}),
        ({}, {"settings": []}),
        ({}, {"settings": {"path": 1}}),
        ({}, {"runtime": None}),
        ({}, {"name": 1}),
        ({"components": []}, {}),
        ({"components": {"generator": "x"}}, {}),
        ({"name": 1}, {}),
        ({"files": []}, {}),
        ({"parts": ["../precious"]}, {}),
        ({"part_of": "."}, {}),
        ({"files": {"a": 1}}, {}),
        ({"packages": {"torch": 2}}, {}),
        ({"packages": {"torch; true": "2"}}, {}),
        ({"packages": {"torch": "2; true"}}, {}),
        ({"contract": []}, {}),
        ({"options": None}, {}),
        ({"trust_remote_code": "no"}, {}),
        ({"unheard_of": 1}, {}),
    ],
)
def test_a_manifest_of_another_shape_is_damaged_and_does_not_stop_other_models(
    repository: Path, changes: dict[str, Any], generator_changes: dict[str, Any]
) -> None:
    content = json.loads((repository / "model" / MANIFEST).read_text())
    content["components"]["generator"].update(generator_changes)
    (repository / "copy" / MANIFEST).write_text(json.dumps({**content, **changes}))
    with pytest.raises(ConfigError, match=r"copy/llmserve\.json is damaged"):
        Manifest.read(repository / "copy")
    assert Repository.open(repository).references() == [str(repository.parent / "model")]


@pytest.mark.parametrize("text", ["", "[]", "{}", '"schema"', "[" * 100_000, "\0"])
def test_text_that_is_not_a_manifest_is_damaged(tmp_path: Path, text: str) -> None:
    (tmp_path / MANIFEST).write_text(text)
    with pytest.raises(ConfigError, match="is damaged"):
        Manifest.read(tmp_path)


WHOLE = """{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}
{% if loop.last %}{% break %}{% endif %}{% endfor %}"""


def test_a_chat_template_with_a_wrong_line_is_refused(folder: Path, repo: Path) -> None:
    file = folder / "chat_template.jinja"
    file.write_text(WHOLE + "\n{% if x %}", encoding="utf-8")
    wrong = r"cannot be read \(chat_template\.jinja, line 3\): .*"
    with pytest.raises(ModelSourceError, match=wrong):
        llmserve.build("hf", str(folder), output=repo)
    file.unlink()
    several = [{"name": "default", "template": WHOLE}, {"name": "tools", "template": "{{ x"}]
    edit_json(folder / "tokenizer_config.json", chat_template=several)
    with pytest.raises(ModelSourceError, match=r"cannot be read \(tokenizer_config\.json, line 1"):
        llmserve.build("hf", str(folder), output=repo)
    edit_json(folder / "tokenizer_config.json", chat_template=WHOLE)
    assert llmserve.build("hf", str(folder), output=repo).folder.is_dir()
