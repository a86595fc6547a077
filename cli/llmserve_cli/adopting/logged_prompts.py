"""Prompts out of what an old server was asked: bodies of requests, or the lines of its log."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llmserve.errors import UsageError

_LOGGED = re.compile(r"prompt: (?P<text>'(?:[^'\\]|\\.)*'|\"(?:[^\"\\]|\\.)*\")")
"""As vLLM writes a request into its log: its prompt as Python would."""
_IS_LOG = re.compile(r"(Received request|Request) \S+")
_WRAPPED = ("body", "request", "request_body", "proxy_server_request", "kwargs")
"""Where a body is in a line of a batch, of LiteLLM's log, or of a proxy's."""
_DEEPEST = 4


@dataclass(frozen=True)
class LoggedPrompts:
    """What is asked again."""

    texts: tuple[str, ...]
    chat: bool
    """Whether each was a message of a user."""
    left_out: tuple[str, ...] = ()
    """What of the file is not asked, and why."""

    def write(self, path: Path) -> None:
        lines = (json.dumps({"prompt": text}, ensure_ascii=False) for text in self.texts)
        path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")


def read_logged_prompts(path: Path) -> LoggedPrompts | None:
    """Read a file of requests; None if it is a plain text, with a prompt in each line."""
    try:
        lines = [line for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    except (OSError, UnicodeDecodeError):
        raise UsageError(f"{path} is not UTF-8 text", hint="save it as UTF-8") from None
    is_log = any(_IS_LOG.search(line) and _LOGGED.search(line) for line in lines)
    if not is_log and not any(map(_object_in, lines)):
        return None
    found = [each for line in lines for each in (_of_log(line) if is_log else _of_body(line))]
    if not found:
        raise UsageError(
            f"{path} has no prompt in it",
            hint="each line is the body of a request, with prompt or messages",
        )
    chat = sum(is_chat for _, is_chat, _ in found) * 2 > len(found)
    asked = dict.fromkeys(text for text, is_chat, _ in found if is_chat == chat)
    others = sum(is_chat != chat for _, is_chat, _ in found)
    shortened = sum(is_part for _, is_chat, is_part in found if is_chat == chat)
    unread = len(lines) - len(found)
    left_out = (
        (others, f"{others} of {'texts' if chat else 'chats'}, since most are of the other kind"),
        (shortened, f"what stood before the last message of {shortened} chats"),
        (unread if unread > 0 else 0, f"{unread} lines without a prompt of text"),
    )
    return LoggedPrompts(tuple(asked), chat, tuple(words for count, words in left_out if count))


_Found = tuple[str, bool, bool]
"""A prompt, whether it is a message, and whether more stood before it."""


def _of_log(line: str) -> Iterator[_Found]:
    match = _LOGGED.search(line) if _IS_LOG.search(line) else None
    if match:
        try:
            text = ast.literal_eval(match["text"])
        except (ValueError, SyntaxError):
            return
        if isinstance(text, str) and text.strip():
            yield text, False, False


def _of_body(line: str) -> Iterator[_Found]:
    body = _object_in(line)
    for _ in range(_DEEPEST):
        if body is None or "prompt" in body or isinstance(body.get("messages"), list):
            break
        inner = (body.get(name) for name in _WRAPPED)
        body = next((each for each in inner if isinstance(each, dict)), None)
    if body is None:
        return
    if isinstance(messages := body.get("messages"), list):
        said = [each for each in messages if isinstance(each, dict)]
        last = next((each for each in reversed(said) if each.get("role") == "user"), None)
        if last and (text := _text_of(last.get("content"))):
            yield text, True, len(said) > 1
        return
    prompts = body.get("prompt")
    for prompt in prompts if isinstance(prompts, list) else [prompts]:
        if isinstance(prompt, str) and prompt.strip():
            yield prompt, False, False


def _text_of(content: Any) -> str:
    parts = content if isinstance(content, list) else [{"type": "text", "text": content}]
    texts = [each.get("text") for each in parts if isinstance(each, Mapping)]
    text = "".join(each for each in texts if isinstance(each, str))
    return text if text.strip() else ""


def _object_in(line: str) -> dict[str, Any] | None:
    if not line.lstrip().startswith("{"):
        return None
    try:
        found = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None
