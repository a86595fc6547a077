"""Fixtures: the output folder of a build, and a model that a test may damage."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from llmserve.demo import demo_model_path


@pytest.fixture
def repo(tmp_path: Path) -> Path:
    return tmp_path / "repo"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a copy of the demo model as a local folder."""
    return Path(shutil.copytree(demo_model_path(), tmp_path / "my model"))
