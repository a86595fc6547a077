"""Gives some models of an image packages of their own, before any other.

An image that brings an engine has the versions that the engine needs. Models that need others are
served from it with theirs in a separate folder: each model runs in its own process, and this is
called when Python starts there, before anything is imported.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

PACKAGES = "LLMSERVE_OWN_PACKAGES"
"""The variable with the folder of the packages."""
MODELS = "LLMSERVE_OWN_MODELS"
"""The variable with the names of the models that use it, separated by spaces."""


def use(process: Path = Path("/proc/self/cmdline")) -> None:
    """Search the folder first if this process runs one of the models, and so do its children."""
    folder, models = os.environ.get(PACKAGES), os.environ.get(MODELS, "").split()
    if not folder or not models:
        return
    for word in os.fsdecode(process.read_bytes()).split("\0"):
        path = Path(word)
        # Triton's stub is started with the path of the model's file, in its version's folder.
        if path.name == "model.py" and path.parent.parent.name in models:
            sys.path.insert(0, folder)
            rest = os.environ.get("PYTHONPATH")
            os.environ["PYTHONPATH"] = f"{folder}{os.pathsep}{rest}" if rest else folder
            return
