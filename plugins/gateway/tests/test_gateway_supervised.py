"""The model states that the gateway gets from the `serve` process that started it."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from llmserve.server.control import listening
from llmserve_gateway.catalog import Catalog
from llmserve_gateway.metrics import Metrics
from llmserve_gateway.replicas import Replicas

DEAD_MODEL = {"name": "m", "state": "restarting", "why": "its process has died", "restarts": 1}


async def report_status(request: Mapping[str, Any]) -> Mapping[str, Any]:
    assert request == {"do": "status"}
    return {"models": [DEAD_MODEL]}


def unused_client() -> Replicas:
    raise AssertionError("the gateway must not ask Triton")


def test_it_learns_which_models_are_dead_and_reports_them(tmp_path: Path) -> None:
    catalog, metrics = Catalog(unused_client, supervisor=tmp_path / "sock"), Metrics()

    async def query() -> None:
        assert await catalog.supervised() == [], "nothing listens on the socket yet"
        async with listening(tmp_path / "sock", report_status):
            models = await catalog.supervised()
        assert models == [DEAD_MODEL]
        metrics.update([], models, {})

    asyncio.run(query())
    assert b'llmserve_model_ready{model_name="m"} 0.0' in metrics.text()
    assert b'llmserve_model_restarts{model_name="m"} 1.0' in metrics.text()
    assert asyncio.run(Catalog(unused_client).supervised()) == []
