"""The demo models that are included in the package: one of text, and one that sees drawings.

They give a first answer without any download. The code that trained them is in the project's
repository, in ``plugins/tools/demo_trainer``.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from llmserve.errors import ModelSourceError

DEMO = "demo"
"""A very small GPT-2."""
DEMO_VISION = "demo-vision"
"""A very small LLaVA, which tells shapes, digits and colours."""

_HERE = Path(__file__).parent
DEMO_MODELS: Mapping[str, Path] = {DEMO: _HERE / "model", DEMO_VISION: _HERE / "vision"}
_OF_ALL = (
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "tokenizer.json",
    "tokenizer_config.json",
)
_OF_VISION = ("chat_template.jinja", "processor_config.json")


def demo_model_path(name: str = DEMO) -> Path:
    """Return the folder of a demo model, which has the usual Hugging Face layout."""
    folder = DEMO_MODELS[name]
    files = _OF_ALL + (_OF_VISION if name == DEMO_VISION else ())
    if missing := [each for each in files if not (folder / each).is_file()]:
        raise ModelSourceError(
            f"the demo model lacks {', '.join(missing)}", hint="install llmserve again"
        )
    return folder
