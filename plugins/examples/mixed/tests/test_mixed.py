"""Three packages in one model: conformance, the manifest, and the error if one is missing."""

from __future__ import annotations

from pathlib import Path

import llmserve
from llmserve.testing import RecipeConformance, run


class TestMixed(RecipeConformance):
    recipe = "mixed"


def test_every_package_involved_is_recorded(tmp_path: Path) -> None:
    built = llmserve.build("mixed", "demo", output=tmp_path)
    manifest = built.manifest
    assert {"llmserve-iterative", "llmserve-mixed", "llmserve-tokens"} <= manifest.packages.keys()
    assert (manifest.options["max_batch_size"], manifest.options["stream"]) == (16, True)


def test_a_missing_part_is_named(tmp_path: Path) -> None:
    command = ["build", "--plugin", "mixed", "--model", "demo", "--output", str(tmp_path / "repo")]
    result = run(*command, LLMSERVE_BLOCK_PLUGINS="tokens")
    assert result.returncode == 3
    assert "tokenizer" in result.stderr
    assert "'tokenizers'" in result.stderr
    assert "mixed" in result.stderr
    assert result.stderr.count("\n") == 1
