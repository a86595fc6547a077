"""The layout for the client of Triton's tutorial on iterative scheduling."""

from __future__ import annotations

from pathlib import Path

import llmserve


def test_the_tutorials_layout_streams_single_steps(tmp_path: Path) -> None:
    built = llmserve.build("iterative", "demo", output=tmp_path, layout="tutorial")
    components = built.manifest.components
    assert components["batching"]["settings"]["burst_ms"] == 0.0
    assert built.manifest.contract["defaults"]["stream"] is True
    # Whoever gives one of them keeps it.
    again = llmserve.build(
        "iterative", "demo", output=tmp_path, layout="tutorial", burst_ms=4.0, force=True
    )
    assert again.manifest.components["batching"]["settings"]["burst_ms"] == 4.0
