"""Models and manifests that are damaged or lie are refused by name, in one line."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import llmserve
from llmserve.builder.build import BuildSpec, build_spec
from llmserve.demo import demo_model_path
from llmserve.errors import ConfigError, ModelSourceError
from llmserve.repository.manifest import Manifest, references
from llmserve.repository.source_files import vocabulary_size
from llmserve.runtime.contract import MANIFEST


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return Path(shutil.copytree(demo_model_path(), tmp_path / "model"))


def edit_json(path: Path, **changes: Any) -> None:
    path.write_text(
        json.dumps({**json.loads(path.read_text(encoding="utf-8")), **changes}), encoding="utf-8"
    )


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


@pytest.mark.parametrize("chat", [False, True])
@pytest.mark.parametrize("weights", ["copy", "reference"])
@pytest.mark.parametrize(
    "name",
    [
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    ],
)
def test_a_file_that_is_cut_short_is_refused(
    folder: Path, tmp_path: Path, name: str, weights: str, chat: bool
) -> None:
    cut(folder / name)
    with pytest.raises(ModelSourceError, match=f"{name} cannot be read: ") as caught:
        llmserve.build("hf", str(folder), output=tmp_path / "repo", weights=weights, chat=chat)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "repo").exists()


def header(content: object, data: bytes = b"") -> bytes:
    text = json.dumps(content).encode()
    return len(text).to_bytes(8, "little") + text + data


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b"", "does not begin as"),
        (b"version https://git-lfs.github.com/spec/v1\n", "does not begin as"),
        (header([]), "describes no tensors"),
        (header({"x": 1}), "describes no tensors"),
        (header({"x": {"data_offsets": [0, 8]}}, b"1234567"), r"\d+ bytes of \d+"),
        ((9).to_bytes(8, "little") + b"{", "Expecting"),
    ],
)
def test_weights_that_are_none_are_refused(
    folder: Path, tmp_path: Path, content: bytes, why: str
) -> None:
    (folder / "model.safetensors").write_bytes(content)
    with pytest.raises(ModelSourceError, match=f"model.safetensors cannot be read: .*{why}"):
        llmserve.build("hf", str(folder), output=tmp_path / "repo")


@pytest.mark.parametrize(
    "changes",
    [
        {"architectures": [1]},
        {"architectures": "LlamaForCausalLM"},
        {"architectures": ["Own"], "model_type": ["x"]},
        {"architectures": ["Own"], "auto_map": ["x"]},
    ],
)
def test_a_configuration_of_wrong_types_is_refused(
    folder: Path, tmp_path: Path, changes: dict[str, Any]
) -> None:
    edit_json(folder / "config.json", **changes)
    with pytest.raises(ModelSourceError, match="is not a model's configuration"):
        llmserve.build("hf", str(folder), output=tmp_path / "repo")


def test_a_tokenizer_that_is_hardly_the_models_own_is_told(folder: Path, tmp_path: Path) -> None:
    edit_json(folder / "config.json", vocab_size=50257)
    told: list[str] = []
    build_spec(BuildSpec("hf", str(folder), output=tmp_path / "repo"), report=told.append)
    assert any("has 1024 words and the model knows 50257: is it the model's own" in t for t in told)


def test_a_tokenizer_of_another_model_is_refused(folder: Path, tmp_path: Path) -> None:
    known = json.loads((folder / "config.json").read_text())["vocab_size"]
    edit_json(folder / "config.json", vocab_size=known - 1)
    with pytest.raises(
        ModelSourceError, match=f"has {known} words and the model knows {known - 1}"
    ):
        llmserve.build("hf", str(folder), output=tmp_path / "repo")
    assert not (tmp_path / "repo").exists()


@pytest.mark.parametrize(
    ("tokenizer", "size"),
    [
        ({"model": {"vocab": {"a": 0, "b": 7}}}, 8),
        ({"model": {"vocab": [["a", -1.0], ["b", -2.0]]}}, 2),
        ({"model": {"vocab": {}}, "added_tokens": [{"id": 9}]}, None),
        ({"model": 1}, None),
    ],
)
def test_a_tokenizers_size_is_that_of_its_own_words(
    tmp_path: Path, tokenizer: dict[str, Any], size: int | None
) -> None:
    (tmp_path / "vocab.txt").write_text("[PAD]\n[UNK]\nthe\n")
    assert vocabulary_size(tmp_path) == 3
    (tmp_path / "tokenizer.json").write_text(json.dumps(tokenizer))
    assert vocabulary_size(tmp_path) == size


def test_a_tokenizer_configuration_that_is_a_list_is_refused(folder: Path, tmp_path: Path) -> None:
    (folder / "tokenizer_config.json").write_text('["chat_template"]')
    with pytest.raises(ModelSourceError, match="holds no JSON object"):
        llmserve.build("hf", str(folder), output=tmp_path / "repo", chat=True)


def component(**changes: Any) -> Callable[[dict[str, Any]], None]:
    return lambda content: content["components"]["generator"].update(changes)


def without_settings(content: dict[str, Any]) -> None:
    del content["components"]["generator"]["settings"]


def field(**changes: Any) -> Callable[[dict[str, Any]], None]:
    return lambda content: content.update(changes)


@pytest.mark.parametrize(
    "spoil",
    [
        without_settings,
        component(settings=[]),
        component(settings={"path": 1}),
        component(runtime=None),
        component(name=1),
        field(components=[]),
        field(components={"generator": "x"}),
        field(name=1),
        field(files=[]),
        field(parts=["../precious"]),
        field(part_of="."),
        field(files={"a": 1}),
        field(packages={"torch": 2}),
        field(packages={"torch; true": "2"}),
        field(packages={"torch": "2; true"}),
        field(contract=[]),
        field(options=None),
        field(trust_remote_code="no"),
        field(unheard_of=1),
    ],
)
def test_a_manifest_of_another_shape_is_damaged_and_stops_no_other_model(
    folder: Path, tmp_path: Path, spoil: Callable[[dict[str, Any]], None]
) -> None:
    repo = tmp_path / "repo"
    llmserve.build("hf", str(folder), output=repo, weights="reference")
    shutil.copytree(repo / "model", repo / "spoilt")
    content = json.loads((repo / "spoilt" / MANIFEST).read_text())
    spoil(content)
    (repo / "spoilt" / MANIFEST).write_text(json.dumps(content))
    with pytest.raises(ConfigError, match=r"spoilt/llmserve\.json is damaged"):
        Manifest.read(repo / "spoilt")
    assert references(repo) == [folder]


@pytest.mark.parametrize("text", ["", "[]", "{}", '"schema"', "[" * 100_000, "\0"])
def test_what_is_no_manifest_is_damaged(tmp_path: Path, text: str) -> None:
    (tmp_path / MANIFEST).write_text(text)
    with pytest.raises(ConfigError, match="is damaged"):
        Manifest.read(tmp_path)
