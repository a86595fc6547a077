"""Tools that an answer may call: how a model is shown them, and the calls that it makes."""

from __future__ import annotations

import json
import re
import secrets
import string
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from llmserve.client.results import Completion, ToolCall
from llmserve.errors import OptionError
from llmserve.tools import ToolPart, ToolReader

MOST = 128
"""How many tools can be offered, and called by one answer."""
_OPTIONS = ("tools", "tool_choice", "parallel_tool_calls")
_NAME = re.compile(r"[\w.\-]{1,64}")
_LETTERS = string.ascii_letters + string.digits
_FORMS = ("json_schema", "json_object", "choice", "regex", "grammar")
# A call is written for a program: white space that no model needs would only take tokens.
_TIGHT = {"x-guidance": {"whitespace_pattern": "", "item_separator": ", ", "key_separator": ": "}}
# With these an object may have properties that it does not name beside them.
_MORE = {"$ref", "allOf", "anyOf", "oneOf", "patternProperties"}

Choice = Literal["auto", "required"]


class ToolsError(OptionError):
    """Tools that cannot be offered so; ``param`` is the option that says it."""

    def __init__(self, problem: str, param: str = "tools", *, mend: str | None = None) -> None:
        super().__init__(problem, mend=mend)
        self.param = param


@dataclass(frozen=True)
class Tools:
    """What an answer may call, or has to: any tool, or the one that is ``named``."""

    functions: tuple[Mapping[str, Any], ...]
    choice: Choice = "auto"
    named: str | None = None
    parallel: bool = True

    @classmethod
    def of(cls, options: Mapping[str, Any]) -> Tools | None:
        """Read the tools of a request as OpenAI has them; None where nothing may be called."""
        told, choice = options.get("tools") or [], options.get("tool_choice")
        if not isinstance(told, (list, tuple)):
            raise ToolsError("tools has to be a list")
        functions = [_function(one, f"tools[{at}]", "tools") for at, one in enumerate(told)]
        named = None
        if isinstance(choice, Mapping):
            named = _function(choice, "tool_choice", "tool_choice").get("name", "")
            choice = "required"
        parallel = options.get("parallel_tool_calls")
        if parallel not in (None, True, False):
            what = "parallel_tool_calls has to be true or false"
            raise ToolsError(what, "parallel_tool_calls")
        tools = cls.checked(functions, choice, named, parallel=parallel is not False)
        if tools and not options.get("messages"):
            raise ToolsError("tools go with messages")
        return tools

    @classmethod
    def checked(
        cls, functions: Sequence[Any], choice: Any, named: Any, *, parallel: bool
    ) -> Tools | None:
        """Check what may be called and what has to be, ``named`` if that is one function."""
        choice = choice or ("auto" if functions else "none")
        if choice not in ("none", "auto", "required"):
            what = "tool_choice has to be none, auto, required, or name a function"
            raise ToolsError(what, "tool_choice")
        names = [_name(one, f"tools[{at}]") for at, one in enumerate(functions)]
        if len(set(names)) < len(names) or len(names) > MOST:
            raise ToolsError(f"at most {MOST} tools can be offered, each with a name of its own")
        if choice == "required" and not functions:
            raise ToolsError("tool_choice wants a call, and there are no tools", "tool_choice")
        if choice == "required" and named not in (None, *names):
            raise ToolsError(f"tool_choice names {named!r:.80}, which is no tool", "tool_choice")
        if choice == "none" or not functions:
            return None
        return cls(tuple(functions), choice, named, parallel)

    @property
    def names(self) -> frozenset[str]:
        return frozenset({self.named} if self.named else {one["name"] for one in self.functions})

    @property
    def held(self) -> bool:
        """Whether the answer has to be a call."""
        return self.choice == "required"

    def options(self, options: Mapping[str, Any]) -> dict[str, Any]:
        """Return the options of a request with these tools, for models to be asked with."""
        if form := next((form for form in _FORMS if options.get(form)), None):
            raise ToolsError(
                f"tools do not go with an answer held to a form ({form})", mend="leave out one"
            )
        kwargs = options.get("chat_template_kwargs") or {}
        if not isinstance(kwargs, Mapping):
            raise ToolsError("beside tools, chat_template_kwargs has to be a mapping")
        tools = [{"type": "function", "function": one} for one in self.functions]
        asked = {name: value for name, value in options.items() if name not in _OPTIONS}
        asked["chat_template_kwargs"] = {**kwargs, "tools": tools}
        if self.held:
            asked["json_schema"] = json.dumps({**self._schema(), **_TIGHT})
        return asked

    def read_held(self, answer: Completion) -> Completion:
        """Return an answer that had to be a call with its calls; one that was cut is text."""
        try:
            told = json.loads(answer.text)
        except ValueError:
            return answer
        found = [{"name": self.named, "arguments": told}] if self.named else told
        calls = []
        for index, call in enumerate(found):
            arguments = json.dumps(call["arguments"], ensure_ascii=False)
            calls.append(ToolCall(index, arguments, new_id(), call["name"]))
        reason = reason_with(calls, answer.finish_reason)
        return replace(answer, text="", tool_calls=tuple(calls), finish_reason=reason)

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


