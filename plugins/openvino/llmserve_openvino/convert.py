"""Converts a transformers model to OpenVINO's form.

A small model of its kind is tried first. The model is traced, and its weights are compressed if
requested. Before that, the converted model is compared with the original.

It runs as a separate program, whose memory is freed when it ends, and because it prints a lot that
is useless as long as it succeeds.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from llmserve.graphs import (
    Importance,
    PackedWeight,
    Scratch,
    StoredWeights,
    WeightFormat,
    load,
    parts,
    write,
)
from llmserve.plugin import (
    KeptWeights,
    UnservedError,
    ending_for_shortage,
    quantised_in,
    tell_done,
    telling,
)
from llmserve_openvino.compare import LENGTHS, difference
from llmserve_openvino.gguf_weights import load_kept
from llmserve_openvino.importance import importance
from llmserve_openvino.quantised_weights import load_quantised, plain_config
from llmserve_openvino.tower import LOADER, save_tower
from llmserve_openvino.trace import convert
from llmserve_openvino.trial import DIFFERS, TOLERANCE, Trial, try_small

MODEL = "openvino_model.xml"
UNSERVED = 69
"""The exit status if the model has a part that cannot be computed; the last line says which."""
_READ, _TRACED, _COMPARING, _WEIGHED = 0.05, 0.15, 0.7, 0.8
"""The shares of the time after which a model is read, traced (if it is small) and compared, and
what counts most in it is known."""
_ARRANGED = 0.3
"""The share after which the blocks of a GGUF file are in OpenVINO's order."""


def main(source: Path, target: Path, settings: dict[str, Any]) -> None:
    """Write the converted model, and next to it the facts that the build needs."""
    target.mkdir(parents=True, exist_ok=True)
    trusted = bool(settings["trust_remote_code"])
    sees, pickle = bool(settings["sees"]), bool(settings["pickle"])
    trial = try_small(plain_config(source, trusted=trusted), sees=sees)
    tower = 0
    if images := settings["images"]:
        with ending_for_shortage(writes=True):
            tower = save_tower(source, Path(images), pickle=pickle)
    with Scratch(target) as scratch:
        packed: Mapping[torch.nn.Module, PackedWeight] = {}
        widened, begun = 0, _READ
        if settings["in_gguf"]:
            with ending_for_shortage(writes=True):
                arranging = telling(0, _ARRANGED)
                model, packed = load_kept(source, KeptWeights.read(source), scratch, arranging)
            begun = _ARRANGED
        elif found := quantised_in(source):
            with ending_for_shortage(writes=True):
                loaded = load_quantised(source, found, scratch, trusted=trusted)
            model, packed, widened = loaded
        else:
            kind = {"loader": LOADER} if sees else {}
            model = load(source, pickle=pickle, trust_remote_code=trusted, **kind)
        parameters = sum(parameter.numel() for parameter in model.parameters())
        stored = StoredWeights(model, packed, folder=target)
        _convert(model, stored, target, settings, trial, begun)
    facts = {
        "served": trial.served,
        "widened": widened,
        "parameters": parameters,
        "tower": tower,
    }
    (target / "facts.json").write_text(json.dumps(facts), encoding="utf-8")


def _convert(
    model: Any, stored: StoredWeights, target: Path, settings: dict[str, Any], trial: Trial,
    begun: float,
) -> None:  # fmt: skip
    tell_done(begun)
    lengths = [min(length, trial.served or length) for length in LENGTHS]
    differences, done = [], begun
    for share in parts(model, stored):
        before, done = done, begun + share * (_COMPARING - begun)
        try:
            part = convert(model, stored)
            differences.append(difference(model, stored, part, telling(before, done), lengths))
        except MemoryError:
            raise
        except Exception:
            # Some of its layers need others. All are like the small model's.
            if not trial.is_done:
                raise
            differences.append(0.0)
    converted = convert(model, stored)
    if not differences:
        tell = telling(max(_TRACED, begun), _COMPARING)
        differences.append(difference(model, stored, converted, tell, lengths))
    if max(differences) > TOLERANCE:
        raise UnservedError(DIFFERS.format(max(differences)))
    important: Importance = {}
    if settings["weight_format"] == "int4":
        important = importance(model, stored, telling(_COMPARING, _WEIGHED))
    chosen = WeightFormat(
        settings["weight_format"], int(settings["int4_group"]), float(settings["int4_ratio"])
    )
    done = _WEIGHED if important else _COMPARING
    with ending_for_shortage(writes=True):
        write(converted, target / MODEL, chosen, important, telling(done, 1))


if __name__ == "__main__":
    try:
        with ending_for_shortage():
            main(Path(sys.argv[1]), Path(sys.argv[2]), json.loads(sys.argv[3]))
    except UnservedError as error:
        sys.stderr.write(f"{error.problem}\n")
        sys.exit(UNSERVED)
