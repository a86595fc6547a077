"""Fixtures: the real models as folders, and what the chat model answers by itself."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.real.model import NotHad, converted_model, real_encoder, real_model, trained_adapter
from tests.real.reference import Reference


@pytest.fixture(scope="session")
def real_file() -> Path:
    """The GGUF file. Without it, CI fails before it runs any test; elsewhere these are skipped."""
    try:
        return real_model()
    except NotHad as error:
        pytest.skip(f"the real model cannot be had: {error}")


@pytest.fixture(scope="session")
def real_folder(real_file: Path) -> Path:
    del real_file
    return converted_model()


@pytest.fixture(scope="session")
def sql_adapter(real_file: Path) -> Path:
    """An adapter of the real model, with which it answers with SQL."""
    del real_file
    return trained_adapter()


@pytest.fixture(scope="session")
def encoder_folder() -> Path:
    """The folder of the encoder; skipped as the others."""
    try:
        return real_encoder()
    except NotHad as error:
        pytest.skip(f"the real encoder cannot be had: {error}")


@pytest.fixture(scope="session")
def reference(real_folder: Path) -> Reference:
    return Reference(real_folder)
