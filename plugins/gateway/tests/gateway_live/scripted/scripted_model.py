"""A plugin with a scripted model: it answers with the text that the last message prescribes."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from llmserve.plugin import Generator, Recipe, ToolParser, ToolPart, hookimpl
from llmserve.runtime import Generation, RequestError, Tokenizer

START, END = "Say this: ", "<over>"
_STEP = 0.004


class Scripted:
    """A generator that answers with the text between two marks in its prompt, or fails so."""

    context_length = 4096
    eos_ids = frozenset({0})

    def __init__(self, settings: Mapping[str, Any], folder: Path) -> None:
        del settings, folder

    def generate(self, generations: Sequence[Generation], tokenizer: Tokenizer) -> None:
        for generation in generations:
            prompt = tokenizer.decode(generation.prompt_ids)
            script = prompt.rpartition(START)[2].partition(END)[0]
            if script == "fail":
                raise RuntimeError("as scripted")
            if script.startswith("refuse "):
                raise RequestError("as scripted", code=script.split()[-1], param="top_k")
            for token in (*tokenizer.encode(script, special=False), 0):
                # Pieces that come within a moment are sent together.
                time.sleep(_STEP)
                generation.push(token)


class Shouts:
    """Reads ``NAME!`` as a call without arguments, a format of no other parser."""

    def __init__(self, names: frozenset[str]) -> None:
        self._names = names
        self._text = ""

    def read(self, text: str) -> list[ToolPart]:
        self._text += text
        return []

    def end(self) -> list[ToolPart]:
        name = self._text.removesuffix("!")
        if name not in self._names:
            return [ToolPart("text", self._text)]
        return [ToolPart("name", name), ToolPart("arguments", "{}"), ToolPart("end")]


@hookimpl
def llmserve_register_generators() -> Sequence[Generator]:
    return [
        Generator(
            name="scripted",
            summary="Answers as scripted",
            runtime="scripted_model:Scripted",
            source=None,
        )
    ]


@hookimpl
def llmserve_register_recipes() -> Sequence[Recipe]:
    return [Recipe(name="scripted", summary="Answers as scripted", generator="scripted")]


@hookimpl
def llmserve_register_tool_parsers() -> Sequence[ToolParser]:
    shouts = ToolParser(
        name="shouts",
        summary="NAME!",
        reader=Shouts,
        suits=lambda template: 99 * ("shout" in template),
    )
    return [shouts]
