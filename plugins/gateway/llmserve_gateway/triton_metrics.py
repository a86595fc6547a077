"""What Triton's own metrics tell: all of it, or how full the caches of models are."""

from __future__ import annotations

import asyncio
import time
import urllib.request

from prometheus_client.parser import text_string_to_metric_families

_SCRAPE_SECONDS = 5.0
_QUICK_SECONDS = 1.0
_FRESH_SECONDS = 0.5
_OURS = {"llmserve_cache_used_tokens": "used", "llmserve_cache_tokens": "max"}
_TENSORRT = "nv_trt_llm_kv_cache_block_metrics"


def scrape(url: str, seconds: float = _SCRAPE_SECONDS) -> bytes:
    # No proxy: Triton is beside us.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(url, timeout=seconds) as answer:
        return bytes(answer.read())


def cache_use(text: str) -> dict[str, float]:
    """Return how much of its cache each model uses, from 0 to 1, where it tells that."""
    told = [line for line in text.splitlines() if line.startswith((*_OURS, _TENSORRT))]
    found: dict[str, dict[str, float]] = {}
    for family in text_string_to_metric_families("\n".join(told)):
        for name, labels, value, *_ in family.samples:
            kind = _OURS.get(name) or labels.get("kv_cache_block_type", "")
            each = found.setdefault(labels.get("model", ""), {"used": 0.0, "max": 0.0})
            each[kind] = each.get(kind, 0.0) + value
    # Who does not know the size of its cache says 0.
    return {model: each["used"] / each["max"] for model, each in found.items() if each["max"] > 0}


class CacheUse:
    """Asks Triton twice a second at most: endpoint pickers ask twenty times."""

    def __init__(self, url: str | None) -> None:
        self._url = url
        self._asked = 0.0
        self._found: dict[str, float] = {}

    async def read(self) -> dict[str, float]:
        if self._url and time.monotonic() - self._asked > _FRESH_SECONDS:
            self._asked = time.monotonic()
            try:
                text = await asyncio.to_thread(scrape, self._url, _QUICK_SECONDS)
                self._found = cache_use(text.decode())
            except (OSError, ValueError):
                self._found = {}
        return self._found
