"""The demo model: a very small GPT-2 that the package brings along.

Nothing has to be downloaded to serve a first answer. How it was trained is in the project's
repository, in ``tests/demo_trainer``.
"""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path

from llmserve.errors import ModelSourceError

_NEEDED = (
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "tokenizer.json",
    "tokenizer_config.json",
)


def demo_model_path() -> Path:
    """Return the folder of the demo model, which ``--model demo`` names.

    The folder is an ordinary Hugging Face model folder:

    >>> demo_model_path().name
    'model'

    Raises:
        ModelSourceError: a file is missing, or the package lies inside an archive.
    """
    folder = files(__name__) / "model"
    if not isinstance(folder, Path):
        raise ModelSourceError(
            "the demo model lies inside an archive", mend="install llmserve with pip"
        )
    missing = [name for name in _NEEDED if not (folder / name).is_file()]
    if missing:
        raise ModelSourceError(
            f"the demo model lacks {', '.join(missing)}",
            mend="install llmserve again",
        )
    return folder
