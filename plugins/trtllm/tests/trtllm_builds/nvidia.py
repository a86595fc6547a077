"""Reads ``nvidia.txt``: what NVIDIA's templates declare and its backend reads, by version."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

COMPLETE = ("0.5.0", "0.19.0", "llmapi")
"""The sections that do not extend the one before them."""


@dataclass(frozen=True)
class Tensor:
    kind: str
    dims: tuple[int, ...]
    optional: bool
    ragged: bool
    reshape: bool


@dataclass
class Release:
    tensors: dict[tuple[str, str, str], Tensor] = field(default_factory=dict)
    """The tensors by model, side and name."""
    required: dict[str, str] = field(default_factory=dict)
    read: set[str] = field(default_factory=set)
    modes: set[str] = field(default_factory=set)

    def side(self, model: str, side: str) -> dict[str, Tensor]:
        return {key[2]: t for key, t in self.tensors.items() if key[:2] == (model, side)}


@cache
def releases() -> dict[str, Release]:
    by_name: dict[str, Release] = {}
    release = Release()
    text = Path(__file__).with_name("nvidia.txt").read_text(encoding="utf-8")
    for line in text.splitlines():
        words = line.split()
        if not words or line.startswith("#"):
            continue
        if line.startswith("["):
            name, last = line.strip("[]"), release
            release = by_name[name] = Release()
            if name not in COMPLETE:
                release = by_name[name] = Release(
                    dict(last.tensors), dict(last.required), set(last.read), set(last.modes)
                )
        elif words[0] == "required":
            release.required[words[1]] = words[2]
        elif words[0] == "read":
            release.read.add(words[1])
        elif words[0] == "mode":
            release.modes.add(words[1])
        elif words[:2] == ["-", "read"]:
            release.read.remove(words[2])
        elif words[0] == "-":
            del release.tensors[words[1], words[2], words[3]]
        else:
            model, side, name, kind, dims, flags = words
            release.tensors[model, side, name] = Tensor(
                kind,
                tuple(int(size) for size in dims.split(",")),
                "o" in flags,
                "r" in flags,
                "s" in flags,
            )
    return by_name
