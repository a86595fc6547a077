"""The plugin through a real Triton: so many requests at a time."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from llmserve.client import connect_async
from llmserve.testing import LiveTriton

TOKENS = 64


@dataclass(frozen=True)
class Served:
    """A model that answers, and where."""

    url: str
    model: str

    @classmethod
    @contextmanager
    def start(cls, folder: Path, checkpoint: Path, dtype: str, device: str) -> Iterator[Served]:
        with LiveTriton.start(folder / "repository") as live:
            model = live.build("iterative", str(checkpoint), dtype=dtype, device=device)
            yield cls(live.server.grpc_url, model)

    def rate(self, prompts: Sequence[str]) -> float:
        """Return the tokens a second of whole answers, asked for at the same time."""
        return asyncio.run(self._rate(prompts))

    async def _rate(self, prompts: Sequence[str]) -> float:
        asked = {"max_tokens": TOKENS, "ignore_eos": True}
        async with connect_async(self.url, timeout=240) as client:
            # Learn how the model wants to be asked before the clock runs.
            await client.model(self.model)
            begun = time.perf_counter()
            answers = await asyncio.gather(
                *(client.generate(self.model, prompt, **asked) for prompt in prompts)
            )
            seconds = time.perf_counter() - begun
        made = sum(answer.output_tokens or 0 for answer in answers)
        if made != len(prompts) * TOKENS:
            raise RuntimeError(f"{made} tokens came, not {len(prompts) * TOKENS}")
        return made / seconds
