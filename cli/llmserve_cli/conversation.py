"""A conversation with a model: its turns, how fast they came, and what `/…` does to it."""

from __future__ import annotations

import json
import os
import shlex
import time
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import click

from llmserve.commands import assigned
from llmserve.errors import ClientError, LLMServeError, OptionError, UsageError
from llmserve.plugin import near
from llmserve.runtime.contract import (
    ALIASES,
    API_NAMES,
    FILL_CONTEXT,
    IMAGE_URL,
    MESSAGES,
    OPTIONS,
    with_images,
)
from llmserve_cli.options import range_of
from llmserve_cli.other_tools import IN_A_CONVERSATION
from llmserve_cli.request_assignments import NOT_BY_SET, refuse_unknown
from llmserve_cli.shown_images import url_of_file
from llmserve_cli.usage import what_is_wrong

if TYPE_CHECKING:
    from llmserve.client import ModelInfo

NO_TEMPLATE = "no_chat_template"


class Answers(Protocol):
    """What a conversation needs of a client."""

    def stream(self, model: str, prompt: str = "", **options: Any) -> Iterator[Any]: ...


@dataclass
class Speed:
    """How an answer came: when its first token and its last one, and how many they were."""

    clock: Callable[[], float] = time.monotonic
    first: float | None = None
    last: float = 0.0
    tokens: int | None = None
    prompt_tokens: int | None = None
    reason: str | None = None

    def __post_init__(self) -> None:
        self._start = self.clock()

    def follow(self, piece: Any) -> None:
        if piece.text:
            self.last = self.clock() - self._start
            self.first = self.last if self.first is None else self.first
        self.reason = piece.finish_reason or self.reason
        if piece.output_tokens is not None:
            self.tokens = piece.output_tokens
        if piece.input_tokens is not None:
            self.prompt_tokens = piece.input_tokens

    @property
    def rate(self) -> float | None:
        """Tokens per second after the first one; None if there is nothing to measure."""
        if self.first is None or not self.tokens or self.tokens < 2 or self.last <= self.first:
            return None
        return (self.tokens - 1) / (self.last - self.first)

    def __str__(self) -> str:
        if self.first is None:
            return "no text"
        count = "" if self.tokens is None else f"{self.tokens} token{'s' * (self.tokens != 1)}"
        rate = f"{self.rate:.1f} tokens/s" if self.rate else ""
        cut = "cut off at the limit" if self.reason == "length" else ""
        first = f"first after {self.first:.2f} s"
        return ", ".join(filter(None, (count, rate, first, cut)))


@dataclass
class Conversation:
    """What was said so far, and to whom the next message goes."""

    client: Answers
    model: str
    system: str = ""
    options: dict[str, Any] = field(default_factory=dict)
    clock: Callable[[], float] = time.monotonic
    turns: list[tuple[str, str]] = field(default_factory=list)
    speeds: list[Speed] = field(default_factory=list)
    shown: dict[int, tuple[str, ...]] = field(default_factory=dict)
    """The images of questions, as data URLs, by their places in ``turns``."""
    waiting: list[str] = field(default_factory=list)
    """Those of the next one."""

    def __post_init__(self) -> None:
        self.change_model(self.model)

    def change_model(self, name: str) -> None:
        """Go on with another model; raise if the server does not have it."""
        # A server with OpenAI's API does not describe its models.
        describe = getattr(self.client, "model", None)
        self.info: ModelInfo | None = describe(name, refresh=True) if describe else None
        self.model = name
        # Whether it may have a chat template. One without continues each text on its own.
        self.takes_messages = self.info is None or MESSAGES.name in self.info.inputs

    def messages(self, *more: str, in_parts: bool = True) -> list[dict[str, Any]]:
        """Return all messages, with one of the user's that has no answer yet.

        Images are ``in_parts`` of them, as in OpenAI's API, or are only said to be there.
        """
        said: list[dict[str, Any]] = []
        if self.system:
            said.append({"role": "system", "content": self.system})
        for place, (question, answer) in enumerate(self.turns):
            content = with_images(question, self.shown.get(place, ()), in_parts=in_parts)
            said.append({"role": "user", "content": content})
            said.append({"role": "assistant", "content": answer})
        asked = (with_images(text, self.waiting, in_parts=in_parts) for text in more)
        return said + [{"role": "user", "content": content} for content in asked]

    def ask(self, text: str) -> Generator[str, None, None]:
        """Yield the answer as it arrives; the speed of it is then the last of ``speeds``.

        What has arrived of an answer that is stopped stays in the conversation. A message that
        fails does not, so that it can be sent again.
        """
        speed = Speed(self.clock)
        pieces: list[str] = []
        try:
            with closing(self._pieces(text)) as arriving:
                for piece in arriving:
                    speed.follow(piece)
                    if piece.text:
                        pieces.append(piece.text)
                        yield piece.text
        except LLMServeError:
            pieces.clear()
            raise
        finally:
            if pieces:
                self.shown[len(self.turns)] = tuple(self.waiting)
                self.turns.append((text, "".join(pieces)))
                self.waiting.clear()
                self.speeds.append(speed)

    def _options(self) -> dict[str, Any]:
        """Return the options; without a length, an answer may fill what is left of the context."""
        is_ours = self.info is not None and self.info.made_by_llmserve
        fill = {FILL_CONTEXT: True} if is_ours and "max_tokens" not in self.options else {}
        return {**self.options, **fill}

    def _pieces(self, text: str) -> Generator[Any, None, None]:
        options = self._options()
        if self.takes_messages:
            # A server that describes its models has an input of its own for images.
            messages = self.messages(text, in_parts=self.info is None)
            urls = [url for urls in (*self.shown.values(), self.waiting) for url in urls]
            if urls and self.info is not None:
                options[IMAGE_URL.name] = urls
            try:
                yield from self.client.stream(self.model, messages=messages, **options)
            except ClientError as error:
                if error.code != NO_TEMPLATE or self.turns or urls:
                    raise
                self.takes_messages = False
        if not self.takes_messages:
            yield from self.client.stream(self.model, text, **options)

    def reset(self) -> None:
        self.turns.clear()
        self.shown.clear()
        self.waiting.clear()


