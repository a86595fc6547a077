"""Tool calls in what a model wrote, in the two manners that most open models are trained in."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

# Hermes, Qwen and their like put each call between tags; Llama writes nothing but the call.
_TAGGED = re.compile(r"<tool_call>(.*?)</tool_call>", re.DOTALL)


@dataclass(frozen=True)
class Call:
    """A tool that the model wants called. That the tool exists is for the caller to see."""

    name: str
    arguments: Mapping[str, Any]


def find_calls(text: str) -> tuple[str, list[Call]]:
    """Return the text without its calls, and the calls; what is none stays in the text.

    >>> find_calls('Sure. <tool_call>{"name": "now", "arguments": {}}</tool_call>')
    ('Sure.', [Call(name='now', arguments={})])
    """
    calls: list[Call] = []

    def take(match: re.Match[str]) -> str:
        call = _read(parse(match[1]))
        if call is None:
            return match[0]
        calls.append(call)
        return ""

    rest = _TAGGED.sub(take, text)
    if calls:
        return rest.strip(), calls
    found = parse(text)
    read = [_read(one) for one in (found if isinstance(found, list) else [found])]
    whole = [call for call in read if call is not None]
    return ("", whole) if whole and len(whole) == len(read) else (text, [])


def parse(text: str) -> Any:
    """Return the JSON value that a text is, whole, or None; NaN and the like are not JSON."""
    try:
        return json.loads(text, parse_constant=_refuse, parse_float=_finite)
    except (ValueError, RecursionError):
        return None


def _read(value: Any) -> Call | None:
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        return None
    arguments = value.get("arguments", value.get("parameters"))
    return Call(value["name"], arguments) if isinstance(arguments, dict) else None


def _refuse(constant: str) -> None:
    raise ValueError(constant)


def _finite(number: str) -> float:
    found = float(number)
    if found in (float("inf"), float("-inf")):
        # Python reads 1e999 as infinite, which no JSON could be written of.
        raise ValueError(number)
    return found
