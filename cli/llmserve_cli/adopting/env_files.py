"""Files of variables beside a source, as Docker and compose read them; secrets stay in them."""

from __future__ import annotations

import re
from pathlib import Path

from llmserve.errors import ConfigError
from llmserve_cli.adopting.adopted import holds_secret, names_secret
from llmserve_cli.adopting.source_text import read_source

_PAIR = re.compile(r"\s*(?:export\s+)?([A-Za-z_][\w.]*)\s*=(.*)")
_COMMENT = re.compile(r"\s#.*")


def read_variables(path: Path) -> dict[str, str] | None:
    """Return the variables of a file; None if it is not here, or no file of them.

    In place of a secret stands the name of its variable, as where the old server was given that.
    """
    if not path.is_file():
        return None
    try:
        source = read_source(path)
    except ConfigError:
        return None
    pairs = (_PAIR.fullmatch(line) for line in source.text.splitlines())
    return {pair[1]: _shown(pair[1], _value(pair[2].strip())) for pair in pairs if pair}


def without_secrets(variables: dict[str, str]) -> dict[str, str]:
    """Return those that may stand in the place of their names."""
    return {name: value for name, value in variables.items() if value != f"${{{name}}}"}


def _value(text: str) -> str:
    quote = text[:1]
    if quote in ("'", '"') and (end := text.find(quote, 1)) > 0:
        return text[1:end]
    return _COMMENT.sub("", text).strip()


def _shown(name: str, value: str) -> str:
    return f"${{{name}}}" if names_secret(name) or holds_secret(value) else value