# What can be typed instead of a message


@dataclass(frozen=True)
class Command:
    """A word that begins with a slash: what may follow it, what it does, and how."""

    argument: str
    help: str
    run: Callable[[Conversation, str], str]


def help_text() -> str:
    """Return what can be typed."""
    rows = [(f"{name} {command.argument}".strip(), command.help) for name, command in KNOWN.items()]
    rows += [
        ("Alt-Enter, Ctrl-J", "begins a new line"),
        ("Ctrl-C", "stops an answer, or discards what is typed"),
        ("Ctrl-D", "ends the conversation, as /bye does"),
    ]
    width = max(len(name) for name, _ in rows)
    return "\n".join(f"{name:<{width}}  {text}" for name, text in rows)


class Ended(Exception):
    """The user has ended the conversation."""


def run_command(conversation: Conversation, line: str) -> str:
    """Run a line that begins with a slash, and return what to show."""
    name, _, argument = line.strip().partition(" ")
    name = IN_A_CONVERSATION.get(name, name)
    if name not in KNOWN:
        hint = "/help shows them, and a space before it makes it a message"
        close = near(name, KNOWN)
        raise UsageError(
            f"{name} is no command", hint=f"{close} {hint}" if close.startswith("did") else hint
        )
    command = KNOWN[name]
    if argument and not command.argument:
        raise UsageError(f"{name} takes nothing after it")
    return command.run(conversation, argument.strip())


def _reset(conversation: Conversation, _: str) -> str:
    conversation.reset()
    return "a new conversation" + (", with the same system message" if conversation.system else "")


def _system(conversation: Conversation, text: str) -> str:
    if not text:
        current = conversation.system or 'none; /system TEXT sets one, /system "" none'
        return f"system message: {current}"
    conversation.system = "" if text in ('""', "''") else text
    if not conversation.takes_messages:
        return f"{conversation.model} has no chat template, and will not see it"
    return "set, from the next message on" if conversation.system else "there is none now"


def _set(conversation: Conversation, argument: str) -> str:
    """Set an option of the requests to come, as ``query --set`` does for one."""
    name, _, text = argument.replace("=", " ", 1).partition(" ")
    name, text = name.replace("-", "_"), text.strip()
    if conversation.info is not None and conversation.info.input_of(name) is None:
        # As OpenAI's API calls it: `stop` is stop_words.
        name = next((own for own, api in API_NAMES.items() if api == name), name)
    options = conversation.options
    if not text:
        chosen = {name: options.get(name, "its default")} if name else options
        listed = ", ".join(f"{key}={value}" for key, value in chosen.items())
        return f"{listed or 'nothing is set'}; /set NAME VALUE sets an option, default unsets it"
    row = OPTIONS.get(ALIASES.get(name, name))
    if name in NOT_BY_SET or (row is not None and row.set_by != "user"):
        raise OptionError(f"/set cannot set {name}", hint="the conversation sets it")
    if conversation.info is not None:
        refuse_unknown(conversation.info, [name])
    if text == "default":
        options.pop(name, None)
        return f"{name} has its default, from the next message on"
    if row is not None and row.kind in ("whole", "number"):
        try:
            options[name] = range_of(row).convert(text, None, None)
        except click.BadParameter as error:
            raise OptionError(f"{name}: {what_is_wrong(error)}") from None
    else:
        options.update(assigned((f"{name}={text}",)))
    return f"{name}={options[name]}, from the next message on"


