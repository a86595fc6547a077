"""Three packages in one model: the suite, who is recorded, and what is said when one is gone."""

from __future__ import annotations

from pathlib import Path

import llmserve
from llmserve.testing import RecipeConformance
from tests.support import run


class TestMixed(RecipeConformance):
    recipe = "mixed"


def test_every_package_that_takes_part_is_recorded(tmp_path: Path) -> None:
    built = llmserve.build("mixed", "demo", output=tmp_path)
    manifest = built.manifest
    assert {"llmserve-iterative", "llmserve-mixed", "llmserve-tokens"} <= manifest.packages.keys()
    assert (manifest.options["max_batch_size"], manifest.options["stream"]) == (16, True)


def test_a_part_that_is_gone_is_named(tmp_path: Path) -> None:
    words = ["build", "--plugin", "mixed", "--model", "demo", "--output", str(tmp_path / "repo")]
    done = run(*words, LLMSERVE_BLOCK_PLUGINS="tokens")
    assert done.returncode == 3
    assert "tokenizer" in done.stderr
    assert "'tokenizers'" in done.stderr
    assert "mixed" in done.stderr
    assert done.stderr.count("\n") == 1
