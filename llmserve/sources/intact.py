"""Whether a model's files are whole: a cut download is told at build time, not by Triton."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from llmserve.errors import ModelSourceError

_OBJECTS = {"config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"}
_LARGEST_HEADER = 100_000_000
"""What safetensors itself takes at most."""


def check_intact(files: Iterable[Path]) -> None:
    """Refuse files that cannot be read as what they are called; weights are not read through."""
    for file in files:
        if file.name in _OBJECTS:
            read_object(file)
        elif file.suffix == ".json":
            _read_json(file)
        elif file.suffix == ".safetensors":
            _check_safetensors(file)


def read_object(path: Path) -> dict[str, Any]:
    """Return the JSON object that a file holds."""
    content = _read_json(path)
    if not isinstance(content, dict):
        raise ModelSourceError(f"{path} holds no JSON object", mend="fetch or save it again")
    return content


def _read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ModelSourceError(
            f"{path} cannot be read: {error}", mend="fetch or save it again"
        ) from None


def _check_safetensors(path: Path) -> None:
    """Hold the header, which says where each tensor lies, against the size of the file."""
    try:
        with path.open("rb") as stream:
            start = stream.read(8)
            length = int.from_bytes(start, "little")
            # A pointer that stands for a file not fetched, or a page of an error, is text: its
            # first bytes make a number beyond all bounds.
            if len(start) < 8 or length > _LARGEST_HEADER:
                raise ValueError("it does not begin as a safetensors file does")
            header = json.loads(stream.read(length))
        tensors = [tensor for name, tensor in header.items() if name != "__metadata__"]
        wanted = 8 + length + max((tensor["data_offsets"][1] for tensor in tensors), default=0)
        size = path.stat().st_size
        if size < wanted:
            raise ValueError(f"it has {size} bytes of {wanted}")
    except (KeyError, TypeError, IndexError, AttributeError):
        raise _damaged(path, "its header describes no tensors") from None
    except (OSError, ValueError, RecursionError) as error:
        raise _damaged(path, str(error)) from None


def _damaged(path: Path, why: str) -> ModelSourceError:
    return ModelSourceError(f"{path} cannot be read: {why}", mend="fetch or save it again")
