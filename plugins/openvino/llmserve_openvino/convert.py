"""Converts a transformers model to OpenVINO's form.

A small model of its kind is tried first. The model is traced, and its weights are compressed if
requested. Before that, the converted model is compared with the original.

It runs as a separate program, whose memory is freed when it ends, and because it prints a lot that
is useless as long as it succeeds.
"""

from __future__ import annotations

import errno
import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from llmserve.plugin import NO_MEMORY, NOT_WRITTEN, PROGRAM_DONE, KeptWeights, UnservedError
from llmserve_openvino.compare import LENGTHS, difference, parts
from llmserve_openvino.formats import write
from llmserve_openvino.gguf_weights import load_kept
from llmserve_openvino.importance import Importance, importance
from llmserve_openvino.packed import PackedWeight
from llmserve_openvino.scratch import Scratch
from llmserve_openvino.stored import StoredWeights, load, read_config
from llmserve_openvino.trace import convert
from llmserve_openvino.trial import DIFFERS, TOLERANCE, Trial, try_small

MODEL = "openvino_model.xml"
UNSERVED = 69
"""The exit status if the model has a part that cannot be computed; the last line says which."""
_READ, _TRACED, _COMPARING, _WEIGHED = 0.05, 0.15, 0.7, 0.8
"""The shares of the time after which a model is read, traced (if it is small) and compared, and
what counts most in it is known."""


def main(source: Path, target: Path, settings: dict[str, Any]) -> None:
    """Write the converted model, and next to it the facts that the build needs."""
    target.mkdir(parents=True, exist_ok=True)
    trial = try_small(read_config(source, settings))
    with Scratch(target) as scratch:
        packed: dict[torch.nn.Module, PackedWeight] = {}
        if settings["in_gguf"]:
            with _writing():
                model, packed = load_kept(source, KeptWeights.read(source), scratch)
        else:
            model = load(source, settings)
        _convert(model, StoredWeights(model, packed, folder=target), target, settings, trial)


def _convert(
    model: Any, stored: StoredWeights, target: Path, settings: dict[str, Any], trial: Trial
) -> None:
    _tell(_READ)
    lengths = [min(length, trial.served or length) for length in LENGTHS]
    differences, done = [], _READ
    for share in parts(model, stored):
        before, done = done, _READ + share * (_COMPARING - _READ)
        try:
            part = convert(model, stored)
            differences.append(difference(model, stored, part, _telling(before, done), lengths))
        except MemoryError:
            raise
        except Exception:
            # Some of its layers need others. All are like the small model's.
            if not trial.is_done:
                raise
            differences.append(0.0)
    converted = convert(model, stored)
    if not differences:
        tell = _telling(_TRACED, _COMPARING)
        differences.append(difference(model, stored, converted, tell, lengths))
    if max(differences) > TOLERANCE:
        raise UnservedError(DIFFERS.format(max(differences)))
    important: Importance = {}
    if settings["weight_format"] == "int4":
        important = importance(model, stored, _telling(_COMPARING, _WEIGHED))
    done = _WEIGHED if important else _COMPARING
    with _writing():
        write(converted, target / MODEL, settings, important, _telling(done, 1))
    (target / "facts.json").write_text(json.dumps({"served": trial.served}), encoding="utf-8")


@contextmanager
def _writing() -> Iterator[None]:
    """Tell the build that a file could not be written."""
    try:
        yield
    except (OSError, RuntimeError) as error:
        # What OpenVINO raises on a full disk does not say so.
        sys.stderr.write(f"{error}\n")
        sys.exit(NO_MEMORY if getattr(error, "errno", None) == errno.ENOMEM else NOT_WRITTEN)


def _telling(first: float, last: float) -> Callable[[float], None]:
    """Return what tells the build how much is done of what takes it from one share to another."""
    return lambda share: _tell(first + share * (last - first))


def _tell(share: float) -> None:
    """Tell the build how much is done. Libraries print here as well."""
    sys.stdout.write(f"\n{PROGRAM_DONE}{share:.3f}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    try:
        main(Path(sys.argv[1]), Path(sys.argv[2]), json.loads(sys.argv[3]))
    except MemoryError as error:
        sys.stderr.write(f"{error or 'out of memory'}\n")
        sys.exit(NO_MEMORY)
    except UnservedError as error:
        sys.stderr.write(f"{error.problem}\n")
        sys.exit(UNSERVED)
