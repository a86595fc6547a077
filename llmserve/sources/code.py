"""Python code that comes with a model: it has to be the code that was looked at."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from llmserve.errors import ModelSourceError
from llmserve.sources.intact import read_object

_NAMERS = frozenset({"config.json", "tokenizer_config.json"})


def check_code(files: Iterable[Path]) -> None:
    """Refuse a model whose code would be fetched from elsewhere, in whatever version is newest."""
    for file in files:
        if file.name in _NAMERS and (elsewhere := code_elsewhere(read_object(file))):
            raise ModelSourceError(
                f"{file.name} takes its Python code from {elsewhere}, in no version that is pinned",
                mend="save the model and that code into one folder, and name the folder",
            )


def code_elsewhere(config: Mapping[str, Any]) -> str | None:
    """Return the repository of somebody else that a configuration takes code from.

    >>> code_elsewhere({"auto_map": {"AutoModel": "someone/else--modeling.Own"}})
    'someone/else'
    """
    code = config.get("auto_map")
    for names in code.values() if isinstance(code, dict) else ():
        for name in names if isinstance(names, list) else [names]:
            repository, found, _ = str(name).partition("--")
            if found:
                return repository
    return None
