"""Messages of a conversation: what they may be, and what chat templates are given of them."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from llmserve.runtime.contract import IMAGE_URL, OPTIONS, BoundedJson
from llmserve_gateway.bodies import check_depth
from llmserve_gateway.errors import bad_request
from llmserve_gateway.fields import STRING
from llmserve_gateway.image_hosts import is_address

ROLES = {"developer": "system", "system": "system", "user": "user", "assistant": "assistant",
          "tool": "tool", "function": "tool"}  # fmt: skip
# What it has inside is left to the model, which knows what it reads.
_DATA_URL = re.compile(r"data:image/[a-z0-9.+-]{1,32};base64,[A-Za-z0-9+/]+={0,2}")

# Each API has its own types of parts: text, input_text, tool_use.
_PART = {
    "type": "object",
    "required": ["type"],
    "properties": {"type": STRING, "text": STRING},
}
_CALL = {
    "type": "object",
    "required": ["function"],
    "properties": {"function": {"type": "object", "required": ["name"], "properties": {
        "name": STRING, "arguments": {"type": ["string", "object"]}}}},
}  # fmt: skip
CONTENT: Mapping[str, Any] = {"anyOf": [STRING, {"type": "array", "items": _PART}]}


@dataclass(frozen=True, eq=False)
class Conversation:
    """Messages in the form that chat templates expect, and the images that they show."""

    messages: list[dict[str, Any]]
    images: list[str]

    @property
    def options(self) -> dict[str, Any]:
        images = {IMAGE_URL.name: self.images} if self.images else {}
        return {"messages": self.messages, **images}


def list_of(*items: Mapping[str, Any]) -> dict[str, Any]:
    """Return the schema of a list that has at least one of these."""
    return {"type": "array", "minItems": 1, "items": {"anyOf": [*items]}}


def message_schema(
    *, required: Sequence[str], content: Any, roles: Sequence[str] = tuple(ROLES), **more: Any
) -> dict[str, Any]:
    fields = {"role": {"enum": list(roles)}, "content": content, **more}
    return {"type": "object", "required": ["role", *required], "properties": fields}


# A message of the assistant that only calls functions has no content.
MESSAGES = list_of(
    message_schema(required=["content"], content=CONTENT),
    message_schema(
        required=[],
        roles=["assistant"],
        content={"anyOf": [CONTENT, {"type": "null"}]},
        tool_calls={"type": ["array", "null"], "items": _CALL},
    ),
)


def read_messages(value: Any, name: str = "messages") -> Conversation:
    """Read a conversation of OpenAI's chats."""
    if not isinstance(value, list) or not value:
        raise bad_request(f"{name} must be a list with at least one message", name)
    images: list[str] = []
    arguments = BoundedJson()
    messages = [
        _message(each, f"{name}[{index}]", images, arguments) for index, each in enumerate(value)
    ]
    most = int(OPTIONS[IMAGE_URL.name].high)
    if len(images) > most:
        raise bad_request(f"{name} has {len(images)} images: send at most {most}", name)
    return Conversation(messages, images)


def _message(message: Any, where: str, images: list[str], arguments: BoundedJson) -> dict[str, Any]:
    role = message.get("role") if isinstance(message, dict) else None
    if not isinstance(role, str) or role not in ROLES:
        raise bad_request(f"{where}.role must be one of {', '.join(ROLES)}", where)
    content, calls = message.get("content"), message.get("tool_calls")
    result: dict[str, Any] = {"role": ROLES[role], "content": None}
    if role == "assistant" and calls:
        if not isinstance(calls, list):
            raise bad_request(f"{where}.tool_calls must be a list", where)
        result["tool_calls"] = [
            _call(call, f"{where}.tool_calls[{index}]", arguments)
            for index, call in enumerate(calls)
        ]
    elif content is None and role == "assistant":
        content = ""
    if content is not None or "tool_calls" not in result:
        result["content"] = _read_content(content, f"{where}.content", images)
    if role == "assistant":
        result |= _thoughts(message, result)
    names = ("tool_call_id", "name") if result["role"] == "tool" else ()
    return result | {name: message[name] for name in names if isinstance(message.get(name), str)}


def _thoughts(message: Mapping[str, Any], result: Mapping[str, Any]) -> dict[str, str]:
    """Return what the model thought in an earlier turn, by the names that templates use."""
    thoughts = message.get("reasoning_content") or message.get("reasoning")
    if not isinstance(thoughts, str):
        return {}
    # gpt-oss's template refuses it beside a text and calls, and ignores it without calls.
    both = result["content"] and "tool_calls" in result
    return {"reasoning_content": thoughts} | ({} if both else {"thinking": thoughts})


def _call(call: Any, where: str, reader: BoundedJson) -> dict[str, Any]:
    """Return an earlier tool call for the chat template, with its arguments as an object."""
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise bad_request(f"{where} must be a function call", where)
    name, arguments = function["name"], function.get("arguments")
    try:
        parsed = reader.parse(arguments or "{}") if isinstance(arguments, str) else arguments
        why = ""
    except (ValueError, RecursionError) as error:
        parsed, why = None, f" ({error})"
    if not isinstance(parsed, dict):
        what = f"{where}: the arguments of {name!r:.80} are not a JSON object{why:.200}"
        raise bad_request(what, where)
    check_depth(parsed)
    result = {"type": "function", "function": {"name": name, "arguments": parsed}}
    return {"id": call["id"], **result} if isinstance(call.get("id"), str) else result


def read_text(content: Any, where: str) -> str:
    """Return a message's text, which may be split into parts."""
    if isinstance(content, str):
        return content
    return "".join(_part_text(part, where) for part in _parts(content, where))


def _parts(content: Any, where: str) -> list[Any]:
    if not isinstance(content, list):
        raise bad_request(f"{where} must be a string or a list of parts", where)
    return content


def _part_text(part: Any, where: str) -> str:
    kind = part.get("type") if isinstance(part, dict) else None
    text = part.get("text") if kind in ("text", "input_text", "output_text") else None
    if not isinstance(text, str):
        what = f"{where} has a part of type {str(kind)[:40]!r}: only text"
        raise bad_request(f"{what} and images are supported", where)
    return text


def _read_content(content: Any, where: str, images: list[str]) -> str | list[dict[str, str]]:
    """Return a message's text, or its parts if some are images, which are put into a list."""
    is_image = [_is_image(part) for part in content] if isinstance(content, list) else []
    if not any(is_image):
        return read_text(content, where)
    parts = []
    for part, shows_image in zip(content, is_image, strict=True):
        if shows_image:
            images.append(_image(part, where))
            parts.append({"type": "image"})
        else:
            parts.append({"type": "text", "text": _part_text(part, where)})
    return parts


def _is_image(part: Any) -> bool:
    return isinstance(part, dict) and part.get("type") in ("image_url", "input_image", "image")


def _image(part: Mapping[str, Any], where: str) -> str:
    """Return the address of an image: OpenAI's chats, its responses, Anthropic's.

    Most have the image inside. Others are refused later, unless an operator has named their host.
    """
    source = part.get("source") or part.get("image_url")
    url = source.get("url") if isinstance(source, dict) else source
    if isinstance(source, dict) and source.get("type") == "base64":
        url = f"data:{source.get('media_type')};base64,{source.get('data')}"
    if not isinstance(url, str) or not (_DATA_URL.fullmatch(url) or is_address(url)):
        what = f"{where} has an image that is not in the request: send it as data:image/png;base64,"
        raise bad_request(what, where)
    return url
