"""Builds for a version, and the engines that they are for: their configurations alone."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import llmserve
from llmserve.plugin import ModelConfig
from llmserve.repository import config as modelconfig
from llmserve_trtllm.versions import Version

ENGINES = Path(__file__).with_name("engines")


def engine_of(folder: Path, version: str, **build: Any) -> Path:
    """Write an engine of a version in the form of its time, with changes in how it was built."""
    wanted = Version.parse(version)
    forms = {
        Version(0, 5): "0.5",
        Version(0, 12): "0.12",
        Version(0, 19): "0.19",
        Version(1, 2): "1.2",
    }
    source = next(name for first, name in reversed(forms.items()) if wanted >= first)
    shutil.copytree(ENGINES / source, folder, dirs_exist_ok=True)
    content = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    if "version" in content:
        content["version"] = str(wanted)
        content["build_config"] |= build
    (folder / "config.json").write_text(json.dumps(content), encoding="utf-8")
    return folder


def build(output: Path, version: str, **options: Any) -> dict[str, ModelConfig]:
    """Build for a version and return the configurations by NVIDIA's names."""
    if options.get("layout") != "llmapi" and "engine" not in options:
        options["engine"] = str(engine_of(output / f"engine-{version}", version))
    repository = output / version
    llmserve.build(
        "trtllm", "demo", name="ensemble", output=repository, trtllm_version=version, **options
    )
    folders = [path for path in repository.iterdir() if path.is_dir()]
    return {folder.name: modelconfig.read(folder) for folder in folders}
