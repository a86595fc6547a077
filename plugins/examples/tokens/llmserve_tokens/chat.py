"""Formats conversations with the model's own chat template, in Jinja's sandbox."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from jinja2.exceptions import TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment

from llmserve.runtime import RequestError


def find_template(folder: Path, config: Mapping[str, Any]) -> str | None:
    """Return the template; a separate file takes precedence over the tokenizer's configuration."""
    plain, wrapped = folder / "chat_template.jinja", folder / "chat_template.json"
    if plain.is_file():
        return plain.read_text(encoding="utf-8")
    template = config.get("chat_template")
    if wrapped.is_file():
        template = json.loads(wrapped.read_text(encoding="utf-8"))["chat_template"]
    if isinstance(template, list):
        # If a model has several, one is named default; the others are for tools.
        template = {entry["name"]: entry["template"] for entry in template}.get("default")
    return template


class ChatTemplate:
    """A compiled template; the build refuses one that does not compile.

    >>> ChatTemplate("{% for m in messages %}{{ m['content'] }}{{ eos_token }}{% endfor %}",
    ...              {"eos_token": "."}).render([{"role": "user", "content": "Hello"}])
    'Hello.'
    """

    def __init__(self, template: str, special_tokens: Mapping[str, str]) -> None:
        # Templates are third-party code, so they run in a sandbox. Templates that are written for
        # transformers rely on these settings and helpers.
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )
        environment.filters["tojson"] = _to_json
        environment.globals.update(raise_exception=_refuse, strftime_now=_now)
        self._template = environment.from_string(template)
        self._special_tokens = dict(special_tokens)

    def render(self, messages: Sequence[Mapping[str, str]]) -> str:
        """Return the text up to the beginning of the answer."""
        try:
            return self._template.render(
                messages=list(messages), add_generation_prompt=True, **self._special_tokens
            )
        except RequestError:
            raise
        except (TemplateError, TypeError, ValueError, KeyError, IndexError) as error:
            reason = " ".join(str(error).split())
            raise _refusal(reason) from None


def _refuse(message: object) -> None:
    raise _refusal(message)


def _refusal(reason: object) -> RequestError:
    problem = f"the chat template refuses these messages: {reason}"
    return RequestError(problem, code="invalid_value", param="messages")


def _now(pattern: str) -> str:
    return datetime.now().strftime(pattern)


def _to_json(value: Any, indent: int | None = None) -> str:
    # Jinja's own filter escapes for web pages, which no model was trained on.
    return json.dumps(value, ensure_ascii=False, indent=indent)
