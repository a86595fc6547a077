"""Which options of requests ``--set KEY=VALUE`` may have."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from llmserve.errors import OptionError
from llmserve.plugin import near

if TYPE_CHECKING:
    from llmserve.client import ModelInfo

NOT_BY_SET = {"self", "model", "prompt", "text_input", "messages", "stream", "timeout"}
"""What a request has a place of its own for."""


def refuse_unknown(info: ModelInfo, options: Iterable[str]) -> None:
    """Refuse options that a model built by llmserve would silently ignore."""
    for name in options:
        is_known = info.input_of(name) or name in ("priority", "queue_timeout")
        if info.made_by_llmserve and not is_known:
            names = info.inputs.keys() - NOT_BY_SET
            hint = near(name, names, place="docs/reference/options.md")
            raise OptionError(f"{info.name} has no option {name}", hint=hint)
