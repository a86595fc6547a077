"""Tests of tokenizers for containers whose packages are older than those that wrote them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import llmserve
from llmserve.errors import IncompatibleError
from llmserve.plugin import demo_model_path
from llmserve.runtime import TransformersTokenizer

from .building import engine_of

NEW = json.loads((demo_model_path() / "tokenizer.json").read_text(encoding="utf-8"))


def build(folder: Path, version: str, model: Path | str = "demo", **options: Any) -> Path:
    engine = str(engine_of(folder / "engine", version))
    llmserve.build(
        "trtllm", str(model), name="ensemble", output=folder / "repository", engine=engine,
        trtllm_version=version, decoupled=False, **options,
    )  # fmt: skip
    return folder / "repository"


def model_with(folder: Path, **changes: Any) -> Path:
    """Copy the demo model, with changes to the model in its tokenizer."""
    shutil.copytree(demo_model_path(), folder)
    content = {**NEW, "model": {**NEW["model"], **changes}}
    (folder / "tokenizer.json").write_text(json.dumps(content), encoding="utf-8")
    return folder


@pytest.mark.parametrize("version", ["0.5.0", "0.19.0"])
def test_a_tokenizer_is_written_as_its_container_can_read_it(tmp_path: Path, version: str) -> None:
    assert isinstance(NEW["model"]["merges"][0], list)
    repository = build(tmp_path, version)
    for part in ("preprocessing", "postprocessing"):
        folder = repository / part / "1" / "tokenizer"
        written = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
        is_new = version != "0.5.0"
        merges = NEW["model"]["merges"] if is_new else list(map(" ".join, NEW["model"]["merges"]))
        assert written == {**NEW, "model": {**NEW["model"], "merges": merges}}
    # Both forms mean the same.
    old, new = (TransformersTokenizer({"path": str(p)}, p) for p in (folder, demo_model_path()))
    text = "Café 🙂 is like a ship in a bottle"
    assert old.encode(text) == new.encode(text)


def test_a_tokenizer_that_no_old_version_can_read_is_refused(tmp_path: Path) -> None:
    merges = [["a b", "c"], *NEW["model"]["merges"]]
    vocabulary = {**NEW["model"]["vocab"], "a b": 1021, "c": 1022, "a bc": 1023}
    model = model_with(tmp_path / "model", merges=merges, vocab=vocabulary)
    with pytest.raises(IncompatibleError, match=r"token 'a b' contains a space: build for 0\.19"):
        build(tmp_path, "0.5.0", model)
    assert not (tmp_path / "repository").exists()
    assert build(tmp_path, "0.19.0", model).is_dir()


def test_a_tokenizer_outside_of_the_repository_is_not_rewritten(tmp_path: Path) -> None:
    model = model_with(tmp_path / "model")
    with pytest.raises(IncompatibleError, match=r"cannot read .* give --set weights=copy"):
        build(tmp_path, "0.5.0", model, weights="reference")
    assert json.loads((model / "tokenizer.json").read_text(encoding="utf-8")) == NEW


def test_a_tokenizer_of_transformers_before_4_34_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """It has neither added_tokens_decoder nor a chat template."""
    import transformers

    old = SimpleNamespace(
        eos_token_id=2, all_special_ids=[1, 2, 3], convert_tokens_to_ids=lambda _: None,
        all_special_tokens=["<s>", "</s>", "<tool_call>"],
    )  # fmt: skip
    loader = SimpleNamespace(from_pretrained=lambda *_, **__: Sized(old))
    monkeypatch.setattr(transformers, "AutoTokenizer", loader)
    tokenizer = TransformersTokenizer({"path": "."}, Path())
    assert tokenizer.chat_template is None
    assert tokenizer.eos_ids == {2}
    # A token that begins a tool call is shown, other special tokens are not.
    assert tokenizer.decode([1, 3, 2, 65]) == "[3, 65]"


class Sized:
    """A tokenizer whose text is the list of the ids that are not hidden."""

    def __init__(self, tokenizer: SimpleNamespace) -> None:
        vars(self).update(vars(tokenizer))

    def __len__(self) -> int:
        return 8

    def decode(self, ids: list[int], **_: Any) -> str:
        return str(ids)
