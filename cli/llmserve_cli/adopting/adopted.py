"""What a reader finds: models, how they were served, and what has no equal here."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

_SECRET_NAME = re.compile(
    r"(^|[-_.])((api|access|auth|hf|secret)?(keys?|token|secrets?|passwords?|passwd|authtoken)"
    r"|credentials?)$",
    re.IGNORECASE,
)
_SECRET_VALUE = re.compile(
    r"hf_\w{6,}|(?<![\w-])sk-[\w-]{16,}|gh[pousr]_\w{10,}|AKIA\w{12,}|://[^/\s:@]*:[^/\s@]+@|Bearer\s+\S+"
)
_NAMED_VALUE = re.compile(
    r"[\"']?([\w.-]+)[\"']?\s*[:=]\s*(\"[^\"]*\"|'[^']*'|[^\s,}]+)", re.IGNORECASE
)
_MOST_SHOWN = 160


@dataclass(frozen=True)
class Origin:
    """Where something stands, and what stands there; line 0 is for what is said by no line."""

    file: str
    line: int
    text: str

    def __str__(self) -> str:
        place = f"{self.file}:{self.line}" if self.line else self.file
        return f"{place}: {self.text}" if self.text else place


@dataclass(frozen=True)
class Value:
    """A value, and where it comes from."""

    value: Any
    origin: Origin


@dataclass
class AdoptedModel:
    """A model as a build takes it; its options are texts until a plugin is chosen."""

    name: str
    source: Value
    plugin: Value | None = None
    batching: Value | None = None
    options: dict[str, Value] = field(default_factory=dict)
    engine_args: dict[str, Value] = field(default_factory=dict)
    """Arguments of vLLM's engine without an option of their own."""
    called: str = ""
    """What clients of the old server call it, if not by its name."""
    also_called: tuple[str, ...] = ()


@dataclass(frozen=True)
class Remark:
    """What is not written, and what comes next to it or why it is not needed."""

    origin: Origin
    instead: str

    def __str__(self) -> str:
        return f"{self.origin}: {self.instead}"


@dataclass(frozen=True)
class Secret:
    """A secret that was found; its value stays where it is."""

    variable: str
    origin: Origin
    is_key: bool = False
    """Whether clients send it to the server."""


@dataclass
class Adopted:
    """All that a source says."""

    what: str
    models: list[AdoptedModel] = field(default_factory=list)
    serve: dict[str, Value] = field(default_factory=dict)
    gateway: dict[str, Value] = field(default_factory=dict)
    unmatched: list[Remark] = field(default_factory=list)
    unneeded: list[Remark] = field(default_factory=list)
    secrets: list[Secret] = field(default_factory=list)
    repository: Value | None = None
    """A repository that is served as it is."""
    texts: dict[str, tuple[Value, Value]] = field(default_factory=dict)
    """The tensors for the text in and out of models in it."""
    kept: list[str] = field(default_factory=list)
    """Models of a repository that go on as they are."""

    def miss(self, origin: Origin, instead: str) -> None:
        self.unmatched.append(Remark(origin, instead))

    def leave_out_secrets(self) -> None:
        """Empty what would be written and has a secret in it, as a URL with a password has."""
        says = "it has a secret in it, which is not written: set it by hand"
        for model in self.models:
            for table in (model.options, model.engine_args):
                for key in [key for key, each in table.items() if holds_secret(str(each.value))]:
                    self.miss(_without_text(table.pop(key).origin, key), says)
            if holds_secret(str(model.source.value)):
                origin = _without_text(model.source.origin, "source")
                model.source = Value("", origin)
                self.miss(origin, says)
            if holds_secret(model.called):
                model.called = ""


def _without_text(origin: Origin, text: str) -> Origin:
    return Origin(origin.file, origin.line, f"{text} …")


def names_secret(name: str) -> bool:
    """Return whether what has this name is a secret.

    >>> names_secret("--api-key"), names_secret("HF_TOKEN"), names_secret("max_tokens")
    (True, True, False)
    """
    plain = name.lstrip("-")
    return bool(_SECRET_NAME.search(plain))


def holds_secret(text: str) -> bool:
    """Return whether a text has a secret in it, as a value that is named so or looks so.

    >>> holds_secret('{"hf_token": "abcdefgh"}'), holds_secret("hf_abcdefgh")
    (True, True)
    >>> holds_secret('{"max_tokens": 5}'), holds_secret("https://a.b/c")
    (False, False)
    """
    if _SECRET_VALUE.search(text):
        return True
    return any(names_secret(name) for name, _ in _NAMED_VALUE.findall(text))


def shown(name: str, value: str | None = None) -> str:
    """Return a setting as it may be printed: on one line, not too long, and without secrets.

    >>> shown("--api-key", "abc"), shown("--port", "80")
    ('--api-key …', '--port 80')
    """
    if value is None:
        text = name
    elif names_secret(name) or holds_secret(value):
        text = f"{name} …"
    else:
        text = f"{name} {value}"
    line = " ".join(text.split())
    return line if len(line) <= _MOST_SHOWN else f"{line[: _MOST_SHOWN - 1]}…"
