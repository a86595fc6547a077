"""Builds for a version, and the engines that they are for: their configurations alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import llmserve
from llmserve import modelconfig
from llmserve.modelconfig import ModelConfig

ENGINES = Path(__file__).with_name("engines")
_FOLDERS = {"0.5.0": "0.5", "0.12.0": "0.12", "0.19.0": "0.19", "1.2.1": "1.2"}
VERSIONS = tuple(_FOLDERS)
"""Those that the tests hold against their templates."""


def build(output: Path, version: str, **options: Any) -> dict[str, ModelConfig]:
    """Build for a version and return the configurations by NVIDIA's names."""
    if options.get("layout") != "llmapi":
        options = {"engine": str(ENGINES / _FOLDERS[version]), **options}
    repository = output / version
    llmserve.build(
        "trtllm", "demo", name="ensemble", output=repository, trtllm_version=version, **options
    )
    folders = [path for path in repository.iterdir() if path.is_dir()]
    return {folder.name: modelconfig.read(folder) for folder in folders}
