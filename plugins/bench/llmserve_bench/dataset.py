"""Prompts from a file: a JSON list of objects, JSON lines, or plain text with a prompt a line.

An object has its prompt under ``input`` (which an ``instruction`` may follow, as in the data sets
of TensorRT-LLM's tools), ``prompt``, ``text_input`` or ``text``. How long the answer is to be may
follow from a text under ``output``, ``completion`` or ``response``, or from a number under
``output_tokens`` or ``max_tokens``.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llmserve.errors import UsageError

_PROMPT = ("input", "prompt", "text_input", "text")
_ANSWER = ("output", "completion", "response")
_LENGTH = ("output_tokens", "max_tokens")
_LIST = re.compile(r"\s*\[\s*[\"{]")
_OBJECT = re.compile(r"\s*\{\s*[\"}]")


@dataclass(frozen=True)
class Sample:
    """A prompt, and the answer or its length where the data set has one."""

    prompt: str
    answer: str | None = None
    output_tokens: int | None = None


def read_dataset(path: Path) -> list[Sample]:
    """Read all prompts of a file, in its order."""
    try:
        text = path.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        problem = f"{path} is not UTF-8 text (byte {error.start})"
        raise UsageError(problem, mend="save it as UTF-8") from None
    # Not splitlines, which also splits at characters that editors do not count as line ends.
    lines = [(at, line) for at, line in enumerate(text.split("\n"), 1) if line.strip()]
    if not lines:
        raise UsageError(f"{path} holds no prompts")
    if _LIST.match(text) or _is_list(text):
        entries = enumerate(_json(text, f"{path}"), 1)
        return [_sample(entry, f"{path}, entry {at}") for at, entry in entries]
    if _OBJECT.match(lines[0][1]):
        places = ((f"{path}, line {at}", line) for at, line in lines)
        return [_sample(_json(line, place), place) for place, line in places]
    return [Sample(line.rstrip("\r")) for _, line in lines]


def _is_list(text: str) -> bool:
    # A plain prompt may begin with a bracket as well: "[1] is a footnote".
    try:
        content = json.loads(text)
    except (ValueError, RecursionError):
        return False
    return isinstance(content, list) and bool(content)


def _json(text: str, place: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        forms = "give a JSON list of objects, an object a line, or a prompt a line"
        raise UsageError(f"{place} is not JSON ({error})", mend=forms) from None


def _sample(entry: Any, place: str) -> Sample:
    if isinstance(entry, str):
        return Sample(entry)
    if not isinstance(entry, dict):
        raise UsageError(f"{place} is not an object", mend="give objects with input and output")
    prompt = _text(entry, _PROMPT, place)
    if prompt is None:
        keys = ", ".join(entry) or "none"
        mend = f"name it {', '.join(_PROMPT[:-1])} or {_PROMPT[-1]}"
        raise UsageError(f"{place} has no prompt: its keys are {keys}", mend=mend)
    if instruction := _text(entry, ("instruction",), place):
        prompt = f"{prompt} {instruction}"
    return Sample(prompt, _text(entry, _ANSWER, place), _length(entry, place))


def _text(entry: Mapping[str, Any], names: tuple[str, ...], place: str) -> str | None:
    for name in names:
        value = entry.get(name)
        if isinstance(value, str):
            return value
        if value is not None:
            raise UsageError(f"{place}: {name} is not text")
    return None


def _length(entry: Mapping[str, Any], place: str) -> int | None:
    for name in _LENGTH:
        value = entry.get(name)
        # A bool is an int to isinstance.
        if isinstance(value, int) and value is not True and value > 0:
            return value
        if value is not None:
            raise UsageError(f"{place}: {name} is not a number above 0")
    return None
