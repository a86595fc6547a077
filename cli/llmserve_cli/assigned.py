"""Options of requests that are given as ``--set KEY=VALUE``."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from llmserve.errors import OptionError
from llmserve.names import near_or_in

if TYPE_CHECKING:
    from llmserve.client import ModelInfo

NOT_BY_SET = {"self", "model", "prompt", "text_input", "messages", "stream", "timeout"}
"""What a request has a place of its own for."""


def assigned(assignments: tuple[str, ...]) -> dict[str, Any]:
    from llmserve.plugins.options import parse_assignments

    return {key: _value(text) for key, text in parse_assignments(assignments).items()}


def _value(text: str) -> bool | int | float | str:
    """Interpret numbers, true and false as JSON, and anything else as text."""
    try:
        value = json.loads(text, parse_constant=str)
    except (ValueError, RecursionError):
        return text
    return value if isinstance(value, (bool, int, float)) else text


def refuse_unknown(info: ModelInfo, options: Iterable[str]) -> None:
    """Refuse options that a model built by llmserve would silently ignore."""
    from llmserve.client.messages import input_of

    for name in options:
        is_known = input_of(info, name) or name in ("priority", "queue_timeout")
        if info.made_by_llmserve and not is_known:
            names = info.inputs.keys() - NOT_BY_SET
            hint = near_or_in(name, names, "docs/reference/options.md")
            raise OptionError(f"{info.name} has no option {name}", hint=hint)