def shown_tools(options: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the options of a request as the model takes them, with its tools in their places."""
    if tools := Tools.of(options):
        return tools.options(options)
    return {name: value for name, value in options.items() if name not in _OPTIONS}


def new_id() -> str:
    """Return an id for a call."""
    # Mistral's templates take these nine characters and nothing else.
    return "".join(secrets.choice(_LETTERS) for _ in range(9))


def read_calls(reader: ToolReader, answer: Completion, *, parallel: bool = True) -> Completion:
    """Return what is text of a whole answer, and its calls; one that does not end is text."""
    texts: list[str] = []
    calls: list[ToolCall] = []
    begun: list[ToolPart] = []

    def no_call() -> None:
        texts.extend(part.source for part in begun)
        begun.clear()

    for part in (*reader.read(answer.text), *reader.end()):
        if part.kind == "text":
            no_call()
            texts.append(part.text)
            continue
        if part.kind == "name":
            no_call()
        begun.append(part)
        if part.kind == "end":
            arguments = "".join(one.text for one in begun if one.kind == "arguments")
            calls.append(ToolCall(len(calls), arguments, new_id(), begun[0].text))
            begun.clear()
    no_call()
    text = "".join(texts)
    return replace(
        answer,
        text=text.rstrip() if calls else text,
        finish_reason=reason_with(calls, answer.finish_reason),
        tool_calls=tuple(calls if parallel else calls[:1]),
    )


def reason_with(calls: Any, reason: str | None) -> str | None:
    """Return why an answer ended that has calls, or has none."""
    return "tool_calls" if calls and reason == "stop" else reason


def _function(told: Any, where: str, param: str) -> Mapping[str, Any]:
    """Take a function as chats have it or, a level less deep, as responses do."""
    kind = told.get("type", "function") if isinstance(told, Mapping) else None
    function = told.get("function", told) if kind == "function" else None
    if not isinstance(function, Mapping):
        raise ToolsError(
            f"{where} has to be a function, not {str(kind)[:40]!r}",
            param,
            mend='write {"type": "function", "function": {"name": …, "parameters": …}}',
        )
    return {name: part for name, part in function.items() if name != "type"}


def _name(function: Any, where: str) -> str:
    name = function.get("name") if isinstance(function, Mapping) else None
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise ToolsError(
            f"{where} has to have a name of letters, digits, '_', '-' and '.', at most 64"
        )
    if not isinstance(function.get("parameters") or {}, Mapping):
        raise ToolsError(f"{where}: the parameters of {name!r} are no schema")
    return name


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
