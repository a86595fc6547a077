"""The tools of a request: checked, and added to its options in the form that models accept."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from llmserve.contract.options import FORMS
from llmserve.errors import OptionError

MAX_TOOLS = 128
"""The maximum number of tools in a request, and of tool calls in an answer."""
_OPTIONS = ("tools", "tool_choice", "parallel_tool_calls")
_FORM_NAMES = frozenset(form.name for form in FORMS)
_NAME = re.compile(r"[\w.\-]{1,64}")
# Calls are read by programs: white space would only cost tokens.
_COMPACT = {"x-guidance": {"whitespace_pattern": "", "item_separator": ", ", "key_separator": ": "}}
# A schema with one of these keywords may allow properties that "properties" does not list.
_OPEN_KEYWORDS = {"$ref", "allOf", "anyOf", "oneOf", "patternProperties"}

Choice = Literal["auto", "required"]


class ToolsError(OptionError):
    """Invalid tools of a request; ``param`` is the option that is wrong."""

    def __init__(self, problem: str, param: str = "tools", *, hint: str | None = None) -> None:
        super().__init__(problem, hint=hint)
        self.param = param


@dataclass(frozen=True)
class Tools:
    """The tools that an answer may or must call: any of them, or only the ``named`` one."""

    functions: tuple[Mapping[str, Any], ...]
    choice: Choice = "auto"
    named: str | None = None
    parallel: bool = True
    allowed: frozenset[str] | None = None
    """The names of those that may be called, if not all that the model is shown."""

    @classmethod
    def of(cls, options: Mapping[str, Any]) -> Tools | None:
        """Read a request's tools in OpenAI's format; None if the answer may not call any."""
        specs, choice = options.get("tools") or [], options.get("tool_choice")
        if not isinstance(specs, (list, tuple)):
            raise ToolsError("tools must be a list")
        functions = [_function(spec, f"tools[{i}]", "tools") for i, spec in enumerate(specs)]
        named, allowed = None, None
        if isinstance(choice, Mapping) and choice.get("type") == "allowed_tools":
            choice, allowed = _allowed(choice)
        elif isinstance(choice, Mapping):
            named = _function(choice, "tool_choice", "tool_choice").get("name", "")
            choice = "required"
        parallel = options.get("parallel_tool_calls")
        if parallel not in (None, True, False):
            raise ToolsError("parallel_tool_calls must be true or false", "parallel_tool_calls")
        several = parallel is not False
        tools = cls.checked(functions, choice, named, parallel=several, allowed=allowed)
        if tools and not options.get("messages"):
            raise ToolsError("tools can only be used with messages")
        return tools

    @classmethod
    def checked(
        cls,
        functions: Sequence[Any],
        choice: Any,
        named: Any,
        *,
        parallel: bool,
        allowed: frozenset[str] | None = None,
    ) -> Tools | None:
        """Check the tools and the choice; ``named`` is the function that must be called, if any."""
        choice = choice or ("auto" if functions else "none")
        if choice not in ("none", "auto", "required"):
            problem = "tool_choice must be none, auto, required, or name a function"
            raise ToolsError(problem, "tool_choice")
        names = [_name(function, f"tools[{i}]") for i, function in enumerate(functions)]
        if len(set(names)) < len(names) or len(names) > MAX_TOOLS:
            raise ToolsError(f"at most {MAX_TOOLS} tools are allowed, each with a unique name")
        if choice == "required" and not functions:
            raise ToolsError("tool_choice requires a call, but there are no tools", "tool_choice")
        if choice == "required" and named not in (None, *names):
            raise ToolsError(f"tool_choice names {named!r:.80}, which is not a tool", "tool_choice")
        if unknown := (allowed or frozenset()) - set(names):
            problem = f"tool_choice allows {min(unknown)!r:.80}, which is not a tool"
            raise ToolsError(problem, "tool_choice")
        if choice == "none" or not functions:
            return None
        return cls(tuple(functions), choice, named, parallel, allowed)

    @property
    def allowed_functions(self) -> tuple[Mapping[str, Any], ...]:
        """The functions that the answer may call; the model may be shown more."""
        allowed = frozenset([self.named]) if self.named else self.allowed
        return tuple(f for f in self.functions if allowed is None or f["name"] in allowed)

    @property
    def names(self) -> frozenset[str]:
        return frozenset(function["name"] for function in self.allowed_functions)

    @property
    def strict(self) -> bool:
        """Whether the arguments of calls must match the schemas of their functions."""
        return any(function.get("strict") is True for function in self.allowed_functions)

    @property
    def required(self) -> bool:
        """Whether the answer must be a call."""
        return self.choice == "required"

    def options(self, options: Mapping[str, Any]) -> dict[str, Any]:
        """Return a request's options in the form that models accept, with these tools."""
        kwargs = options.get("chat_template_kwargs") or {}
        if not isinstance(kwargs, Mapping):
            raise ToolsError("with tools, chat_template_kwargs must be a mapping")
        tools = [{"type": "function", "function": function} for function in self.functions]
        model_options = {name: value for name, value in options.items() if name not in _OPTIONS}
        model_options["chat_template_kwargs"] = {**kwargs, "tools": tools}
        if self.required:
            # Such an answer is a call and nothing else, whose form that of other answers is not.
            model_options = {n: v for n, v in model_options.items() if n not in _FORM_NAMES}
            model_options["json_schema"] = json.dumps({**self._schema(), **_COMPACT})
        return model_options

    def schema_of_call(self) -> str:
        """Return the schema of a call that the model makes on its own, or of a list of calls.

        Functions that are not ``strict`` take any object.
        """
        calls = self._schema(strict_only=True)
        return json.dumps({"anyOf": [calls["items"], calls], "$defs": calls["$defs"]})

    def _schema(self, *, strict_only: bool = False) -> Any:
        """Return the schema of a required call: the named function's arguments, or a call list."""
        schemas = {
            function["name"]: _parameters(function)
            if not strict_only or function.get("strict") is True
            else {"type": "object"}
            for function in self.allowed_functions
        }
        if self.named:
            return schemas[self.named]
        # Each schema moves into $defs with its own definitions, so its references are rewritten.
        places = {name: f"#/$defs/{i}" for i, name in enumerate(schemas)}
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
            "maxItems": MAX_TOOLS if self.parallel else 1,
            "$defs": {
                place.rpartition("/")[2]: _relocate(schemas[name], place)
                for name, place in places.items()
            },
        }


