"""Weights that stay in a GGUF file: which they are, and where a converter finds their blocks.

Beside the configuration of a model that was read from such a file, a list says for each of these
weights where it is; the others, such as norms, are in the folder as in any other.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from llmserve.builder.source import ModelSource

_LIST = "gguf_weights.json"


@dataclass(frozen=True)
class KeptWeight:
    """A matrix in blocks, as ggml has them: rows, one after the other, each of whole blocks.

    ``parameter`` is its name in transformers, ``kind`` its type, such as ``Q4_K``, and ``offset``
    where it begins in the file. ``order`` says which row is the parameter's first, second and so
    on; it is empty if they are in order. The rows are outputs, whatever the parameter's own order.
    """

    parameter: str
    kind: str
    shape: tuple[int, int]
    offset: int
    order: Sequence[int] = ()


@dataclass(frozen=True)
class KeptWeights:
    """The weights of a model that are still in its GGUF file."""

    file: Path
    weights: tuple[KeptWeight, ...]

    def write(self, folder: Path) -> None:
        content = {"file": str(self.file), "weights": [asdict(each) for each in self.weights]}
        (folder / _LIST).write_text(json.dumps(content), encoding="utf-8")

    @classmethod
    def read(cls, folder: Path) -> KeptWeights:
        """Read the list in a folder for which :func:`has_kept_weights` is true."""
        content = json.loads((folder / _LIST).read_text(encoding="utf-8"))
        rows = [{**each, "shape": tuple(each["shape"])} for each in content["weights"]]
        return cls(Path(content["file"]), tuple(KeptWeight(**row) for row in rows))


def has_kept_weights(source: ModelSource) -> bool:
    """Return whether weights of a model are still in the GGUF file that it was read from.

    A folder of somebody else's may have any list; it is not read.
    """
    return source.converted_from is not None and (source.path / _LIST).is_file()
