from __future__ import annotations

from collections.abc import Iterator

import pytest

from llmserve.testing import LiveTriton

from .process import Gateway


@pytest.fixture(scope="package")
def gateway(triton: LiveTriton) -> Iterator[Gateway]:
    process = Gateway(triton)
    yield process
    assert process.stop() == 0


@pytest.fixture(scope="package")
def model(triton: LiveTriton) -> str:
    return triton.build("hf")
