"""Which models an embedded server answers with a stand-in for their backend."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path


def stand_ins(repository: Path, models: Iterable[str]) -> list[str]:
    """Say for which models a backend written in Python stands in, a line for each backend.

    The embedded Triton brings no other backend than Python's.
    """
    from llmserve import modelconfig
    from llmserve.errors import ConfigError
    from llmserve.server.embedded import STAND_INS

    known = {path.parent.name for path in STAND_INS.glob("*/model.py")}
    found: dict[str, list[str]] = {}
    for model in sorted(models):
        try:
            config = modelconfig.read(repository / model)
        except ConfigError:
            continue
        # A platform names its backend first: pytorch_libtorch, onnxruntime_onnx.
        backend = config.backend or config.platform.partition("_")[0]
        if backend in known:
            found.setdefault(backend, []).append(model)
    return [
        f"stand-in for the backend {backend}, in Python: {', '.join(names)}"
        for backend, names in found.items()
    ]
