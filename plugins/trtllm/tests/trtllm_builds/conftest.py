"""Builds that several tests share; each is built once."""

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
    """Return a function that builds for a version and returns the configurations."""
    cache: dict[str, dict[str, ModelConfig]] = {}

    def configurations(version: str, **options: Any) -> dict[str, ModelConfig]:
        key = json.dumps([version, options], sort_keys=True)
        if key not in cache:
            cache[key] = build(tmp_path_factory.mktemp("build"), version, **options)
        return cache[key]

    return configurations
