"""Streams through Triton: tokens a second, gaps between pieces, processor time."""

from __future__ import annotations

import asyncio
import os
import resource
import time
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from statistics import quantiles
from typing import Any

from llmserve.client import AsyncClient, connect_async
from llmserve.testing import LiveTriton
from plugins.tools.bench.shapes import SMALL, Prompts, make_model

from .common import Settings, save, settings

_TICKS = os.sysconf("SC_CLK_TCK")


def main() -> None:
    given = settings()
    shape = SMALL if given.quick else "92m"
    dtype = "bfloat16" if given.cuda else "float32"
    counts, tokens = ((2, 4), 12) if given.quick else ((1, 8, 64, 256), 128)
    checkpoint = save(make_model(shape, dtype), given.folder / shape)
    given.results.table(f"Streams of {tokens} tokens, {shape}, {dtype}")
    with LiveTriton.start(given.folder / "repository") as triton:
        for batching in ("continuous", "iterative"):
            with given.results.attempt(batching):
                name = triton.build(
                    "iterative", str(checkpoint), device=given.device, dtype=dtype,
                    batching=batching, max_batch_size=max(counts),
                    cache_tokens=256 * max(counts),
                )  # fmt: skip
                measure(given, triton, name, f"iterative, {batching}", counts, tokens)


def measure(
    given: Settings, triton: LiveTriton, name: str, label: str, counts: Sequence[int], tokens: int
) -> None:
    prompts = Prompts()
    asyncio.run(run(triton, name, prompts, counts[-1], tokens))
    for count in counts:
        before, own = processor_seconds(triton.server.pid), resource.getrusage(resource.RUSAGE_SELF)
        started = time.perf_counter()
        arrivals = asyncio.run(run(triton, name, prompts, count, tokens))
        passed = time.perf_counter() - started
        taken = processor_seconds(triton.server.pid) - before
        now = resource.getrusage(resource.RUSAGE_SELF)
        client = now.ru_utime + now.ru_stime - own.ru_utime - own.ru_stime
        gaps = [1000 * (b - a) for times in arrivals for a, b in pairwise(times)]
        cuts = quantiles(gaps, n=100) if len(gaps) > 1 else [0.0] * 99
        pieces = sum(map(len, arrivals))
        given.results.add(
            f"{label}, {count} at once",
            pieces > 0,
            tokens_a_second=f"{count * tokens / passed:.0f}",
            tokens_a_piece=f"{count * tokens / pieces:.2f}",
            gap_ms_median=f"{cuts[49]:.1f}",
            gap_ms_99th=f"{cuts[98]:.1f}",
            first_ms=f"{1000 * max(times[0] - started for times in arrivals):.0f}",
            server_ms_of_processor_a_token=f"{1000 * taken / (count * tokens):.3f}",
            client_ms=f"{1000 * client / (count * tokens):.3f}",
        )


async def run(
    triton: LiveTriton, name: str, prompts: Prompts, count: int, tokens: int
) -> list[list[float]]:
    """Return when the pieces of each stream arrived."""
    client: AsyncClient = connect_async(triton.server.grpc_url, timeout=300)
    try:
        texts = [Prompts.text(ids) for ids in prompts.ids(count)]
        options: dict[str, Any] = {"max_tokens": tokens, "ignore_eos": True}

        async def read(text: str) -> list[float]:
            times, made = [], 0
            async for piece in client.stream(name, text, **options):
                times.append(time.perf_counter())
                made = piece.output_tokens or made
            if made != tokens:
                raise RuntimeError(f"a stream ended after {made} of {tokens} tokens")
            return times

        return await asyncio.gather(*(read(text) for text in texts))
    finally:
        await client.close()


def processor_seconds(group: int) -> float:
    """Return the processor time of all processes of Triton's group: itself and its models."""
    total = 0
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[2]) == group:
            total += int(fields[11]) + int(fields[12])
    return total / _TICKS


if __name__ == "__main__":
    main()
