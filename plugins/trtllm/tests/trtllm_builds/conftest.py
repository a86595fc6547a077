"""Builds that several tests read: each is made once."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from llmserve.plugin import ModelConfig

from .building import build

Built = Callable[..., dict[str, ModelConfig]]


@pytest.fixture(scope="session")
def built(tmp_path_factory: pytest.TempPathFactory) -> Built:
    """Lend a function that builds for a version and returns the configurations."""
    made: dict[str, dict[str, ModelConfig]] = {}

    def configurations(version: str, **options: Any) -> dict[str, ModelConfig]:
        key = json.dumps([version, options], sort_keys=True)
        if key not in made:
            made[key] = build(tmp_path_factory.mktemp("build"), version, **options)
        return made[key]

    return configurations
