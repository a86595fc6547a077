"""What is examined: something that answers prompts, and can refuse."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from llmserve.client import Logprob
from llmserve.errors import LLMServeError
from llmserve.runtime.contract import with_images

if TYPE_CHECKING:
    from llmserve_certify.encoder import Vector

Message = Mapping[str, Any]


@dataclass(frozen=True)
class Ask:
    """A request: a prompt or messages, and options under llmserve's names."""

    prompt: str = ""
    messages: tuple[Message, ...] = ()
    options: Mapping[str, Any] = field(default_factory=dict)
    stream: bool = False
    images: tuple[str, ...] = ()
    """Data URLs of images, which the last message shows."""

    def shown(self, *, in_parts: bool) -> list[Message]:
        """Return the messages with their images, as OpenAI's API has them or as Triton."""
        if not self.images:
            return [*self.messages]
        *before, last = self.messages
        content = with_images(last["content"], self.images, in_parts=in_parts)
        return [*before, {**last, "content": content}]

    def with_options(self, **options: Any) -> Ask:
        return replace(self, options={**self.options, **options})

    def __str__(self) -> str:
        content = json.dumps(list(self.messages)) if self.messages else repr(self.prompt)
        options = ", ".join(f"{name}={value!r}" for name, value in self.options.items())
        return f"{content[:80]}{' with ' + options if options else ''}"


@dataclass(frozen=True)
class Reply:
    """What came; what the server did not say is None."""

    text: str
    finish_reason: str | None = None
    input_tokens: int | None = None
    output_tokens: int | None = None
    logprobs: tuple[Logprob, ...] | None = None
    pieces: tuple[str, ...] = ()
    events: int = 0
    """The parts of a stream, including those without text."""


class Refusal(LLMServeError):
    """The server answered with an error; ``status`` is that of HTTP, or what it would be."""

    def __init__(self, status: int, words: str) -> None:
        super().__init__(words)
        self.status, self.words = status, words
        self.ask: Ask | None = None
        """What was asked."""

    @property
    def is_orderly(self) -> bool:
        """Whether it says that the request is at fault, or that there is too much of them."""
        return 400 <= self.status < 500 or self.status == 501

    @property
    def is_about_server(self) -> bool:
        """Whether it says nothing of the request: the server has no time, is ending, or has lost
        the model."""
        return self.status in (404, 429, 503)


class Gone(LLMServeError):
    """No answer came: the connection failed, or the time is over."""

    def __init__(self, problem: str, *, hint: str | None = None, got: str = "") -> None:
        super().__init__(problem, hint=hint)
        self.got = got or problem
        self.ask: Ask | None = None
        """What was asked."""


class Malformed(Gone):
    """Something came that is no answer by the rules of the API; ``got`` is what."""


class Hostile(NamedTuple):
    """A request that no server should take, or at least survive."""

    name: str
    body: bytes
    """What is sent; empty for a request in ``ask``."""
    ask: Ask | None
    must_refuse: bool


class Decision(NamedTuple):
    """An answer to a typed question: what it says, and how likely each answer is, if told."""

    kind: str
    said: str | float
    shares: Mapping[str, float]


class Subject(Protocol):
    """Something that answers prompts; threads may share it."""

    kind: str
    model: str
    url: str
    chats: bool
    streams: bool
    takes: frozenset[str] | None
    """The options that it has; None if it does not say."""
    task: str
    """``generate`` for a model of texts; any other answers with values."""

    def ask(self, ask: Ask) -> Reply:
        """Return the answer; raise :class:`Refusal` or :class:`Gone`."""
        ...

    def pieces(self, ask: Ask) -> Generator[str, None, None]:
        """Yield the parts of a stream; to leave it early cancels the request."""
        ...

    def hostile(self) -> Sequence[Hostile]:
        """Return requests that are wrong in this protocol's own ways."""
        ...

    def send(self, hostile: Hostile) -> Reply | None:
        """Send one of them; raise :class:`Refusal` or :class:`Gone`."""
        ...

    def curl(self, ask: Ask) -> str:
        """Return a command line that repeats a request."""
        ...

    def hostile_curl(self, hostile: Hostile) -> str: ...

    def values(self, texts: Sequence[str]) -> list[Vector]:
        """Return what the model computes of each text, asked for in one request."""
        ...

    def values_curl(self, texts: Sequence[str]) -> str: ...

    def decide(self, state: str, questions: Mapping[str, Any]) -> dict[str, Decision]:
        """Return the answers to typed questions; raise :class:`Refusal` with 404 if there is no
        such endpoint."""
        ...

    def decide_curl(self, state: str, questions: Mapping[str, Any]) -> str: ...

    def describe(self) -> dict[str, str]:
        """Return what the server says of itself, such as its version."""
        ...


def without_password(url: str) -> str:
    """Return an address as a report may show it: the part before an @ may be a password."""
    return re.sub(r"^([a-z]+://)?[^/?#]*@", r"\1", url, flags=re.IGNORECASE)


def curl(url: str, body: str, *, stream: bool = False, key: str = "") -> str:
    """Return a command line; ``key`` names the variable that has the key of its user."""
    words = ["curl", "-sN" if stream else "-s", url, "-H", "content-type: application/json"]
    # In double quotes, for the shell to put in what the variable has.
    header = f' -H "authorization: Bearer ${key}"' if key else ""
    return f"{shlex.join(words)}{header} {shlex.join(['-d', body])}"
