"""A soak of streams through the gateway, in which clients leave and a model is killed and reloaded.

    python -m tests.reliability.streams [--seconds 600] [--clients 24]

Two models are served by `llmserve serve`, with their streams in shared streams. Of the clients, 40
in 100 leave in the middle, and some read slowly. A third into the run one model's process is
killed; after two thirds the other is loaded again. Exits with 1 if a stream has another text than
its answer, hangs, or fails while its model is not down, or if memory grows.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp

from llmserve import build
from llmserve.testing.command import run
from tests.live.servers import Serving

MODELS = {"rescheduled": {}, "threaded": {"batching": "continuous"}}
PROMPTS = [f"Number {number} of the list is" for number in range(24)]
LEAVING, SLOW = 0.4, 0.1
DOWN = 30.0
"""Seconds after a kill or a reload within which requests may fail."""
HANGING = 60.0
MAX_GROWTH = 60 << 20
"""Bytes by which the gateway and the model that is not killed may grow after a tenth of the run."""


@dataclass
class Soak:
    address: str
    expected: dict[tuple[str, str], str] = field(default_factory=dict)
    counts: Counter[str] = field(default_factory=Counter)
    problems: list[str] = field(default_factory=list)
    down: dict[str, float] = field(default_factory=dict)
    """Until when requests to a model may fail."""

    async def client(self, number: int, until: float) -> None:
        chance = random.Random(number)
        async with aiohttp.ClientSession() as session:
            while time.monotonic() < until:
                model, prompt = chance.choice(list(MODELS)), chance.choice(PROMPTS)
                leaves = chance.randint(1, 20) if chance.random() < LEAVING else 0
                pause = 0.05 if chance.random() < SLOW else 0.0
                began = time.monotonic()
                try:
                    text = await asyncio.wait_for(
                        self.read(session, model, prompt, leaves, pause), HANGING
                    )
                except asyncio.TimeoutError:
                    self.problems.append(f"a stream of {model} hung")
                    continue
                self.judge(model, prompt, text, leaves, began)

    async def read(
        self, session: aiohttp.ClientSession, model: str, prompt: str, leaves: int, pause: float
    ) -> str | None:
        """Return the text of a stream, None if it failed."""
        body = {"model": model, "prompt": prompt, "max_tokens": 48, "stream": True}
        text, ended = "", False
        try:
            async with session.post(f"{self.address}/v1/completions", json=body) as response:
                if response.status != 200:
                    return None
                async for line in response.content:
                    if not line.startswith(b"data: ") or line == b"data: [DONE]\n":
                        ended = ended or line.startswith(b"data: [DONE]")
                        continue
                    event = json.loads(line[6:])
                    if "error" in event:
                        return None
                    text += event["choices"][0]["text"] if event["choices"] else ""
                    if leaves and not (leaves := leaves - 1):
                        return text
                    if pause:
                        await asyncio.sleep(pause)
        except aiohttp.ClientError:
            return None
        return text if ended else None

    def judge(self, model: str, prompt: str, text: str | None, leaves: int, began: float) -> None:
        if text is None:
            # The model may have gone down while it answered.
            is_down = self.down.get(model, 0.0) > began
            self.counts["failed while its model was down" if is_down else "failed"] += 1
            if not is_down:
                self.problems.append(f"a stream of {model} failed")
            return
        whole = self.expected[model, prompt]
        if whole != text if not leaves else not whole.startswith(text):
            self.problems.append(f"a stream of {model} has another text: {text!r}, not {whole!r}")
        self.counts["left" if leaves else "read to the end"] += 1


def memory(serve: Serving, program: str) -> int:
    (process,) = serve.processes(program)
    status = Path(f"/proc/{process}/status").read_text(encoding="utf-8")
    return int(status.partition("VmRSS:")[2].split()[0]) << 10


def soak(seconds: float, clients: int, folder: Path) -> list[str]:
    repository = folder / "models"
    for name, options in MODELS.items():
        arguments: dict[str, Any] = {"name": name, "output": repository, **options}
        build("iterative", "demo", **arguments)
    serve = Serving(str(repository), "--log", str(folder / "triton.log"))
    try:
        soaking = Soak(f"http://{serve.frontend[0]}")
        for model in MODELS:
            for prompt in PROMPTS:
                answer = serve.client.generate(model, prompt, max_tokens=48)
                soaking.expected[model, prompt] = answer.text
        asyncio.run(_run(serve, soaking, seconds, clients))
        print(dict(soaking.counts))
        return soaking.problems
    finally:
        serve.stop()
        serve.close()


async def _run(serve: Serving, soaking: Soak, seconds: float, clients: int) -> None:
    began = time.monotonic()
    until = began + seconds
    tasks = [asyncio.ensure_future(soaking.client(n, until)) for n in range(clients)]
    watched = ("llmserve_gateway --url", "models/threaded/1/model.py ")

    async def wait(share: float) -> None:
        await asyncio.sleep(max(0.0, began + seconds * share - time.monotonic()))

    await wait(0.1)
    before = {program: memory(serve, program) for program in watched}
    await wait(1 / 3)
    soaking.down["rescheduled"] = serve.kill_stub("rescheduled") + DOWN
    print("killed the process of rescheduled", flush=True)
    await wait(0.6)
    for program, size in before.items():
        grown = memory(serve, program) - size
        print(f"{program.strip()}: {size >> 20} MB, grown by {grown / 2**20:.1f} MB")
        if grown > MAX_GROWTH:
            soaking.problems.append(f"{program.strip()} grew by {grown >> 20} MB")
    await wait(2 / 3)
    # Nobody may notice: the old process answers what it has begun.
    done = await asyncio.to_thread(run, "reload", "threaded", "--url", serve.url)
    print("reloaded threaded:", done.returncode, done.stderr.strip(), flush=True)
    if done.returncode:
        soaking.problems.append("the model could not be loaded again")
    await asyncio.gather(*tasks)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--clients", type=int, default=24)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        problems = soak(arguments.seconds, arguments.clients, Path(folder))
    for problem, count in Counter(problems).most_common(10):
        print(f"{count} times: {problem}", file=sys.stderr)
    return bool(problems)


if __name__ == "__main__":
    sys.exit(main())
