"""What a build makes of models in either form, and what it says when it cannot."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

import llmserve
from llmserve.demo import demo_model_path
from llmserve.errors import ModelSourceError, PluginError

pytest.importorskip("openvino_genai", reason="openvino-genai is not installed")
pytest.importorskip("optimum.intel", reason="optimum-intel, which converts, is not installed")


def test_a_converted_model_is_taken_as_it_is(converted: Path, tmp_path: Path) -> None:
    built = llmserve.build("openvino", str(converted), output=tmp_path)
    for kind in ("xml", "bin"):
        name = f"openvino_model.{kind}"
        ours = built.folder / "1" / "openvino" / name
        assert ours.read_bytes() == (converted / name).read_bytes()
    settings = built.manifest.components["generator"]["settings"]
    assert (settings["context_length"], settings["eos_ids"]) == (512, [0])
    assert settings["precision"] == settings["kv_cache"] == "f32"
    assert "openvino-genai" in built.manifest.packages
    assert "optimum-intel" not in built.manifest.packages


def test_half_a_model_is_refused(converted: Path, tmp_path: Path) -> None:
    model = Path(shutil.copytree(converted, tmp_path / "model"))
    (model / "openvino_model.bin").unlink()
    with pytest.raises(ModelSourceError, match=r"without openvino_model\.bin"):
        llmserve.build("openvino", str(model), output=tmp_path / "repository")


def test_a_model_that_cannot_be_converted_is_told_in_one_line(tmp_path: Path) -> None:
    model = Path(shutil.copytree(demo_model_path(), tmp_path / "model"))
    config = json.loads((model / "config.json").read_text())
    config |= {"model_type": "acme", "architectures": ["AcmeForCausalLM"]}
    (model / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelSourceError, match="could not be converted") as caught:
        llmserve.build("openvino", str(model), output=tmp_path / "repository")
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "repository").exists()


def test_a_torchvision_that_does_not_fit_is_told_with_its_mend(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """As optimum-intel brings it from PyPI to a torch that is for CPUs only."""
    site = tmp_path / "site"
    (site / "torchvision").mkdir(parents=True)
    told = "operator torchvision::nms does not exist"
    (site / "torchvision" / "__init__.py").write_text(f"raise RuntimeError({told!r})")
    (site / "torchvision-0.28.0.dist-info").mkdir()
    papers = site / "torchvision-0.28.0.dist-info" / "METADATA"
    papers.write_text("Metadata-Version: 2.1\nName: torchvision\nVersion: 0.28.0\n")
    monkeypatch.syspath_prepend(site)
    monkeypatch.setenv("PYTHONPATH", str(site))
    with pytest.raises(ModelSourceError, match=r"pip uninstall torchvision$"):
        llmserve.build("openvino", "demo", output=tmp_path / "repository")


def test_without_the_converter_its_package_is_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("llmserve_openvino.convert.find_spec", lambda name: None)
    with pytest.raises(PluginError, match=r"pip install 'llmserve-openvino\[convert\]'"):
        llmserve.build("openvino", "demo", output=tmp_path)
