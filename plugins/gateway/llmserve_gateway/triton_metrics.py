"""What Triton's own metrics tell: all of it, or how full the caches of models are."""

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
_OURS = {"llmserve_cache_used_tokens": "used", "llmserve_cache_tokens": "max"}
_TENSORRT = "nv_trt_llm_kv_cache_block_metrics"
_SAMPLE = re.compile(r'([\w:]+)(?:\{(.*)\})? ([^"}]+)')


def scrape(url: str, seconds: float) -> str:
    # No proxy: Triton is beside us.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(url, timeout=seconds) as answer:
        return str(answer.read().decode())


async def scrape_all(
    urls: Sequence[str], seconds: float = _SCRAPE_SECONDS
) -> list[str | BaseException]:
    """Return the page of each, or why there is none."""
    asked = [asyncio.to_thread(scrape, url, seconds) for url in urls]
    return await asyncio.gather(*asked, return_exceptions=True)


def joined(pages: Mapping[str, str]) -> str:
    """Join pages of metrics, and say of each sample whose it is: of which ``replica``."""
    families: dict[str, dict[str, None]] = {}
    for replica, page in pages.items():
        lines: dict[str, None] = {}
        for line in page.splitlines():
            if line.startswith("#"):
                # What belongs to a metric has to stand together; its head stands there once.
                lines = families.setdefault(line.split()[2], {})
                lines[line] = None
            elif sample := _SAMPLE.fullmatch(line):
                name, labels, value = sample.groups()
                lines[f'{name}{{{labels + "," if labels else ""}replica="{replica}"}} {value}'] = (
                    None
                )
    return "".join(f"{line}\n" for lines in families.values() for line in lines)


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
    """Asks Tritons twice a second at most: endpoint pickers ask twenty times."""

    def __init__(self, urls: Sequence[str]) -> None:
        self._urls = urls
        self._asked = 0.0
        self._found: dict[str, float] = {}

    async def read(self) -> dict[str, float]:
        if self._urls and time.monotonic() - self._asked > _FRESH_SECONDS:
            self._asked = time.monotonic()
            pages = await scrape_all(self._urls, _QUICK_SECONDS)
            # Of several the mean, each counted by its size.
            text = "\n".join(page for page in pages if isinstance(page, str))
            try:
                self._found = cache_use(text)
            except ValueError:
                self._found = {}
        return self._found
