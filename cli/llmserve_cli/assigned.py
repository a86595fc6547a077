"""Options of requests that are given as ``--set KEY=VALUE``."""

from __future__ import annotations

import json
from typing import Any


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
