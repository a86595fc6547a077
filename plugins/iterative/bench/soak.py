"""A soak on a real Triton: a mixed load, 40 of 100 clients leave, and what is left is looked at.

    python bench/soak.py --seconds 600 [--model demo] [--clients 24]

The first half a minute finds out how much can be asked; from then on it is 80 % of that. Prints
how memory, sequences and requests stand over time. Exits with 1 if a request failed, a sequence is
left at the end, or memory grew by over 5 %, or 100 MB, after its first two minutes.
"""

from __future__ import annotations

import argparse
import itertools
import random
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console

from llmserve.errors import LLMServeError, RequestRejectedError
from llmserve.options import parse_assignments
from llmserve.testing import LiveTriton

WORDS = ("Programming", "The capital", "Once upon a time", "weather", "in", "a", "cat", "grüße")
WARM = 120.0
"""Seconds after which memory has no reason to grow any more."""
GROWTH = 0.05
MOST = 100 << 20
SHARE, TRIAL = 0.8, 30.0
"""How much of the peak is asked for, and for so many seconds the peak is looked for."""
PATIENCE = 5.0
"""Seconds after which nothing may be left of those who have gone."""


@dataclass(frozen=True)
class Moment:
    """How things stood so many seconds after the start; memory is in bytes."""

    seconds: float
    model_memory: int
    server_memory: int
    running: int
    answered: int
    cancelled: int
    refused: int
    failed: int


@dataclass
class Report:
    """What a soak saw. ``failures`` has a line for each request that failed and should not."""

    moments: list[Moment] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    left: float = 0.0

    def growth(self) -> float | None:
        """Return by how much the model's memory grew after it was warm, as a part of itself."""
        warm = [moment.model_memory for moment in self.moments if moment.seconds >= WARM]
        return warm[-1] / warm[0] - 1 if len(warm) > 1 else None

    def grown(self) -> int:
        """Return by how many bytes the model and its server grew after they were warm."""
        warm = [m.model_memory + m.server_memory for m in self.moments if m.seconds >= WARM]
        return warm[-1] - warm[0] if warm else 0

    def problems(self) -> list[str]:
        """Return what is wrong, a line each."""
        found = [f"a request failed: {failure}" for failure in self.failures[:5]]
        if len(self.failures) > 5:
            found.append(f"and {len(self.failures) - 5} more failed")
        if self.left:
            found.append(f"{self.left:g} sequences are left when nobody asks any more")
        growth = self.growth()
        if growth is not None and growth > GROWTH:
            found.append(f"memory grew by {growth:.0%} after it was warm")
        if self.grown() > MOST:
            found.append(f"memory grew by {self.grown() >> 20} MB after it was warm")
        return found


