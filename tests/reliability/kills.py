"""Kill and stop every process of a `serve`, alone and in pairs: python -m tests.reliability.kills.

After each, the server must serve again, or end and say why. A table shows what happened and when.
The arguments are the cases to run, by default all of them: "kill guard+gateway" "stop triton".
"""

from __future__ import annotations

import json
import os
import signal
import sys
import tempfile
import time
import urllib.request
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from http.client import HTTPException
from itertools import combinations
from pathlib import Path
from typing import Any

from llmserve.server.run.guard import state_of
from llmserve.testing.command import run
from tests.live.servers import WORDS, Serving, eventually, repository

PROCESSES = ("stub", "triton", "guard", "gateway", "gateway_guard")
"""``guard`` is Triton's; the gateway has one of its own."""
RECOVERY = 120.0
"""Seconds within which everything must be over; a hung Triton takes longest."""
LANES = 4
_ROW = "  {:<30}{:>10}{:>10}{:>8}  {}"


@dataclass(frozen=True)
class Case:
    """The processes that get a signal at the same moment."""

    number: signal.Signals
    victims: tuple[str, ...]

    def __str__(self) -> str:
        return f"{'stop' if self.number == signal.SIGSTOP else 'kill'} {'+'.join(self.victims)}"


CASES = (
    *(Case(signal.SIGKILL, (name,)) for name in PROCESSES),
    *(Case(signal.SIGKILL, pair) for pair in combinations(PROCESSES, 2)),
    *(Case(signal.SIGSTOP, (name,)) for name in PROCESSES),
)


@dataclass(frozen=True)
class Outcome:
    """When `serve` reported the case and served again, how it ended, and what was wrong."""

    noticed: float | None
    serving: float | None
    stopped: float
    said: str
    problem: str = ""


def find(serve: Serving) -> dict[str, int]:
    """Return the process of each name."""
    guards = serve.processes("run/guard.py")
    found = {
        "stub": list(serve.processes("models/words/1/model.py ")),
        "triton": list(serve.processes("bin/tritonserver")),
        "guard": [pid for pid, command in guards.items() if serve.name in command],
        "gateway": list(serve.processes("llmserve_gateway --url")),
        "gateway_guard": [pid for pid, command in guards.items() if serve.name not in command],
    }
    return {name: pids[0] for name, pids in found.items()}


def answers(serve: Serving) -> bool:
    """Return whether a request through the gateway gets its answer."""
    body = json.dumps({"model": "words", "prompt": "1", "max_tokens": 4}).encode()
    request = urllib.request.Request(f"http://{serve.frontend[0]}/v1/completions", body)
    # At its port another server may be, of the case beside it, until its own listens again.
    expected = (OSError, ValueError, HTTPException)
    with suppress(*expected), urllib.request.urlopen(request, timeout=5) as response:
        return bool(json.loads(response.read())["choices"][0]["text"] == "word ")
    return False


def gone(process: int) -> bool:
    return state_of(process)[:1] in ([], ["Z"], ["X"])


def recovered(serve: Serving, victims: Sequence[int]) -> bool:
    """Return whether it serves without the victims; a stopped guard may stay as it is."""
    return all(map(gone, victims)) and answers(serve)


def run_case(case: Case, folder: Path) -> Outcome:
    """Start a `serve`, do it harm, wait until it serves, and stop it."""
    log = str(folder / "triton.log")
    serve = Serving(str(repository(folder, words=WORDS)), "--log", log)
    try:
        eventually(lambda: answers(serve))
        processes = find(serve)
        harmed = time.monotonic()
        for name in case.victims:
            os.kill(processes[name], case.number)
        harmless = case.number == signal.SIGSTOP and all("guard" in name for name in case.victims)
        victims = [] if harmless else [processes[name] for name in case.victims]
        return _watch(serve, victims, harmed)
    finally:
        serve.close()


def _watch(serve: Serving, victims: Sequence[int], harmed: float) -> Outcome:
    problem, serving = "", None
    with suppress(AssertionError):
        eventually(lambda: serve.process.poll() is not None or recovered(serve, victims), RECOVERY)
        serving = time.monotonic() - harmed
    lines = [(when, line) for when, line in list(serve.lines) if when >= harmed]
    noticed = min((when - harmed for when, line in lines if "restarting" in line), default=None)
    if serve.process.poll() is not None:
        said = lines[-1][1] if lines else ""
        return Outcome(noticed, None, 0.0, said, "" if "(" in said else "it ended without a reason")
    if serving is None:
        problem = f"it did not serve within {RECOVERY:g} s"
    elif twice := [item["name"] for item in status(serve) if item["restarts"] > 1]:
        problem = f"restarted more than once: {', '.join(twice)}"
    code, stopped = serve.stop()
    if code:
        problem = problem or f"exit code {code}"
    with suppress(AssertionError):
        eventually(serve.nothing_is_left, 10)
    if not serve.nothing_is_left():
        problem = problem or "it left something behind"
    reasons = [line.partition("restarting ")[2] for _, line in lines if "restarting (" in line]
    return Outcome(noticed, serving, stopped, " ".join(dict.fromkeys(reasons)), problem)


def status(serve: Serving) -> list[Mapping[str, Any]]:
    (server,) = json.loads(run("status", "--url", serve.url, "--json").stdout)["servers"]
    return [{**server, "name": "triton"}, *server["models"], *server["frontends"]]


def seconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f} s"


def main(names: Sequence[str]) -> int:
    """Run the cases, some at the same time, and return how many went wrong."""
    cases = [case for case in CASES if not names or str(case) in names]
    # The ones that take longest begin first.
    cases.sort(key=lambda case: (case.number != signal.SIGSTOP, case.victims))
    outcomes: dict[Case, Outcome] = {}
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(LANES) as pool:
        runs = {case: pool.submit(run_case, case, Path(folder, str(case))) for case in cases}
        for case, future in runs.items():
            try:
                outcomes[case] = future.result()
            except Exception as error:
                outcomes[case] = Outcome(None, None, 0.0, "", f"{type(error).__name__}: {error}")
    print(_ROW.format("", "noticed", "serving", "ended", "why"))
    for case in CASES:
        if case in outcomes:
            it = outcomes[case]
            times = map(seconds, (it.noticed, it.serving, it.stopped))
            text = f"WRONG: {it.problem} {it.said}" if it.problem else it.said
            print(_ROW.format(str(case), *times, text))
    return sum(bool(outcome.problem) for outcome in outcomes.values())


if __name__ == "__main__":
    sys.exit(min(main(sys.argv[1:]), 1))
