"""Where tests build to, and a model to spoil."""

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
    """Lend a copy of the demo model as a local folder."""
    return Path(shutil.copytree(demo_model_path(), tmp_path / "my model"))
