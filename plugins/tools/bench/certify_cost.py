"""What `serve --certify` costs users: latencies with it and without it, measured in turns.

    python -m plugins.tools.bench.certify_cost [--turns 6] [--seconds 60] [--share 0.01] [--real]

Each turn starts a `serve` of its own, so that what one of them does while it is idle never slows
the other; which comes first changes from turn to turn. Users think between their requests, so that
the model has nothing to do now and then, which is when it is asked. Printed are the 50th and the
95th percentile of each turn, the ratios, and those of all turns together with what chance alone
would do to them: the ratios of turns without it to one another.
"""

from __future__ import annotations

import argparse
import itertools
import random
import tempfile
import threading
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

import llmserve
from llmserve.server import ask, find_servers
from tests.live.servers import Serving, eventually, fetch

_MODEL = "certified"
_TOKENS, _USERS, _THINKS = 32, 2, 2.0
_PROMPTS = ("Once upon a time", "The evening was", "A model server is", "In a small town")


@dataclass(frozen=True)
class Turn:
    """What one `serve` has shown: the seconds of each request, and how often it was asked."""

    latencies: tuple[float, ...]
    checks: int = 0
    judged: int = 0

    def percentile(self, part: float) -> float:
        return float(np.percentile(self.latencies, part))


def measure(folder: Path, seconds: float, words: list[str], seed: int) -> Turn:
    """Serve a model, have users ask it for a while, and return what they waited."""
    serving = Serving(str(folder), *words)
    try:
        if words:
            eventually(lambda: _certificate(folder)["known"] > 0, 240)
        _ask(serving, 0)
        before = _certificate(folder)
        found: list[float] = []
        until = time.monotonic() + seconds

        def use(number: int) -> None:
            chance = random.Random(f"{seed} {number}")
            while time.monotonic() < until:
                time.sleep(chance.expovariate(1 / _THINKS))
                began = time.perf_counter()
                _ask(serving, chance.randrange(1000))
                found.append(time.perf_counter() - began)

        users = [threading.Thread(target=use, args=(number,)) for number in range(_USERS)]
        for user in users:
            user.start()
        for user in users:
            user.join()
        after = _certificate(folder)
        if after["faults"]:
            raise SystemExit(f"a false alarm: {after}")
        return Turn(
            tuple(found), after["checks"] - before["checks"], after["judged"] - before["judged"]
        )
    finally:
        serving.close()


def _ask(serving: Serving, number: int) -> None:
    prompt = f"{_PROMPTS[number % len(_PROMPTS)]} {number}"
    body = {"model": _MODEL, "prompt": prompt, "max_tokens": _TOKENS, "ignore_eos": True}
    fetch(f"http://{serving.frontend[0]}/v1/completions", body)


def _certificate(folder: Path) -> dict[str, int]:
    (server,) = find_servers(repository=folder)
    model = ask(server.socket, {"do": "status"}).to_json()["models"][0]
    nothing = {"known": 0, "checks": 0, "faults": 0, "judged": 0}
    return {**nothing, **model.get("certificate", {})}


def _joined(turns: list[Turn]) -> Turn:
    return Turn(tuple(itertools.chain.from_iterable(turn.latencies for turn in turns)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--turns", type=int, default=6, help="of each of the two")
    parser.add_argument("--seconds", type=float, default=60.0, help="of each turn")
    parser.add_argument("--share", type=float, default=0.01, help="of answers that are judged")
    parser.add_argument("--real", action="store_true", help="the real chat model, not the demo")
    args = parser.parse_args()
    certify = ["--certify", "--certify-share", str(args.share)]
    without: list[Turn] = []
    certified: list[Turn] = []
    console, table = Console(), Table("turn", "requests", "asked", "p50", "p95", "p50 to", "p95 to")
    with tempfile.TemporaryDirectory() as folder:
        repository, source = Path(folder) / "repository", "demo"
        if args.real:
            from tests.real.model import converted_model

            source = str(converted_model())
        llmserve.build("iterative", source, output=repository, name=_MODEL)
        for number in range(args.turns):
            kinds: list[tuple[list[str], list[Turn]]] = [([], without), (certify, certified)]
            for words, turns in kinds[:: 1 if number % 2 == 0 else -1]:
                turns.append(measure(repository, args.seconds, words, number))
            one, other = without[-1], certified[-1]
            _row(table, f"{number + 1} without", one, one)
            _row(table, f"{number + 1} certified", other, one)
            console.print(f"turn {number + 1}: {other.percentile(95) / one.percentile(95):.3f}")
    _row(table, "all without", _joined(without), _joined(without))
    _row(table, "all certified", _joined(certified), _joined(without))
    console.print(table)
    pairs = list(itertools.permutations(without, 2))
    by_chance = [one.percentile(95) / other.percentile(95) for one, other in pairs]
    if by_chance:
        console.print(f"p95 of two turns without: {min(by_chance):.3f} to {max(by_chance):.3f}")


def _row(table: Table, name: str, turn: Turn, other: Turn) -> None:
    asked = f"{turn.checks} + {turn.judged}" if turn.checks else ""
    times = [f"{turn.percentile(part) * 1000:.1f} ms" for part in (50, 95)]
    ratios = [f"{turn.percentile(part) / other.percentile(part):.3f}" for part in (50, 95)]
    table.add_row(name, str(len(turn.latencies)), asked, *times, *ratios)


if __name__ == "__main__":
    main()
