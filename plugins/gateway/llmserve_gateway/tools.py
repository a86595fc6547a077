"""The tools that an answer may call, and the form of one that has to."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from llmserve_gateway.errors import bad_request

MOST = 128
_FORMS = ("json_schema", "json_object", "choice", "regex", "grammar")
# A call is written for a program: white space that no model needs would only take tokens.
_TIGHT = {"x-guidance": {"whitespace_pattern": "", "item_separator": ", ", "key_separator": ": "}}
# With these an object may have properties that it does not name beside them.
_MORE = {"$ref", "allOf", "anyOf", "oneOf", "patternProperties"}

Choice = Literal["auto", "required"]


@dataclass(frozen=True)
class Tools:
    """What an answer may call, or has to: any tool, or the one that is ``named``."""

    functions: tuple[Mapping[str, Any], ...]
    choice: Choice = "auto"
    named: str | None = None
    parallel: bool = True

    @property
    def names(self) -> frozenset[str]:
        return frozenset({self.named} if self.named else {one["name"] for one in self.functions})

    @property
    def held(self) -> bool:
        """Whether the answer has to be a call."""
        return self.choice == "required"

    def options(self, options: Mapping[str, Any]) -> dict[str, Any]:
        """Return the options of a request with these tools, for models to be asked with."""
        if form := next((form for form in _FORMS if form in options), None):
            raise bad_request(
                f"tools do not go with an answer held to a form ({form}): leave out one", "tools"
            )
        tools = [{"type": "function", "function": one} for one in self.functions]
        told = {**(options.get("chat_template_kwargs") or {}), "tools": tools}
        options = {**options, "chat_template_kwargs": told}
        return (
            {**options, "json_schema": json.dumps({**self._schema(), **_TIGHT})}
            if self.held
            else options
        )

    def _schema(self) -> Any:
        """Return the form of an answer that has to be a call: its arguments, or a list of calls."""
        functions = {one["name"]: _parameters(one) for one in self.functions}
        if self.named:
            return functions[self.named]
        # Each keeps its own definitions, under a name, so what refers to them is told where.
        places = {name: f"#/$defs/{at}" for at, name in enumerate(functions)}
        calls = [
            {
                "type": "object",
                "properties": {"name": {"const": name}, "arguments": {"$ref": place}},
                "required": ["name", "arguments"],
                "additionalProperties": False,
            }
            for name, place in places.items()
        ]
        return {
            "type": "array",
            "items": {"anyOf": calls},
            "minItems": 1,
            "maxItems": MOST if self.parallel else 1,
            "$defs": {
                place.rpartition("/")[2]: _moved(functions[name], place)
                for name, place in places.items()
            },
        }


def _parameters(function: Mapping[str, Any]) -> dict[str, Any]:
    """Return the schema of a function's arguments: those that it names, if it names some."""
    schema = {"type": "object", **(function.get("parameters") or {"properties": {}})}
    if "properties" in schema and not _MORE & schema.keys():
        # Small models go on with arguments that nobody asked for.
        schema.setdefault("additionalProperties", False)
    return schema


def _moved(schema: Any, place: str) -> Any:
    """Return a schema for another place: what refers into it is told where it is."""
    if isinstance(schema, list):
        return [_moved(part, place) for part in schema]
    if not isinstance(schema, dict):
        return schema
    moved = {name: _moved(part, place) for name, part in schema.items()}
    where = schema.get("$ref")
    if isinstance(where, str) and where.startswith("#"):
        moved["$ref"] = place + where[1:]
    return moved
