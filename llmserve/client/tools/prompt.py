"""Tools in plain messages, for models whose chat template has no place for them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from llmserve.client.tools.request import Tools

TOOLS_PLACE = "{tools}"
"""Where a prompt lists the functions, each as a line with its signature."""
_LIST = "You can call these functions:\n{tools}"
# Most models that can call anything have seen this format, and it can follow other text.
_HOW = (
    "To call one, write a line like this, and nothing after your last call:\n"
    '<tool_call>{"name": NAME, "arguments": {PARAMETER: VALUE}}</tool_call>\n'
    "You then get the results. If no function helps, answer in plain words."
)
# Deeper objects, and those that contain themselves, are not written out.
_MAX_DEPTH = 5
_MAX_LENGTH = 20_000


def needs_tools(messages: Any) -> bool:
    """Return whether a conversation has tool calls or their results."""
    return isinstance(messages, (list, tuple)) and any(
        _is_result(message) or (isinstance(message, Mapping) and message.get("tool_calls"))
        for message in messages
    )


def with_tools_in_messages(
    options: Mapping[str, Any], tools: Tools | None, prompt: str = ""
) -> dict[str, Any]:
    """Return a request's options with tools, earlier calls and their results as plain text.

    ``prompt`` replaces the usual text that explains the tools; it contains :data:`TOOLS_PLACE`.
    """
    messages = _plain(options.get("messages") or [])
    if tools:
        messages = _with_text(messages, _explain(tools, prompt))
    result = {**options, "messages": messages}
    kwargs = dict(result.pop("chat_template_kwargs", None) or {})
    kwargs.pop("tools", None)
    return {**result, "chat_template_kwargs": kwargs} if kwargs else result


def _explain(tools: Tools, prompt: str) -> str:
    functions = [f for f in tools.functions if f["name"] in tools.names]
    text = (prompt or _LIST).replace(TOOLS_PLACE, "\n".join(map(signature, functions)))
    if not tools.required:
        return text if prompt else f"{text}\n{_HOW}"
    # Nothing about the form: the answer is constrained to it.
    return f"{text}\nCall {tools.named or 'one of them'} now."


def signature(function: Mapping[str, Any]) -> str:
    """Describe a function in one line, with a fourth of the tokens of its JSON schema."""
    about = _one_line(function.get("description"))
    parameters = _Types(function.get("parameters") or {}).written
    return f"- {function['name']}({parameters})" + (f": {about}" if about else "")


class _Types:
    """Writes the types in a schema as TypeScript does; what does not fit into that is ``any``."""

    def __init__(self, schema: Mapping[str, Any]) -> None:
        self._places = schema.get("$defs") or schema.get("definitions")
        # A short schema can stand for a text without end: its parts may refer to one another.
        self._left = _MAX_LENGTH
        self.written = self._fields(schema, 0)

    def _fields(self, schema: Mapping[str, Any], depth: int) -> str:
        properties, required = schema.get("properties"), schema.get("required")
        if not isinstance(properties, Mapping):
            return ""
        required = required if isinstance(required, (list, tuple)) else ()
        # What is read again for every reference to it counts as well, though not all is written.
        self._left -= len(required)
        required = frozenset(name for name in required if isinstance(name, str))
        fields = []
        for name, part in properties.items():
            if self._left < 0:
                fields.append("…")
                break
            about = part.get("description") if isinstance(part, Mapping) else ""
            about = about if isinstance(about, str) else ""
            self._left -= len(name) + len(about)
            about = f" ({about})" if (about := _one_line(about)) else ""
            mark = "" if name in required else "?"
            fields.append(f"{name}{mark}: {self._type(part, depth)}{about}")
        return ", ".join(fields)

    def _type(self, schema: Any, depth: int) -> str:
        if not isinstance(schema, Mapping) or depth > _MAX_DEPTH or self._left < 0:
            return "any"
        self._left -= 1
        if isinstance(reference := schema.get("$ref"), str) and isinstance(self._places, Mapping):
            self._left -= len(reference)
            return self._type(self._places.get(reference.rpartition("/")[2]), depth + 1)
        values = [schema["const"]] if "const" in schema else schema.get("enum")
        if isinstance(values, (list, tuple)):
            return self._joined(map(_dump, values))
        return self._type_of_kind(schema, schema.get("type"), depth)

    def _type_of_kind(self, schema: Mapping[str, Any], kind: Any, depth: int) -> str:
        """Write a type whose schema is for several kinds of value, as far as it is for one."""
        if depth > _MAX_DEPTH:
            return "any"
        if isinstance(kind, (list, tuple)):
            return self._joined(self._type_of_kind(schema, k, depth + 1) for k in kind)
        several = schema.get("anyOf") or schema.get("oneOf")
        if isinstance(several, (list, tuple)):
            return self._joined(self._type(part, depth + 1) for part in several)
        if kind == "array":
            item = self._type(schema.get("items"), depth + 1)
            return f"({item})[]" if " | " in item else f"{item}[]"
        if kind == "object" or "properties" in schema:
            fields = self._fields(schema, depth + 1)
            return f"{{{fields}}}" if fields else "object"
        self._left -= len(kind) if isinstance(kind, str) else 0
        return kind if isinstance(kind, str) else "any"

    def _joined(self, types: Iterable[str]) -> str:
        different: dict[str, None] = {}
        for text in types:
            different[text] = None
            self._left -= len(text) + 1  # Equal ones take time, too.
            if self._left < 0:
                break
        return " | ".join(different)


def _one_line(text: Any) -> str:
    return " ".join(text.split()) if isinstance(text, str) else ""


def _plain(messages: Sequence[Any]) -> list[Any]:
    """Return a conversation without calls and results, which becomes text of the same turns."""
    plain: list[Any] = []
    contents: list[list[Any]] = []
    after_result = False
    for message in messages:
        turn, is_result = _plain_turn(message), _is_result(message)
        if after_result and _role(turn) == "user":
            # Many templates insist on turns that alternate.
            contents[-1].append(turn.get("content"))
            plain[-1] = turn
        else:
            contents.append([turn.get("content")] if isinstance(turn, Mapping) else [])
            plain.append(turn)
        after_result = is_result
    return [
        {**turn, "content": _in_turn(own)} if len(own) > 1 else turn
        for turn, own in zip(plain, contents, strict=True)
    ]


def _in_turn(contents: Sequence[Any]) -> str | list[Any]:
    """Return contents of one turn as one; texts before the first image are one part."""
    first = next((i for i, content in enumerate(contents) if _shows_image(content)), len(contents))
    before = [_joined("\n", *contents[:first])] if first else []
    return _joined("\n", *before, *contents[first:])


def _plain_turn(message: Any) -> Any:
    if _is_result(message):
        content = message.get("content")
        text = _joined("\n", "<tool_response>", content, "</tool_response>")
        return {"role": "user", "content": text}
    calls = message.get("tool_calls") if isinstance(message, Mapping) else None
    if not isinstance(calls, (list, tuple)) or not calls:
        return message
    texts = [_text(message.get("content")), *map(_call, calls)]
    return {"role": "assistant", "content": "\n".join(filter(None, texts))}


def _with_text(messages: list[Any], text: str) -> list[Any]:
    """Add a text to the system message; not every template has one, so else to the first turn."""
    for index, message in enumerate(messages):
        role = _role(message)
        if role in ("system", "user"):
            content = message.get("content") or None
            parts = (content, text) if role == "system" else (text, content)
            changed = {**message, "content": _joined("\n\n", *filter(None, parts))}
            return [*messages[:index], changed, *messages[index + 1 :]]
    return [{"role": "user", "content": text}, *messages]


def _role(message: Any) -> Any:
    return message.get("role") if isinstance(message, Mapping) else None


def _is_result(message: Any) -> bool:
    return _role(message) in ("tool", "function")


def _call(call: Any) -> str:
    function = call.get("function") if isinstance(call, Mapping) else None
    function = function if isinstance(function, Mapping) else {}
    name, arguments = _dump(function.get("name")), function.get("arguments")
    written = arguments if isinstance(arguments, str) else _dump(arguments or {})
    return f'<tool_call>{{"name": {name}, "arguments": {written}}}</tool_call>'


def _joined(separator: str, *contents: Any) -> str | list[Any]:
    """Return contents as one: a text, or parts if some are images."""
    if not any(map(_shows_image, contents)):
        return separator.join(map(_text, contents))
    parts: list[Any] = []
    for content in contents:
        parts += [{"type": "text", "text": separator}] if parts else []
        is_list = isinstance(content, (list, tuple))
        parts += content if is_list else [{"type": "text", "text": _text(content)}]
    return parts


def _shows_image(content: Any) -> bool:
    return isinstance(content, (list, tuple)) and {"type": "image"} in content


def _text(content: Any) -> str:
    if isinstance(content, (list, tuple)):
        parts = [part.get("text") for part in content if isinstance(part, Mapping)]
        return "".join(part for part in parts if isinstance(part, str))
    return "" if content is None else str(content)


def _dump(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)
