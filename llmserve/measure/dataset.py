"""Prompts from a file.

Three forms, told apart by what is in the file: a JSON list of objects, JSON lines (an object
each), and plain text (a prompt a line, which may begin with a bracket). An object has its prompt
under ``input``, which an ``instruction`` may follow as in the data sets of TensorRT-LLM's tools,
or under ``prompt``, ``text_input`` or ``text``; and, if it says how long the answer is to be, a
text under ``output``, ``completion`` or ``response``, or a number under ``output_tokens`` or
``max_tokens``.
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
    """A prompt, and the answer or the length of it that the data set has for it."""

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
        raise UsageError(
            f"{path} is not UTF-8 text (byte {error.start})", mend="save it as UTF-8"
        ) from None
    samples = _parse(path, text)
    if not samples:
        raise UsageError(f"{path} holds no prompts")
    return samples


def _parse(path: Path, text: str) -> list[Sample]:
    if _LIST.match(text) or _is_list(text):
        content = _json(text, f"{path}")
        return [_sample(entry, f"{path}, entry {at}") for at, entry in enumerate(content, 1)]
    lines = [(at, line) for at, line in enumerate(text.split("\n"), 1) if line.strip()]
    if lines and _OBJECT.match(lines[0][1]):
        places = ((f"{path}, line {at}", line) for at, line in lines)
        return [_sample(_json(line, place), place) for place, line in places]
    return [Sample(line.rstrip("\r")) for _, line in lines]


def _is_list(text: str) -> bool:
    # Without a text or an object in front it may as well be a prompt: "[1] is a footnote".
    try:
        return isinstance(json.loads(text), list)
    except (ValueError, RecursionError):
        return False


def _json(text: str, place: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UsageError(
            f"{place} is no JSON ({error})",
            mend="give a JSON list of objects, an object a line, or a prompt a line",
        ) from None


def _sample(entry: Any, place: str) -> Sample:
    if isinstance(entry, str):
        return Sample(entry)
    if not isinstance(entry, dict):
        raise UsageError(f"{place} is no object", mend="give objects with input and output")
    prompt = _text(entry, _PROMPT, place)
    if prompt is None:
        raise UsageError(
            f"{place} has no prompt: its keys are {', '.join(entry) or 'none'}",
            mend=f"name it {', '.join(_PROMPT[:-1])} or {_PROMPT[-1]}",
        )
    instruction = _text(entry, ("instruction",), place)
    return Sample(
        f"{prompt} {instruction}" if instruction else prompt,
        _text(entry, _ANSWER, place),
        _length(entry, place),
    )


def _text(entry: Mapping[str, Any], names: tuple[str, ...], place: str) -> str | None:
    for name in names:
        value = entry.get(name)
        if isinstance(value, str):
            return value
        if value is not None:
            raise UsageError(f"{place}: {name} is no text")
    return None


def _length(entry: Mapping[str, Any], place: str) -> int | None:
    for name in _LENGTH:
        value = entry.get(name)
        if value is None:
            continue
        if isinstance(value, int) and not isinstance(value, bool) and value > 0:
            return value
        raise UsageError(f"{place}: {name} is no number above 0")
    return None
