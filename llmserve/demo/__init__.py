"""The demo model: a very small GPT-2 that the package brings along.

Nothing has to be downloaded to serve a first answer. How it was trained is in the project's
repository, in ``tests/demo_trainer``.
"""

from __future__ import annotations

from pathlib import Path

from llmserve.errors import ModelSourceError

FOLDER = Path(__file__).with_name("model")
_NEEDED = (
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "tokenizer.json",
    "tokenizer_config.json",
)


def demo_model_path() -> Path:
    """Return the folder of the demo model, an ordinary Hugging Face model's."""
    if missing := [name for name in _NEEDED if not (FOLDER / name).is_file()]:
        raise ModelSourceError(
            f"the demo model lacks {', '.join(missing)}", mend="install llmserve again"
        )
    return FOLDER
