"""A model that was downloaded whole is loaded from the hub's cache, and nobody is asked."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from llmserve.runtime.location import located
from tests.loopback_hub import COMMIT
from tests.support import hub_cache

SETTINGS = {"id": "acme/tiny", "revision": COMMIT}
LOCAL = {"trust_remote_code": False, "local_files_only": True}
FROM_HUB = ("acme/tiny", {"trust_remote_code": False, "revision": COMMIT, "token": False})


@pytest.fixture
def snapshot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "HF_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    return hub_cache(tmp_path, "acme/tiny", COMMIT)


def test_a_whole_model_of_the_cache_is_a_folder(
    snapshot: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert located(SETTINGS, Path()) == (str(snapshot), LOCAL)
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "other"))
    assert located(SETTINGS, Path()) == FROM_HUB
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setenv("HF_HOME", str(tmp_path / "other"))
    assert located(SETTINGS, Path()) == (str(snapshot), LOCAL)


def test_shards_are_whole_if_all_are_there(snapshot: Path) -> None:
    (snapshot / "model.safetensors").rename(snapshot / "a.safetensors")
    assert located(SETTINGS, Path()) == FROM_HUB
    index = snapshot / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"x": "a.safetensors", "y": "b.safetensors"}}))
    assert located(SETTINGS, Path()) == FROM_HUB
    (snapshot / "b.safetensors").touch()
    assert located(SETTINGS, Path()) == (str(snapshot), LOCAL)


@pytest.mark.parametrize("index", ["", "[]", "{}", '{"weight_map": 3}', '{"weight_map": {}}'])
def test_a_damaged_index_is_left_to_the_library(snapshot: Path, index: str) -> None:
    (snapshot / "model.safetensors").unlink()
    (snapshot / "model.safetensors.index.json").write_text(index)
    assert located(SETTINGS, Path()) == FROM_HUB


def test_a_model_without_its_configuration_is_not_whole(snapshot: Path) -> None:
    (snapshot / "config.json").unlink()
    assert located(SETTINGS, Path()) == FROM_HUB
