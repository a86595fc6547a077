"""Reads the JSON files of models, and says which of them is damaged."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from llmserve.errors import ModelSourceError


def read_object(path: Path) -> dict[str, Any]:
    content = read_json(path)
    if not isinstance(content, dict):
        raise ModelSourceError(f"{path} is not a JSON object", hint="download or save it again")
    return content


def read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise damaged(path, str(error)) from None


def damaged(path: Path, reason: str) -> ModelSourceError:
    return ModelSourceError(f"{path} cannot be read: {reason}", hint="download or save it again")
