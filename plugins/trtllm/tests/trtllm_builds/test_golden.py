"""The configurations that are checked in are what build emits, for each version and way.

When a change alters them on purpose, run this file with ``REWRITE=1`` and look at the difference.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from .building import build

GOLDEN = Path(__file__).with_name("golden")
BUILDS: dict[str, tuple[str, dict[str, Any]]] = {
    "0.5.0-static": ("0.5.0", {"batching": "static"}),
    "0.19": ("0.19.0", {"decoupled": False}),
    "1.2-decoupled": ("1.2.1", {}),
    "1.2-llmapi-static": ("1.2.1", {"layout": "llmapi", "batching": "static"}),
}


def emitted(repository: Path) -> dict[str, str]:
    files = sorted(repository.rglob("config.pbtxt"))
    return {path.relative_to(repository).as_posix(): path.read_text() for path in files}


@pytest.mark.parametrize("name", BUILDS)
def test_what_is_checked_in_is_what_build_emits(tmp_path: Path, name: str) -> None:
    version, options = BUILDS[name]
    if options.get("layout") != "llmapi":
        options = {**options, "engine_at": "/engines/demo"}
    build(tmp_path, version, **options)
    built = emitted(tmp_path / version)
    if os.environ.get("REWRITE"):
        shutil.rmtree(GOLDEN / name, ignore_errors=True)
        for path, text in built.items():
            (GOLDEN / name / path).parent.mkdir(parents=True, exist_ok=True)
            (GOLDEN / name / path).write_text(text)
    assert built == emitted(GOLDEN / name)
    assert any(path.startswith("tensorrt_llm/") for path in built)
