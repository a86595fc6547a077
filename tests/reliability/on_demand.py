"""A soak of models that are loaded on demand: more of them than there is place for.

    python -m tests.reliability.on_demand [--seconds 300] [--clients 8] [--models 6] [--place 2]

`llmserve serve --on-demand` offers the models and one that fails to load. Clients choose among them
at random, through the gateway, and read whole answers and streams; some leave in the middle with
`--leave`. Exits with 1 if a request fails for another reason than that its model is the broken
one, if Triton ends, or if more models are loaded, or more memory is taken, than may be.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import re
import statistics
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp

from llmserve import build
from llmserve.contract.report import ModelReport, State
from llmserve.server import ask
from llmserve.server.keep.control import running_servers
from tests.live.servers import RAISES, WORDS, Serving, repository

BROKEN = "broken"
HANGING = 240.0
_PROGRAM = "triton_python_backend_stub"
_MODEL = re.compile(r"/models/([^/ ]+)/1/model\.py")
_SAMPLED_EVERY = 0.25
_LEAVES = 0.05


@dataclass
class Usage:
    """What the processes of models take, sampled while they work."""

    most_models: int = 0
    most_bytes: int = 0

    def sample(self, serve: Serving) -> None:
        sizes: Counter[str] = Counter()
        for process, command in serve.processes(_PROGRAM).items():
            match = _MODEL.search(" ".join(command))
            with suppress(OSError, IndexError):
                status = Path(f"/proc/{process}/status").read_text(encoding="utf-8")
                resident = int(status.partition("VmRSS:")[2].split()[0]) << 10
                sizes[match[1] if match else ""] += resident
        self.most_models = max(self.most_models, len(sizes.keys() - {BROKEN}))
        self.most_bytes = max(self.most_bytes, sizes.total())


@dataclass
class Outcome:
    """What clients saw, and what `serve` did."""

    counts: Counter[str] = field(default_factory=Counter)
    problems: list[str] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    """How long the answered requests took."""
    loads: dict[str, list[float]] = field(default_factory=dict)
    """How long each load took."""
    usage: Usage = field(default_factory=Usage)

    def __str__(self) -> str:
        lines = [", ".join(f"{count} {what}" for what, count in self.counts.most_common())]
        waits = sorted(self.seconds) or [0.0]
        lines.append(
            f"answered within {statistics.median(waits):.1f} s (median), "
            f"{waits[int(len(waits) * 0.95)]:.1f} s (95%), {waits[-1]:.1f} s (all)"
        )
        lines.append(
            f"at most {self.usage.most_models} models and {self.usage.most_bytes / 1e6:.0f} MB"
        )
        for name, took in sorted(self.loads.items()):
            lines.append(
                f"{name}: loaded {len(took)} times, in {min(took):.1f} to {max(took):.1f} s, "
                f"median {statistics.median(took):.1f} s"
            )
        return "\n".join(lines)


async def _client(
    address: str, names: list[str], number: int, until: float, outcome: Outcome, leaves: bool
) -> None:
    chance = random.Random(number)
    async with aiohttp.ClientSession() as session:
        while time.monotonic() < until:
            model, stream = chance.choice(names), chance.random() < 0.5
            leaving = leaves and chance.random() < _LEAVES
            began = time.monotonic()
            try:
                said = await asyncio.wait_for(
                    _ask(session, address, model, stream=stream, leaves=leaving), HANGING
                )
            except asyncio.TimeoutError:
                said = "hung"
            except aiohttp.ClientError as error:
                said = f"broke off: {error!r}"
            if said == "answered":
                outcome.seconds.append(time.monotonic() - began)
            refused = said.startswith("503")
            kind = "refused, of the broken model" if model == BROKEN and refused else said
            outcome.counts[kind] += 1
            if kind not in ("answered", "left", "refused, of the broken model"):
                outcome.problems.append(f"{model}: {said}")
            if refused:
                await asyncio.sleep(0.5)


async def _ask(
    session: aiohttp.ClientSession, address: str, model: str, *, stream: bool, leaves: bool
) -> str:
    body = {"model": model, "prompt": "5 0.02", "max_tokens": 16, "stream": stream}
    async with session.post(f"http://{address}/v1/completions", json=body) as response:
        if response.status == 503:
            assert response.headers["retry-after"]
            return f"503 {(await response.json())['error']['message'][:200]}"
        if response.status != 200:
            return f"{response.status} {(await response.text())[:200]}"
        if not stream:
            text = (await response.json())["choices"][0]["text"]
            return "answered" if text else "no text"
        pieces = 0
        async for line in response.content:
            if not line.startswith(b"data: "):
                continue
            if line.startswith(b"data: [DONE]"):
                return "answered" if pieces else "no text"
            event = json.loads(line[6:])
            if "error" in event:
                is_load = event["error"]["code"] == "model_not_loaded"
                return f"{503 if is_load else 'error'} {event['error']['message'][:200]}"
            pieces += 1
            if leaves and pieces > 2:
                return "left"
        return "a stream without an end"


@contextmanager
def _sampled(serve: Serving, usage: Usage) -> Iterator[None]:
    over = threading.Event()

    def sample() -> None:
        while not over.wait(_SAMPLED_EVERY):
            usage.sample(serve)

    thread = threading.Thread(target=sample, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def _status(serve: Serving) -> dict[str, ModelReport]:
    socket = next(p for p, status in running_servers() if status.pid == serve.process.pid)
    return {model.name: model for model in ask(socket, {"do": "status"}).models}


def soak(
    folder: Path,
    place: int,
    seconds: float,
    clients: int,
    *,
    memory: float | None = None,
    leaves: bool = False,
    replicas: int = 1,
) -> Outcome:
    """Let clients ask for the models of a folder at random, of which ``place`` may be loaded."""
    outcome = Outcome()
    names = sorted(path.name for path in folder.iterdir() if (path / "config.pbtxt").is_file())
    options = ["--on-demand", "--max-loaded", str(place)]
    options += ["--memory", str(memory / 1e9)] if memory else []
    options += ["--replicas", str(replicas)]
    serve = Serving(str(folder), *options, "--log", str(folder.parent / "triton.log"))
    try:
        tritons = {*serve.processes("bin/tritonserver")}

        async def run() -> None:
            until = time.monotonic() + seconds
            arguments = (serve.frontend[0], names)
            await asyncio.gather(
                *(_client(*arguments, number, until, outcome, leaves) for number in range(clients))
            )

        with _sampled(serve, outcome.usage):
            asyncio.run(run())
        if {*serve.processes("bin/tritonserver")} != tritons:
            outcome.problems.append("Triton was restarted")
        for name, took in re.findall(r"(\S+): loaded in ([\d.]+) s", serve.output):
            outcome.loads.setdefault(name, []).append(float(took))
        _check(outcome, serve, names, place, memory)
        if outcome.problems:
            print(serve.output)
    finally:
        serve.stop()
        serve.close()
    return outcome


def _check(
    outcome: Outcome, serve: Serving, names: list[str], place: int, memory: float | None
) -> None:
    usage = outcome.usage
    if usage.most_models > place:
        outcome.problems.append(f"{usage.most_models} models were loaded at once")
    if memory is not None and usage.most_bytes > memory:
        outcome.problems.append(f"the models took {usage.most_bytes / 1e6:.0f} MB")
    if missing := {*names} - {BROKEN} - outcome.loads.keys():
        outcome.problems.append(f"never loaded: {', '.join(sorted(missing))}")
    states = _status(serve)
    demands = [demand for name in names if (demand := states[name].demand)]
    if (loaded := sum(demand.loaded for demand in demands)) > place:
        outcome.problems.append(f"{loaded} models are loaded at the end")
    if BROKEN in names and states[BROKEN].state is not State.FAILED:
        outcome.problems.append(f"the broken model is {states[BROKEN].state.value}")


def words(folder: Path, count: int) -> Path:
    """Make models that load in a moment, and a broken one."""
    sources = {f"m{number}": WORDS for number in range(count)}
    return repository(folder / "models", **sources, **{BROKEN: RAISES})


def tiny(folder: Path, count: int) -> Path:
    """Build models with weights, whose processes run torch, and make a broken one."""
    models = folder / "models"
    names = [f"m{number}" for number in range(count)]
    for name in names:
        build("iterative", "demo", name=name, output=models)
    repository(models, **{BROKEN: RAISES})
    return models


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=300)
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--models", type=int, default=6)
    parser.add_argument("--place", type=int, default=2)
    parser.add_argument("--memory", type=float, help="MB that the models may take together")
    parser.add_argument("--replicas", type=int, default=1)
    parser.add_argument("--light", action="store_true", help="models without weights")
    parser.add_argument("--leave", action="store_true", help="let some clients leave")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        make: Callable[[Path, int], Path] = words if arguments.light else tiny
        outcome = soak(
            make(Path(folder), arguments.models), arguments.place, arguments.seconds,
            arguments.clients, memory=arguments.memory and arguments.memory * 1e6,
            leaves=arguments.leave, replicas=arguments.replicas,
        )  # fmt: skip
    print(outcome)
    for problem, count in Counter(outcome.problems).most_common(10):
        print(f"{count} x {problem}")
    return 1 if outcome.problems else 0


if __name__ == "__main__":
    sys.exit(main())
