"""What builds of the demo model write, stored for comparison.

``tests/golden`` has their configurations and manifests, which have the hashes of all other files.
After an intended change, ``python -m tests.contract.golden`` regenerates it.
"""

from __future__ import annotations

import re
import shutil
import tempfile
from pathlib import Path
from typing import Any

import llmserve
from llmserve.testing.one_layer import one_layer

GOLDEN = Path(__file__).parents[1] / "golden"
_NOT_COMPARED = re.compile(
    r'\n    "(client\.py|\S+\.(pt|onnx))": .*'
    r'|(?<="config\.pbtxt": ")\w+|(?<=")fp_[a-z0-9-]+'
)
"""Hashes of the client, a copy of a module that has its own tests, and of exported graphs, which
contain the source lines that exported them; what the fingerprint makes of these and of versions,
and so of the configuration, which is compared itself."""
_VERSION = re.compile(r"(?<===)[0-9][0-9a-z.]*|(?<=: \")[0-9]+\.[0-9a-z.]+(?=\")")
_PYTHONS = re.compile(r'(?<="pythons": )\{[^}]*\}')
"""What those versions ask of Python."""
COMPARED = {"config.pbtxt", "llmserve.json", "graph.json", "Dockerfile"}


BUILDS: dict[str, tuple[str, dict[str, Any]]] = {
    "demo": ("hf", {}),
    "demo-iterative": ("iterative", {}),
    "demo-onnx": ("gpt2-onnx", {}),
    "demo-torchscript": ("gpt2-torchscript", {"batching": "sequence-oldest"}),
    "demo-trtllm": ("trtllm", {"layout": "llmapi"}),
}


def build_all(repository: Path) -> None:
    for name, (plugin, options) in BUILDS.items():
        model = one_layer(repository.parent / "one-layer") if "gpt2" in plugin else "demo"
        llmserve.build(plugin, str(model), name=name, output=repository, **options)


def compared_files(folder: Path) -> dict[str, str]:
    return {
        str(path.relative_to(folder)): _NOT_COMPARED.sub("", path.read_text(encoding="utf-8"))
        for path in sorted(folder.rglob("*"))
        if path.name in COMPARED and "tokenizer" not in path.parts
    }


def without_versions(text: str) -> str:
    """Mask the versions of packages, because some depend on the version of Python."""
    return _PYTHONS.sub("*", _VERSION.sub("*", text))


def main() -> None:
    with tempfile.TemporaryDirectory() as scratch:
        build_all(Path(scratch) / "repository")
        files = compared_files(Path(scratch) / "repository")
    shutil.rmtree(GOLDEN, ignore_errors=True)
    for name, text in files.items():
        (GOLDEN / name).parent.mkdir(parents=True, exist_ok=True)
        (GOLDEN / name).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
