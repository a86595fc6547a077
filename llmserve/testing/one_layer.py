"""The demo model with one layer."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from llmserve.demo import demo_model_path


def one_layer(folder: Path) -> Path:
    """Save the demo model with one layer: exporting all of it to ONNX takes half a minute."""
    if not folder.exists():
        from transformers import AutoModelForCausalLM

        model = AutoModelForCausalLM.from_pretrained(demo_model_path(), n_layer=1)
        shutil.copytree(demo_model_path(), folder)
        model.save_pretrained(folder)
        # Drop what this version of transformers adds to the config.
        shutil.copy(demo_model_path() / "config.json", folder)
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        changed = json.dumps({**config, "n_layer": 1})
        (folder / "config.json").write_text(changed, encoding="utf-8")
    return folder
