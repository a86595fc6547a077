"""Triton's own metrics: the complete pages, and the cache usage of models."""

from __future__ import annotations

import asyncio
import re
import time
import urllib.request
from collections.abc import Mapping, Sequence

from prometheus_client.parser import text_string_to_metric_families

_SCRAPE_SECONDS = 5.0
_QUICK_SECONDS = 1.0
_FRESH_SECONDS = 0.5
_LLMSERVE = {"llmserve_cache_used_tokens": "used", "llmserve_cache_tokens": "max"}
_TENSORRT = "nv_trt_llm_kv_cache_block_metrics"
_SAMPLE = re.compile(r'([\w:]+)(?:\{(.*)\})? ([^"}]+)')


def scrape(url: str, seconds: float) -> str:
    # No proxy: Triton runs next to the gateway.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(url, timeout=seconds) as response:
        return str(response.read().decode())


async def scrape_all(
    urls: Sequence[str], seconds: float = _SCRAPE_SECONDS
) -> list[str | BaseException]:
    """Return each page, or the exception that prevented it."""
    scrapes = [asyncio.to_thread(scrape, url, seconds) for url in urls]
    return await asyncio.gather(*scrapes, return_exceptions=True)


def join_pages(pages: Mapping[str, str]) -> str:
    """Join pages of metrics, and label each sample with its ``replica``."""
    families: dict[str, dict[str, None]] = {}
    for replica, page in pages.items():
        lines: dict[str, None] = {}
        for line in page.splitlines():
            if line.startswith("#"):
                # The samples of a metric must be contiguous, below a single header.
                lines = families.setdefault(line.split()[2], {})
                lines[line] = None
            elif sample := _SAMPLE.fullmatch(line):
                name, labels, value = sample.groups()
                lines[f'{name}{{{labels + "," if labels else ""}replica="{replica}"}} {value}'] = (
                    None
                )
    return "".join(f"{line}\n" for lines in families.values() for line in lines)


def cache_usage(text: str) -> dict[str, float]:
    """Return the fraction of its cache that each model uses, if it reports that."""
    samples = [line for line in text.splitlines() if line.startswith((*_LLMSERVE, _TENSORRT))]
    caches: dict[str, dict[str, float]] = {}
    for family in text_string_to_metric_families("\n".join(samples)):
        for name, labels, value, *_ in family.samples:
            kind = _LLMSERVE.get(name) or labels.get("kv_cache_block_type", "")
            cache = caches.setdefault(labels.get("model", ""), {"used": 0.0, "max": 0.0})
            cache[kind] = cache.get(kind, 0.0) + value
    # A model that does not know the size of its cache reports 0.
    known = {model: cache for model, cache in caches.items() if cache["max"] > 0}
    return {model: cache["used"] / cache["max"] for model, cache in known.items()}


class CacheUsage:
    """Scrapes Tritons at most twice a second: endpoint pickers ask twenty times a second."""

    def __init__(self, urls: Sequence[str]) -> None:
        self._urls = urls
        self._scraped = 0.0
        self._usage: dict[str, float] = {}

    async def read(self) -> dict[str, float]:
        if self._urls and time.monotonic() - self._scraped > _FRESH_SECONDS:
            self._scraped = time.monotonic()
            pages = await scrape_all(self._urls, _QUICK_SECONDS)
            # Over several replicas this is the mean, weighted by the size of each cache.
            text = "\n".join(page for page in pages if isinstance(page, str))
            try:
                self._usage = cache_usage(text)
            except ValueError:
                self._usage = {}
        return self._usage
