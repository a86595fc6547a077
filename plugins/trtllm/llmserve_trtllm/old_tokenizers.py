"""Writes a tokenizer's file so that the tokenizers package of an old container can read it.

From 0.20 on, tokenizers writes each merge as a list of two tokens, which earlier versions refuse to
read: "data did not match any variant of untagged enum ModelWrapper". They read the older form,
both tokens in one text, which later versions read as well. 0.5.0 comes with transformers 4.31
(NVIDIA's requirements.txt).
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from llmserve.plugin import Assembly, IncompatibleError, read_object
from llmserve_trtllm.versions import FIRST_CONFIGURABLE, Version

_FILE = "tokenizer.json"


def suit_tokenizer(assembly: Assembly, version: Version) -> None:
    """Rewrite the tokenizers of all parts if the version needs it; refuse those that cannot be."""
    if version >= FIRST_CONFIGURABLE:
        return
    folders = [part.context.folder for part in assembly.parts.values()]
    copies = [path for folder in folders for path in sorted(folder.rglob(_FILE))]
    for path in copies:
        _rewrite(path, version)
    source = assembly.context.source.path / _FILE
    if copies or assembly.chosen["tokenizer"] != "transformers" or not source.is_file():
        return
    if _pairs(read_object(source)):
        raise IncompatibleError(
            f"the tokenizers package of TensorRT-LLM {version} cannot read {source}, which was "
            "written by a later one",
            hint="give --set weights=copy, which rewrites it",
        )


def _rewrite(path: Path, version: Version) -> None:
    content = read_object(path)
    pairs = _pairs(content)
    if not pairs:
        return
    for token in (token for pair in pairs for token in pair if " " in token):
        raise IncompatibleError(
            f"the tokenizers package of TensorRT-LLM {version} cannot read this tokenizer: its "
            f"token {token!r} contains a space",
            hint=f"build for {FIRST_CONFIGURABLE} or later",
        )
    content["model"]["merges"] = [" ".join(pair) for pair in pairs]
    path.write_text(json.dumps(content, ensure_ascii=False), encoding="utf-8")


def _pairs(content: Mapping[str, Any]) -> list[list[str]]:
    """Return the merges that are lists; the older form has none."""
    merges: Iterable[Any] = (content.get("model") or {}).get("merges") or ()
    return [merge for merge in merges if isinstance(merge, list)]
