"""Prompts out of what an old server was asked: bodies of requests, or the lines of its log."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterator, Mapping, Sequence
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
_ROLES = frozenset({"system", "developer", "user", "assistant"})


@dataclass(frozen=True)
class LoggedPrompt:
    """A prompt, or a chat with the message of a user at its end."""

    text: str
    """The prompt, or what the user has said last."""
    before: tuple[tuple[str, str], ...] = ()
    """What was said before: of each message the role and the text."""
    is_chat: bool = False
    is_part: bool = False
    """Whether more stood before it than can be asked again."""

    def content(self) -> dict[str, Any]:
        said = [*self.before, ("user", self.text)]
        messages = [{"role": role, "content": text} for role, text in said]
        return {"prompt": self.text, **({"messages": messages} if self.before else {})}


@dataclass(frozen=True)
class LoggedPrompts:
    """What is asked again."""

    prompts: tuple[LoggedPrompt, ...]
    chat: bool
    """Whether each was a message of a user."""
    left_out: tuple[str, ...] = ()
    """What of the file is not asked, and why."""

    def write(self, path: Path) -> None:
        # In ASCII: some characters of a text end a line where it is read.
        lines = (json.dumps(prompt.content()) for prompt in self.prompts)
        path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")


def read_logged_prompts(path: Path) -> LoggedPrompts | None:
    """Read a file of requests; None if it is a plain text, with a prompt in each line."""
    try:
        # Not splitlines, which splits texts within JSON too, at what is no end of a line there.
        lines = [line for line in path.read_text(encoding="utf-8").split("\n") if line.strip()]
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
    chat = sum(each.is_chat for each in found) * 2 > len(found)
    asked = dict.fromkeys(each for each in found if each.is_chat == chat)
    others = sum(each.is_chat != chat for each in found)
    shortened = sum(each.is_part for each in asked)
    unread = len(lines) - len(found)
    left_out = (
        (others, f"{others} of {'texts' if chat else 'chats'}, since most are of the other kind"),
        (shortened, f"what stood before the last message of {shortened} chats"),
        (unread if unread > 0 else 0, f"{unread} lines without a prompt of text"),
    )
    return LoggedPrompts(tuple(asked), chat, tuple(words for count, words in left_out if count))


def _of_log(line: str) -> Iterator[LoggedPrompt]:
    match = _LOGGED.search(line) if _IS_LOG.search(line) else None
    if match:
        try:
            text = ast.literal_eval(match["text"])
        except (ValueError, SyntaxError):
            return
        if isinstance(text, str) and text.strip():
            yield LoggedPrompt(text)


def _of_body(line: str) -> Iterator[LoggedPrompt]:
    body = _object_in(line)
    for _ in range(_DEEPEST):
        if body is None or "prompt" in body or isinstance(body.get("messages"), list):
            break
        inner = (body.get(name) for name in _WRAPPED)
        body = next((each for each in inner if isinstance(each, dict)), None)
    if body is None:
        return
    if isinstance(messages := body.get("messages"), list):
        if (chat := _chat_of(messages, body.get("system"))) is not None:
            yield chat
        return
    prompts = body.get("prompt")
    for prompt in prompts if isinstance(prompts, list) else [prompts]:
        if isinstance(prompt, str) and prompt.strip():
            yield LoggedPrompt(prompt)


def _chat_of(messages: Sequence[Any], system: Any) -> LoggedPrompt | None:
    """Return a chat up to the last message of a user; None if none has said anything.

    ``system`` is what an application says beside the messages, as in Anthropic's API. A call of a
    tool needs the tool, so of a chat with one only the end is asked.
    """
    said = [each for each in messages if isinstance(each, dict)]
    users = [at for at, each in enumerate(said) if each.get("role") == "user"]
    if not users or not (text := _text_of(said[users[-1]].get("content"))):
        return None
    first = [{"role": "system", "content": system}] if _text_of(system) else []
    before = [*first, *said[: users[-1]]]
    texts = [(str(each.get("role")), _text_of(each.get("content"))) for each in before]
    is_whole = all(
        role in _ROLES and words and not each.get("tool_calls")
        for (role, words), each in zip(texts, before, strict=True)
    )
    return LoggedPrompt(text, tuple(texts) if is_whole else (), True, not is_whole)


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