def apply_tools(options: Mapping[str, Any], tools: Tools | None) -> dict[str, Any]:
    """Return a request's options in the form that models accept, with its tools if it has any."""
    if tools:
        return tools.options(options)
    return {name: value for name, value in options.items() if name not in _OPTIONS}


def _function(spec: Any, where: str, param: str) -> Mapping[str, Any]:
    """Read a function in the format of chat completions or, one level flatter, of responses."""
    kind = spec.get("type", "function") if isinstance(spec, Mapping) else None
    function = spec.get("function", spec) if kind == "function" else None
    if not isinstance(function, Mapping):
        raise ToolsError(
            f"{where} must be a function, not {str(kind)[:40]!r}",
            param,
            hint='use {"type": "function", "function": {"name": …, "parameters": …}}',
        )
    return {name: value for name, value in function.items() if name != "type"}


def _allowed(choice: Mapping[str, Any]) -> tuple[Any, frozenset[str]]:
    """Read a choice among some of the tools: how it is made, and their names."""
    # Chats nest it one level deeper than responses.
    content = choice.get("allowed_tools", choice)
    specs = content.get("tools") if isinstance(content, Mapping) else None
    if not isinstance(specs, (list, tuple)) or not specs:
        raise ToolsError("tool_choice must list the allowed tools", "tool_choice")
    names = [_function(s, f"tool_choice.tools[{i}]", "tool_choice") for i, s in enumerate(specs)]
    return content.get("mode", "auto"), frozenset(str(each.get("name", "")) for each in names)


def _name(function: Any, where: str) -> str:
    name = function.get("name") if isinstance(function, Mapping) else None
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise ToolsError(f"{where} needs a name of at most 64 letters, digits, '_', '-' and '.'")
    if not isinstance(function.get("parameters") or {}, Mapping):
        raise ToolsError(f"{where}: the parameters of {name!r} are not a schema")
    return name


def _parameters(function: Mapping[str, Any]) -> dict[str, Any]:
    """Return the schema of a function's arguments, closed if the function lists them all."""
    schema = {"type": "object", **(function.get("parameters") or {"properties": {}})}
    if "properties" in schema and not _OPEN_KEYWORDS & schema.keys():
        # Small models would add arguments that do not exist.
        schema.setdefault("additionalProperties", False)
    return schema


def _relocate(schema: Any, place: str) -> Any:
    """Return a schema with its references rewritten for another place in a document."""
    if isinstance(schema, list):
        return [_relocate(item, place) for item in schema]
    if not isinstance(schema, dict):
        return schema
    moved = {name: _relocate(part, place) for name, part in schema.items()}
    reference = schema.get("$ref")
    if isinstance(reference, str) and reference.startswith("#"):
        moved["$ref"] = place + reference[1:]
    return moved
