"""The demo model in a form that is served without torch: it loads in a seventh of the time.

It answers as the demo model does. Tests of what is around models use it, not those of an engine.
"""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from typing import Any

import llmserve
from llmserve.demo import demo_model_path
from tests.kept import installed, kept
from tests.support import ROOT

PLUGIN = "openvino"
OPTIONS: dict[str, Any] = {"tokenizer": "tokenizers"}


def light_model() -> Path:
    """Return a folder called ``demo``, which the plugin builds in a moment."""

    def convert(folder: Path) -> None:
        with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
            built = llmserve.build(PLUGIN, "demo", output=Path(scratch, "repository"))
            shutil.copytree(built.folder / "1" / "openvino", folder / "demo")
        for path in demo_model_path().glob("*.json"):
            shutil.copy(path, folder / "demo")

    code = ROOT / "plugins" / "openvino" / "llmserve_openvino"
    packages = installed("openvino", "torch", "transformers")
    weights = demo_model_path() / "model.safetensors"
    return kept("light", convert, packages, code, weights) / "demo"
