"""What the gateway learns from the `serve` that has started it."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from llmserve.server.control import listening
from llmserve_gateway.catalog import Catalog
from llmserve_gateway.metrics import Metrics
from llmserve_gateway.replicas import Replicas

DEAD = {"name": "m", "state": "restarting", "why": "its process has died", "restarts": 1}


async def answer(request: Mapping[str, Any]) -> Mapping[str, Any]:
    assert request == {"do": "status"}
    return {"models": [DEAD]}


def nobody() -> Replicas:
    raise AssertionError("Triton is not asked")


def test_it_knows_which_models_are_dead_and_shows_it(tmp_path: Path) -> None:
    catalog, metrics = Catalog(nobody, supervisor=tmp_path / "sock"), Metrics()

    async def meet() -> None:
        assert await catalog.supervised() == [], "nobody is there yet"
        async with listening(tmp_path / "sock", answer):
            found = await catalog.supervised()
        assert found == [DEAD]
        metrics.show([], found, {})

    asyncio.run(meet())
    assert b'llmserve_model_ready{model_name="m"} 0.0' in metrics.text()
    assert b'llmserve_model_restarts{model_name="m"} 1.0' in metrics.text()
    assert asyncio.run(Catalog(nobody).supervised()) == []
