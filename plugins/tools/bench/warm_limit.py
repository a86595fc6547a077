"""Prompts that stay warm in 100 MB, under load: is the limit held, and are answers right?

    python -m plugins.tools.bench.warm_limit [--minutes 10] [--limit 0.1] [--clients 4]

`serve --warm` with two Tritons and the real model, whose pages take 1.5 MB each, so that the folder
holds few of the texts. Clients ask for the same texts again and again, of which some are sessions.
The folder is looked at a hundred times a second. Once a minute, the processes of the model are
killed in the middle of what they do. Exits with 1 if the folder took more than the limit at any
look, or if an answer is not the one that its text got first.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import sys
import tempfile
import threading
import time
import urllib.request
from collections import Counter
from pathlib import Path
from typing import Any

import llmserve
from tests.live.servers import Serving
from tests.real.model import converted_model

_MODEL = "warm"
_TEXTS, _WORDS, _TOKENS = 40, 40, 8
_SESSIONS = 4
"""The first so many texts are asked for as sessions."""
_BLOCK, _MB = 4096, 1_000_000
_WAIT = 120.0
_KILLED_EVERY = 60.0


class Watch(threading.Thread):
    """Looks at how much the files of a folder take, until it is stopped."""

    def __init__(self, folder: Path) -> None:
        super().__init__(daemon=True)
        self.most = self.looks = 0
        self._folder, self._stopped = folder, threading.Event()

    def run(self) -> None:
        while not self._stopped.wait(0.01):
            self.most, self.looks = max(self.most, taken(self._folder)), self.looks + 1

    def end(self) -> None:
        self._stopped.set()
        self.join()


def taken(folder: Path) -> int:
    """Return how much space pages take. One that goes meanwhile is not counted."""
    found = 0
    try:
        with os.scandir(folder) as entries:
            for entry in entries:
                try:
                    size = entry.stat().st_size if entry.name != "lock" else 0
                except FileNotFoundError:
                    continue
                found += -(-size // _BLOCK) * _BLOCK
    except FileNotFoundError:
        return 0
    return found


class Clients:
    """Ask for texts until ``ends``, and compare each answer with the first one to the same text."""

    def __init__(self, serving: Serving, ends: float) -> None:
        chance = random.Random(1)
        self.texts = [
            " ".join(f"{chance.getrandbits(32):x}" for _ in range(_WORDS)) + f" {number}"
            for number in range(_TEXTS)
        ]
        self.first: dict[int, str] = {}
        self.counts: Counter[str] = Counter()
        self.tokens: Counter[str] = Counter()
        self._url = f"http://{serving.frontend[0]}/v1/completions"
        self._ends, self._lock = ends, threading.Lock()

    def run(self, seed: int) -> None:
        chance = random.Random(seed)
        while time.monotonic() < self._ends:
            number = chance.randrange(_TEXTS)
            try:
                answer = self._ask(number)
            except OSError:
                # It was killed meanwhile.
                with self._lock:
                    self.counts["failed"] += 1
                time.sleep(0.5)
                continue
            text, usage = answer["choices"][0]["text"], answer["usage"]
            kind = "sessions" if number < _SESSIONS else "others"
            with self._lock:
                self.counts["answers"] += 1
                self.counts["different"] += text != self.first.setdefault(number, text)
                self.tokens[f"{kind} read"] += usage["prompt_tokens"]
                self.tokens[f"{kind} found"] += usage["prompt_tokens_details"]["cached_tokens"]

    def _ask(self, number: int) -> Any:
        session = {"prompt_cache_key": str(number)} if number < _SESSIONS else {}
        body = {"model": _MODEL, "prompt": self.texts[number], "max_tokens": _TOKENS,
                "temperature": 0, **session}  # fmt: skip
        request = urllib.request.Request(self._url, json.dumps(body).encode())
        with urllib.request.urlopen(request, timeout=_WAIT) as response:
            return json.load(response)

    def found(self, kind: str) -> float:
        return self.tokens[f"{kind} found"] / max(1, self.tokens[f"{kind} read"])


def measure(serving: Serving, folder: Path, seconds: float, count: int) -> tuple[Clients, Watch]:
    ends = time.monotonic() + seconds
    clients, watch = Clients(serving, ends), Watch(folder)
    watch.start()
    threads = [threading.Thread(target=clients.run, args=(seed,)) for seed in range(count)]
    for thread in threads:
        thread.start()
    while (left := ends - time.monotonic()) > _KILLED_EVERY:
        time.sleep(_KILLED_EVERY)
        for process in serving.processes(f"models/{_MODEL}/1/model.py "):
            os.kill(process, signal.SIGKILL)
            clients.counts["killed"] += 1
    time.sleep(max(0.0, left))
    for thread in threads:
        thread.join()
    watch.end()
    return clients, watch


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--limit", type=float, default=0.1, help="GB")
    parser.add_argument("--clients", type=int, default=4)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        home, models = Path(place, "home"), Path(place, "models")
        # A cache of few texts, so that most are looked for on disk.
        llmserve.build(
            "iterative", str(converted_model()), output=models, name=_MODEL, dtype="float32",
            cache_tokens=2048,
        )  # fmt: skip
        environment = {**os.environ, "LLMSERVE_HOME": str(home)}
        options = ("--replicas", "2", "--warm", str(args.limit))
        serving = Serving(str(models), *options, env=environment)
        try:
            seconds = 60 * args.minutes
            clients, watch = measure(serving, home / "pages", seconds, args.clients)
        finally:
            serving.close()
    limit = int(args.limit * 1e9)
    counts = ", ".join(f"{count} {what}" for what, count in sorted(clients.counts.items()))
    print(f"{counts}; of prompts, {clients.found('sessions'):.0%} of sessions' tokens were found")
    print(
        f"and {clients.found('others'):.0%} of others'; the folder took {watch.most / _MB:.1f} MB"
    )
    print(f"at most, of {limit / _MB:.0f}, in {watch.looks} looks")
    is_right = clients.counts["answers"] and not clients.counts["different"]
    return 0 if is_right and watch.most <= limit else 1


if __name__ == "__main__":
    sys.exit(main())
