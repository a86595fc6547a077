"""Converts the GGUF file that ``--model`` names, for the time of a build."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from llmserve.builder.gguf.admission import (
    FLOATS,
    NEEDS_SPACE,
    check_complete,
    check_extent,
    check_readers,
    check_space,
    dtype_for,
    type_of_most,
)
from llmserve.builder.gguf.header import read_header
from llmserve.builder.gguf.keep import KEPT
from llmserve.builder.programs import run_program
from llmserve.builder.progress import Note
from llmserve.builder.source import ModelSource
from llmserve.errors import ModelSourceError, OutputError

_CONVERTER = "llmserve.builder.gguf.convert"
_OFFLINE = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}
_HINT = "build from the model that it was made of, with config.json and safetensors"


def converted(
    source: ModelSource, target: Path, report: Callable[[str], None], *, keeps: bool = False
) -> ModelSource:
    """Return the model of a GGUF file as a folder, which the build deletes when it ends.

    With ``keeps``, weights in blocks stay in the file, and the folder has a list of them, if
    they are of types and for a model with which that can be.
    """
    path = source.path
    header = read_header(path)
    check_complete(header)
    check_readers(path)
    kinds = check_extent(header)
    kind, dtype = type_of_most(kinds), dtype_for(kinds)
    keeps = keeps and bool(kinds.keys() & {*KEPT})
    if not keeps:
        check_space(target.parent, kinds, dtype)
    report(f"reading {path.name}: {header.architecture}, {sum(kinds.values()) / 1e6:.0f} M weights")
    result = _run(path, target, [dtype, *(["keep"] if keeps else [])], report)
    size = f"{result['bytes'] / 1e6:.0f} MB"
    if result.get("kept"):
        report(f"its {kind} weights are kept as they are: {size}")
        for other, count in result["widened"].items():
            if other not in FLOATS:
                report(f"{count / 1e6:.1f} M weights of the type {other} are widened to {dtype}")
    elif kind.lower() == dtype.replace("loat", ""):
        report(f"its {kind} weights are kept as they are: {size}")
    else:
        report(f"its {kind} weights are widened to {dtype}: {size}")
    for note in result["notes"]:
        report(Note(f"note: {path.name}: {note}"))
    return ModelSource(source.asked, target, converted_from=source)


def _run(
    path: Path, target: Path, arguments: Sequence[str], report: Callable[[str], None]
) -> dict[str, Any]:
    """Convert in a separate process, which frees what it took."""
    from llmserve.builder.gguf.convert import RESULT

    ended = run_program(
        [sys.executable, "-m", _CONVERTER, str(path), str(target), *arguments],
        words=f"converting {path.name}",
        report=report,
        environment=_OFFLINE,
    )
    written = target / RESULT
    if ended.code or not written.is_file():
        raise ModelSourceError(f"{path.name} could not be converted: {ended.reason}", hint=_HINT)
    result: dict[str, Any] = json.loads(written.read_text(encoding="utf-8"))
    written.unlink()
    if unwritten := result.get("not_written"):
        raise OutputError(
            f"{path.name} cannot be written as a folder: {unwritten}",
            hint=NEEDS_SPACE if result["is_full"] else _HINT,
        )
    if refused := result.get("refused"):
        raise ModelSourceError(f"{path.name} {refused}", hint=_HINT)
    return result
