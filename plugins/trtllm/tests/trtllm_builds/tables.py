"""The tables that the templates of each version amount to, as text, and how to read them."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path

_FILES = {"0.5.0": "0.5.0", "0.12.0": "0.12", "0.19.0": "0.19.0", "1.2.1": "1.2"}
_ROW = re.compile(r"(\S+) (\S+) \[([-\d,]*)\](.*)")


@dataclass(frozen=True)
class Tensor:
    kind: str
    dims: tuple[int, ...]
    optional: bool
    reshape: bool
    ragged: bool


@dataclass
class Table:
    parameters: set[str] = field(default_factory=set)
    inputs: dict[str, Tensor] = field(default_factory=dict)
    outputs: dict[str, Tensor] = field(default_factory=dict)


def read(version: str) -> dict[str, Table]:
    models: dict[str, Table] = {}
    table, side = Table(), {}
    for line in (
        (Path(__file__).with_name("tables") / f"{_FILES[version]}.txt").read_text().splitlines()
    ):
        if line.startswith("model: "):
            table = models[line.removeprefix("model: ")] = Table()
        elif line.startswith("parameters: "):
            words = line.removeprefix("parameters: ")
            table.parameters = set() if words == "(none)" else set(words.split(", "))
        elif line in ("input:", "output:"):
            side = table.inputs if line == "input:" else table.outputs
        elif found := _ROW.fullmatch(line):
            name, kind, dims, flags = found.groups()
            side[name] = Tensor(
                kind,
                tuple(int(size) for size in dims.split(",")),
                "optional" in flags,
                "reshape" in flags,
                "ragged" in flags,
            )
    return models
