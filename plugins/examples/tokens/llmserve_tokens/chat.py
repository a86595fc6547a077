"""Conversations as the model was trained on them: its own template, in Jinja's sandbox."""

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
    """Return the template: a file of its own counts before the tokenizer's configuration."""
    plain, wrapped = folder / "chat_template.jinja", folder / "chat_template.json"
    if plain.is_file():
        return plain.read_text(encoding="utf-8")
    found = config.get("chat_template")
    if wrapped.is_file():
        found = json.loads(wrapped.read_text(encoding="utf-8"))["chat_template"]
    if isinstance(found, list):
        # A model with several names one of them default; the others are for tools.
        found = {entry["name"]: entry["template"] for entry in found}.get("default")
    return found


class ChatTemplate:
    """A template that was compiled once; one that cannot be is refused where it is built.

    >>> ChatTemplate("{% for m in messages %}{{ m['content'] }}{{ eos_token }}{% endfor %}",
    ...              {"eos_token": "."}).render([{"role": "user", "content": "Hello"}])
    'Hello.'
    """

    def __init__(self, template: str, special: Mapping[str, str]) -> None:
        # Templates come from strangers, so they get a sandbox; templates that are written for
        # transformers count on these settings and helpers.
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )
        environment.filters["tojson"] = _to_json
        environment.globals.update(raise_exception=_refuse, strftime_now=_now)
        self._template = environment.from_string(template)
        self._special = dict(special)

    def render(self, messages: Sequence[Mapping[str, str]]) -> str:
        """Return the text up to where the answer begins."""
        try:
            return self._template.render(
                messages=list(messages), add_generation_prompt=True, **self._special
            )
        except RequestError:
            raise
        except (TemplateError, TypeError, ValueError, KeyError, IndexError) as error:
            reason = " ".join(str(error).split())
            raise RequestError(f"the chat template refuses these messages: {reason}") from None


def _refuse(message: object) -> None:
    raise RequestError(f"the chat template refuses these messages: {message}")


def _now(form: str) -> str:
    return datetime.now().strftime(form)


def _to_json(value: Any, indent: int | None = None) -> str:
    # Jinja's own filter escapes for web pages, which no model was trained on.
    return json.dumps(value, ensure_ascii=False, indent=indent)
