"""The model that Triton loads: what it makes of a manifest."""

from __future__ import annotations

import gc
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from llmserve.runtime.contract import SCHEMA
from llmserve.runtime.model import TritonPythonModel
from llmserve.testing import FakeBackendUtils


@pytest.mark.parametrize("schema", [None, 0, 99])
def test_a_manifest_of_another_form_is_told_before_it_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, schema: int | None
) -> None:
    monkeypatch.setitem(sys.modules, "triton_python_backend_utils", FakeBackendUtils())
    papers = {"llmserve": "9.9", "schema": schema}
    (tmp_path / "llmserve.json").write_text(json.dumps(papers))
    arguments = {"model_repository": str(tmp_path), "model_version": "1"}
    with pytest.raises(RuntimeError, match=r"built by llmserve 9\.9.*build it again"):
        TritonPythonModel().initialize(arguments)


class Stage:
    """A part of an ensemble that holds much, as models do."""

    def __init__(self, settings: dict[str, Any], folder: Path) -> None:
        self.held: list[list[int]] = [[] for _ in range(1000)]

    def start(self, parts: Any) -> None:
        self.held[0].append(1)


def test_what_is_loaded_is_not_looked_through_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "triton_python_backend_utils", FakeBackendUtils())
    papers = {
        "schema": SCHEMA,
        "components": {"stage": {"runtime": f"{__name__}:Stage", "settings": {}}},
        "contract": {"inputs": [], "extras": [], "defaults": {}},
    }
    (tmp_path / "llmserve.json").write_text(json.dumps(papers))
    model = TritonPythonModel()
    before = gc.get_freeze_count()
    try:
        model.initialize(
            {
                "model_repository": str(tmp_path),
                "model_version": "1",
                "model_name": "stage",
                "model_config": '{"max_batch_size": 4}',
            }
        )
        assert gc.get_freeze_count() - before > 1000
    finally:
        gc.unfreeze()


class Newer:
    """A part that has learned to ask for more than an older version wrote down."""

    def __init__(self, settings: dict[str, Any], folder: Path) -> None:
        assert "patience" not in settings
        assert settings.get("patience", 3) == 3
        self.pace, self.patience = settings["pace"], settings["patience"]


def test_a_setting_that_an_older_build_did_not_write_says_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "triton_python_backend_utils", FakeBackendUtils())
    papers = {
        "schema": SCHEMA,
        "components": {"stage": {"runtime": f"{__name__}:Newer", "settings": {"pace": 1}}},
        "contract": {},
    }
    (tmp_path / "llmserve.json").write_text(json.dumps(papers))
    arguments = {
        "model_repository": str(tmp_path),
        "model_version": "1",
        "model_name": "stage",
        "model_config": "{}",
    }
    with pytest.raises(KeyError) as told:
        TritonPythonModel().initialize(arguments)
    package = __name__.partition(".")[0]
    assert str(told.value) == (
        f"built by another version of {package}, which wrote no 'patience' down: "
        "build the model again"
    )


def test_unloading_what_never_loaded_is_no_matter() -> None:
    TritonPythonModel().finalize()