def _model(conversation: Conversation, name: str) -> str:
    if not name:
        return f"model: {conversation.model}; /model NAME goes on with another of this server"
    conversation.change_model(name)
    return f"{name} answers from now on; it sees what was said so far, /reset begins anew"


def _image(conversation: Conversation, argument: str) -> str:
    """Show an image with the next message."""
    waiting, info = conversation.waiting, conversation.info
    if not argument:
        return f"{_images(len(waiting))} will go with the next message; /image FILE adds one"
    try:
        (name,) = shlex.split(argument)
    except ValueError:
        raise UsageError("/image takes a file", hint="as in /image photo.jpg") from None
    if info is not None and not info.input_of(IMAGE_URL.name):
        raise UsageError(f"{conversation.model} reads only text")
    waiting.append(url_of_file(Path(name).expanduser()))
    return f"{_images(len(waiting))} will go with the next message"


def _images(count: int) -> str:
    return f"{count or 'no'} image{'s' * (count != 1)}"


def _as_markdown(message: Mapping[str, Any]) -> str:
    content = message["content"]
    if not isinstance(content, str):
        content = f"({_images(len(content) - 1)})\n\n{content[-1]['text']}"
    return f"**{message['role']}**\n\n{content}"


def _save(conversation: Conversation, argument: str) -> str:
    try:
        (name,) = shlex.split(argument)
    except ValueError:
        raise UsageError("/save takes a file", hint="as in /save talk.md, or talk.json") from None
    path = Path(name).expanduser()
    if not conversation.turns:
        raise UsageError("nothing was said yet")
    messages = conversation.messages()
    if path.suffix == ".json":
        text = json.dumps(messages, indent=2, ensure_ascii=False)
    else:
        text = "\n\n".join(map(_as_markdown, messages))
    try:
        # Not over a file: a conversation is not worth one that was there before.
        with open(path, "x", encoding="utf-8", opener=_private) as file:
            file.write(text + "\n")
    except OSError as error:
        raise UsageError(
            f"{path} cannot be written: {error.strerror}", hint="give another name"
        ) from None
    return f"saved to {path}"


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)


def _stats(conversation: Conversation, _: str) -> str:
    speeds = conversation.speeds
    if not speeds:
        return "no answer yet"
    lines = [f"{len(speeds)} answer{'s' * (len(speeds) != 1)}"]
    if counted := [speed.tokens for speed in speeds if speed.tokens is not None]:
        lines[0] += f", {sum(counted)} tokens"
    if rates := [speed.rate for speed in speeds if speed.rate]:
        lines.append(f"tokens/s       {_range(rates, '.1f')}")
    lines.append(f"first after    {_range([s.first for s in speeds if s.first], '.2f')} s")
    if (context := speeds[-1].prompt_tokens) is not None:
        lines.append(f"last prompt    {context} tokens")
    return "\n".join(lines)


def _range(numbers: list[float], form: str) -> str:
    ordered = sorted(numbers)
    middle = ordered[len(ordered) // 2]
    if len(ordered) == 1:
        return f"{middle:{form}}"
    return f"{middle:{form}} (from {ordered[0]:{form}} to {ordered[-1]:{form}})"


def _bye(*_: object) -> str:
    raise Ended


KNOWN = {
    "/help": Command("", "shows this", lambda *_: help_text()),
    "/reset": Command("", "forgets what was said, as /clear does", _reset),
    "/system": Command("[TEXT]", "shows or sets the system message", _system),
    "/set": Command("[NAME VALUE]", "shows or sets options, as temperature 0.2", _set),
    "/image": Command("FILE", "shows an image with the next message", _image),
    "/save": Command("FILE", "writes all of it to a file, Markdown or JSON", _save),
    "/model": Command("[NAME]", "shows the model, or goes on with another one", _model),
    "/stats": Command("", "shows how fast the answers came", _stats),
    "/bye": Command("", "ends the conversation", _bye),
}
