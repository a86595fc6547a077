"""The demo model: a very small GPT-2 that is included in the package.

It gives a first answer without any download. The code that trained it is in the project's
repository, in ``plugins/tools/demo_trainer``.
"""

from __future__ import annotations

from pathlib import Path

from llmserve.errors import ModelSourceError

FOLDER = Path(__file__).with_name("model")
_REQUIRED_FILES = (
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "tokenizer.json",
    "tokenizer_config.json",
)


def demo_model_path() -> Path:
    """Return the folder of the demo model, which has the usual Hugging Face layout."""
    if missing := [name for name in _REQUIRED_FILES if not (FOLDER / name).is_file()]:
        raise ModelSourceError(
            f"the demo model lacks {', '.join(missing)}", hint="install llmserve again"
        )
    return FOLDER
