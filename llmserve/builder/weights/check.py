"""Refuses a checkpoint whose weights are not those of the model that it says it is.

Libraries fill what is missing with random numbers, and the model then answers nonsense.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from llmserve.builder.reading import read_object
from llmserve.builder.source import PICKLED, WEIGHTS
from llmserve.builder.weights.kept_answers import find_answer, keep_answer
from llmserve.builder.weights.stored import WHOLE, Stored, index_in, loaded_files, read_stored
from llmserve.errors import ModelSourceError

_COMPARE = "llmserve.builder.weights.compare"
_NAMED = 5
"""How many weights a message names."""
_HINT = "download or save it again"


def check_weights(
    folder: Path,
    *,
    asked: str,
    loader: str,
    trust_remote_code: bool = False,
    pickle: bool = False,
    report: Callable[[str], None] = lambda _: None,
) -> None:
    """Refuse a checkpoint that lacks weights, or has ones of other shapes or that are all NaN.

    ``loader`` is the class of transformers that loads it. Of a safetensors file the header is read,
    and of each tensor what its first number takes. A folder without weights has none to refuse.
    """
    stored = {}
    for file in _loaded(folder, WHOLE, WEIGHTS, asked):
        stored.update(read_stored(file))
    pickled = [] if stored or not pickle else _loaded(folder, "pytorch_model.bin", PICKLED, asked)
    if not (stored or pickled):
        return
    problems = _of_names("not one number (all is NaN) in", _without_numbers(stored))
    if any(find_spec(name) is None for name in ("torch", "transformers")):
        report("whether its weights are complete is not checked: that needs torch, transformers")
        found: Mapping[str, Any] = {}
    else:
        report("comparing its weights with its configuration")
        config = json.dumps(read_object(folder / "config.json"))
        shapes = {name: (tensor.dtype, tensor.shape) for name, tensor in stored.items()}
        question = {
            "loader": loader,
            "config": config,
            # Only a model's own code is read from there.
            "folder": str(folder) if trust_remote_code else "",
            "trusted": trust_remote_code,
            "tensors": shapes,
            "pickled": [(str(file), file.stat().st_mtime_ns) for file in pickled],
        }
        found = _answered(json.dumps(question), keep=not (pickled or trust_remote_code))
    if known := found.get("unknown"):
        _refuse_unknown(folder, asked, known)
    problems += _of_names("not one number (all is NaN) in", found.get("nan", ()))
    problems += _of_names("no", _counted(loader, found.get("missing", ())))
    shapes_of = {
        name: f"{name} of the shape {was} instead of {wanted}"
        for name, was, wanted in found.get("mismatched", ())
    }
    problems += _of_names("", list(shapes_of.values()))
    if misfit := found.get("misfit"):
        problems.append(f"weights that do not fit its configuration ({misfit})")
    if problems:
        raise ModelSourceError(f"{asked} has {'; '.join(problems)}", hint=_HINT)
    if unchecked := found.get("unchecked"):
        report(f"whether its weights are complete is not known: {unchecked}")


def _loaded(folder: Path, whole: str, pattern: str, asked: str) -> Sequence[Path]:
    files = loaded_files(folder, whole, pattern)
    lost = [file.name for file in files if not file.is_file()]
    if lost and (index := index_in(folder, whole)):
        raise ModelSourceError(
            f"{asked} has no {_named(lost)}, which {index.name} names", hint=_HINT
        )
    return files


def _without_numbers(stored: Mapping[str, Stored]) -> list[str]:
    return [name for name, tensor in stored.items() if tensor.is_nowhere_a_number()]


def _counted(loader: str, missing: Sequence[str]) -> list[str]:
    """Leave out what is not computed: embeddings are made of the states before the pooler."""
    is_encoder = loader == "AutoModel"
    return [name for name in missing if not (is_encoder and name.split(".")[0] == "pooler")]


def _of_names(what: str, names: Sequence[str]) -> list[str]:
    return [f"{what} {_named(names)}".strip()] if names else []


def _named(names: Sequence[str]) -> str:
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return ", ".join(names[:_NAMED]) + more


def _refuse_unknown(folder: Path, asked: str, version: str) -> None:
    config = read_object(folder / "config.json")
    kind = config.get("model_type")
    what = f"is of the type {str(kind)[:64]!r}" if kind else "has no model_type in its config.json"
    hint = "build it where a version of transformers that knows it is installed"
    if "AutoConfig" in (config.get("auto_map") or {}):
        hint = "read the code that it ships with, then allow that with --set trust_remote_code=true"
    elif not kind:
        hint = _HINT
    also = f", which transformers {version} does not know" if kind else ""
    raise ModelSourceError(f"{asked} {what}{also}", hint=hint)


@lru_cache(maxsize=16)
def _answered(question: str, *, keep: bool) -> Mapping[str, Any]:
    """Answer a question; the same names and shapes get the same answer.

    ``keep`` is whether the question says all that decides it, and no other files do.
    """
    found = find_answer(question) if keep else None
    if found is None:
        found = _compared(question)
        if keep:
            keep_answer(question, found)
    return found


def _compared(question: str) -> Mapping[str, Any]:
    """Ask the program that compares."""
    with tempfile.TemporaryDirectory(prefix="llmserve-") as folder:
        answer = Path(folder, "answer.json")
        process = subprocess.run(
            [sys.executable, "-m", _COMPARE, str(answer)],
            input=question,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            env={**os.environ, "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""},
            encoding="utf-8",
            errors="replace",
            check=False,
        )
        if process.returncode or not answer.is_file():
            lines = [line.strip() for line in process.stderr.splitlines() if line.strip()]
            reason = lines[-1] if lines else f"exit status {process.returncode}"
            return {"unchecked": reason}
        result: Mapping[str, Any] = json.loads(answer.read_text(encoding="utf-8"))
        return result
