"""Tests of what the recipe builds: no server."""

from __future__ import annotations

from pathlib import Path

import llmserve
from llmserve.testing import read_config


def test_it_streams_in_batches_of_sixteen(tmp_path: Path) -> None:
    result = llmserve.build("scaffold", "demo", output=tmp_path)
    config = read_config(result.folder)
    assert config.max_batch_size == 16
    assert config.model_transaction_policy.decoupled
    assert result.manifest.exchange == "stream"


def test_its_defaults_can_be_overridden(tmp_path: Path) -> None:
    result = llmserve.build(
        "scaffold",
        "demo",
        output=tmp_path,
        max_batch_size=2,
    )
    assert read_config(result.folder).max_batch_size == 2


def test_it_needs_the_package_that_it_comes_from(tmp_path: Path) -> None:
    result = llmserve.build("scaffold", "demo", output=tmp_path)
    assert "llmserve-scaffold" in result.manifest.packages
