"""What builds of the demo model write, kept to be read and compared.

``tests/golden`` has their configurations and manifests. All other files are in the manifests by
their hashes. After a change that is meant, ``python -m tests.contract.golden`` writes it again.
"""

from __future__ import annotations

import re
import shutil
import tempfile
from pathlib import Path
from typing import Any

import llmserve
from tests.support import one_layer

GOLDEN = Path(__file__).parents[1] / "golden"
_NOT_COMPARED = re.compile(r'\n    "(client\.py|\S+\.(pt|onnx))": .*')
"""The client is a module of ours as it stands, which other tests are about; exported graphs have
the lines of the code in them that exported them."""
_VERSION = re.compile(r"(?<===)[0-9.]+|(?<=: \")[0-9]+\.[0-9.]+(?=\")")
KEPT = {"config.pbtxt", "llmserve.json", "graph.json", "Dockerfile"}


BUILDS: dict[str, tuple[str, dict[str, Any]]] = {
    "demo": ("hf", {}),
    "demo-iterative": ("iterative", {}),
    "demo-onnx": ("gpt2-onnx", {}),
    "demo-torchscript": ("gpt2-torchscript", {"batching": "sequence-oldest"}),
    "demo-trtllm": ("trtllm", {"layout": "llmapi"}),
}


def build_all(repository: Path) -> None:
    for name, (plugin, asked) in BUILDS.items():
        model = one_layer(repository.parent / "one-layer") if "gpt2" in plugin else "demo"
        llmserve.build(plugin, str(model), name=name, output=repository, **asked)


def kept(folder: Path) -> dict[str, str]:
    return {
        str(path.relative_to(folder)): _NOT_COMPARED.sub("", path.read_text(encoding="utf-8"))
        for path in sorted(folder.rglob("*"))
        if path.name in KEPT and "tokenizer" not in path.parts
    }


def without_versions(text: str) -> str:
    """Leave out the versions of packages: some are others with another Python."""
    return _VERSION.sub("*", text)


def main() -> None:
    with tempfile.TemporaryDirectory() as scratch:
        build_all(Path(scratch) / "repository")
        files = kept(Path(scratch) / "repository")
    shutil.rmtree(GOLDEN, ignore_errors=True)
    for name, text in files.items():
        (GOLDEN / name).parent.mkdir(parents=True, exist_ok=True)
        (GOLDEN / name).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
