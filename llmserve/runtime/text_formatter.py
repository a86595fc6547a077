"""The formatter ``text``: the answer, why it ended and how many tokens it took."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from llmserve.runtime.protocols import Answer, strings


class TextFormatter:
    """Fills ``text_output``, ``finish_reason`` and the token counts."""

    def __init__(self, settings: Mapping[str, Any], folder: Path) -> None:
        del settings, folder

    def format(self, answers: Sequence[Answer]) -> dict[str, npt.NDArray[Any]]:
        """Return each output tensor, one element per answer."""
        return {
            "text_output": strings(
                [(answer.prompt if answer.echo else "") + answer.text for answer in answers]
            ),
            "finish_reason": strings([answer.finish_reason or "" for answer in answers]),
            "num_input_tokens": np.array([a.input_tokens for a in answers], dtype=np.int32),
            "num_output_tokens": np.array([a.output_tokens for a in answers], dtype=np.int32),
        }
