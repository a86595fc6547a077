"""A fixture for the tests of OpenVINO: the demo model, converted once."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

import llmserve
from llmserve.plugin import demo_model_path


@pytest.fixture(scope="session")
def converted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the demo model in OpenVINO's form, as a build converts it."""
    root = tmp_path_factory.mktemp("openvino")
    built = llmserve.build("openvino", "demo", output=root / "repository", weight_format="fp32")
    folder = Path(shutil.copytree(built.folder / "1" / "openvino", root / "demo-openvino"))
    for path in demo_model_path().glob("*.json"):
        shutil.copy(path, folder)
    return folder