class Soak:
    """Clients that ask for all kinds of things, leave at random, and ask again."""

    def __init__(
        self,
        live: LiveTriton,
        model: str,
        *,
        clients: int = 24,
        longest: int = 200,
        seed: int = 0,
        rate: float | None = None,
    ) -> None:
        self._pause = 1 / rate if rate else 0.0
        self._due = 0.0
        self._live, self._model = live, model
        self._clients, self._longest, self._seed = clients, longest, seed
        self._counts = dict.fromkeys(("answered", "cancelled", "refused"), 0)
        self._lock = threading.Lock()
        self._report = Report()

    def run(
        self, seconds: float, *, every: float = 10.0, on_moment: Callable[[Moment], object] = id
    ) -> Report:
        """Ask for so long; tell how things stand every few seconds and when all is over."""
        begun = time.monotonic()
        threads = [
            threading.Thread(target=self._ask_on, args=(number, begun + seconds))
            for number in range(self._clients)
        ]
        for thread in threads:
            thread.start()
        for count in itertools.count(1):
            pause = min(begun + count * every, begun + seconds) - time.monotonic()
            time.sleep(max(0.0, pause))
            on_moment(self._observe(time.monotonic() - begun))
            if time.monotonic() - begun >= seconds:
                break
        for thread in threads:
            thread.join()
        # Who has gone is noticed when nothing comes any more; then nobody may be left.
        patience = time.monotonic() + PATIENCE
        while figure(self._live, self._model, "running_sequences"):
            if time.monotonic() > patience:
                break
            time.sleep(0.1)
        on_moment(last := self._observe(time.monotonic() - begun))
        self._report.left = last.running
        return self._report

    def _ask_on(self, number: int, end: float) -> None:
        chance = random.Random(f"{self._seed} {number}")
        while time.monotonic() < end:
            self._wait_for_turn()
            try:
                what = self._ask(chance)
            except Exception as error:
                with self._lock:
                    self._report.failures.append(f"{type(error).__name__}: {error}")
            else:
                with self._lock:
                    self._counts[what] += 1

    def _wait_for_turn(self) -> None:
        with self._lock:
            self._due = max(self._due + self._pause, time.monotonic())
            due = self._due
        time.sleep(max(0.0, due - time.monotonic()))

    def _ask(self, chance: random.Random) -> str:
        prompt = " ".join(chance.choice(WORDS) for _ in range(chance.randint(1, 60)))
        kind = chance.random()
        if kind < 0.4:
            return self._leave(prompt, chance)
        if kind < 0.45:
            return self._ask_wrongly(prompt, chance)
        options: dict[str, Any] = chance.choice(
            [{}, {"temperature": 0.8}, {"top_p": 0.9}, {"repetition_penalty": 1.2}]
        )
        tokens = chance.randint(1, self._longest // 2)
        options |= {"max_tokens": tokens, "ignore_eos": True}
        client = self._live.client
        if kind < 0.6:
            pieces = client.stream(self._model, prompt, **options)
            made = [piece.output_tokens for piece in pieces][-1]
        else:
            made = client.generate(self._model, prompt, **options).output_tokens
        if made != tokens:
            raise RuntimeError(f"{made} tokens came, not {tokens}")
        return "answered"

    def _leave(self, prompt: str, chance: random.Random) -> str:
        """Ask for a stream and go after some pieces, or right away."""
        patience, tokens = chance.randint(0, 6), chance.randint(1, self._longest)
        pieces = self._live.client.stream(self._model, prompt, max_tokens=tokens, ignore_eos=True)
        for count, _ in enumerate(pieces):
            if count >= patience:
                break
        pieces.close()
        return "cancelled"

    def _ask_wrongly(self, prompt: str, chance: random.Random) -> str:
        wrong: dict[str, Any] = chance.choice(
            [{"max_tokens": -1}, {"temperature": -1.0}, {"max_tokens": 2**31 - 1}]
        )
        try:
            self._live.client.generate(self._model, prompt, **wrong)
        except RequestRejectedError:
            return "refused"
        raise LLMServeError(f"{wrong} was not refused")

    def _observe(self, seconds: float) -> Moment:
        with self._lock:
            moment = Moment(
                seconds,
                memory_of("triton_python_backend_stub", f"/{self._model}/1/model.py"),
                memory_of("bin/tritonserver", str(self._live.repository)),
                int(figure(self._live, self._model, "running_sequences")),
                **self._counts,
                failed=len(self._report.failures),
            )
            self._report.moments.append(moment)
        return moment


def figure(live: LiveTriton, model: str, name: str) -> float:
    """Return one of a model's figures on ``/metrics``."""
    with urllib.request.urlopen(live.server.metrics_url) as answer:
        lines = answer.read().decode().splitlines()
    begin = f'llmserve_{name}{{model="{model}"'
    return next(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(begin))


def memory_of(*marks: str) -> int:
    """Return the resident memory of the process whose command line has all the marks."""
    for process in Path("/proc").glob("[0-9]*"):
        try:
            command = (process / "cmdline").read_bytes().replace(b"\0", b" ").decode()
            status = (process / "status").read_text()
        except OSError:
            continue
        if all(mark in command for mark in marks) and "VmRSS" in status:
            kilobytes = status.split("VmRSS:")[1].split()[0]
            return int(kilobytes) * 1024
    return 0


COLUMNS = ("seconds", "model MB", "server MB", "live", "answered", "left", "refused", "failed")


def line(moment: Moment) -> str:
    values = (
        round(moment.seconds),
        moment.model_memory >> 20,
        moment.server_memory >> 20,
        moment.running,
        moment.answered,
        moment.cancelled,
        moment.refused,
        moment.failed,
    )
    return " ".join(f"{value:>9}" for value in values)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--clients", type=int, default=24)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--set", dest="assignments", action="append", default=[])
    args = parser.parse_args()
    console = Console(highlight=False)
    options = parse_assignments(args.assignments)
    with (
        tempfile.TemporaryDirectory() as folder,
        LiveTriton.start(Path(folder) / "repository") as live,
    ):
        model = live.build("iterative", args.model, **options)
        console.print(" ".join(f"{name:>9}" for name in COLUMNS))
        last = Soak(live, model, clients=args.clients, seed=args.seed).run(TRIAL).moments[-1]
        peak = (last.answered + last.cancelled + last.refused) / last.seconds
        console.print(f"peak: {peak:.1f} requests a second, and from now on {SHARE:.0%} of that")
        soak = Soak(live, model, clients=args.clients, seed=args.seed, rate=SHARE * peak)
        report = soak.run(
            args.seconds,
            every=max(1.0, args.seconds / 20),
            on_moment=lambda moment: console.print(line(moment)),
        )
    if (growth := report.growth()) is not None:
        told = f"the model {growth:+.1%}, with its server {report.grown() / 1e6:+.1f} MB"
        console.print(f"memory after the first two minutes: {told}")
    for problem in report.problems():
        console.print(problem)
    return 1 if report.problems() else 0


if __name__ == "__main__":
    sys.exit(main())
