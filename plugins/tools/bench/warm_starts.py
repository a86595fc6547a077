"""How soon a long prompt is answered that was read before, wherever that was.

    python -m plugins.tools.bench.warm_starts [--model MODEL] [--plugin openvino] [--tokens 8000]
        [--set NAME=VALUE]

`serve --warm` with two Tritons: the first token of the same prompt when nobody has had it, when it
is in memory, by the other replica, after an unload, a reload, `kill -9` of the model's processes
and of `serve` itself. Exits with 1 if an answer is another one. The model is that of the tests, if
none is given.
"""

from __future__ import annotations

import argparse
import os
import random
import re
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import llmserve
from llmserve.client import connect
from llmserve.errors import LLMServeError
from llmserve.plugin import parse_assignments
from llmserve.runtime.contract import CACHED_TOKENS
from llmserve.testing.command import run
from tests.live.servers import Serving, eventually
from tests.real.model import converted_model

_MODEL = "warm"
_ANSWER = 16
_WAIT = 3600.0
_WRITTEN = 3.0
"""Seconds without a new page after which all are written."""


class Asked:
    """The same prompt, as it was answered by one server after the other."""

    def __init__(self, tokens: int) -> None:
        chance = random.Random(1)
        self._words = [f"{chance.getrandbits(32):x}" for _ in range(tokens)]
        self._tokens = tokens
        self.text: str | None = None
        self.is_same = True

    def fit(self, url: str) -> None:
        """Shorten the prompt to about as many tokens as are asked for."""
        with connect(url, timeout=_WAIT) as client:
            # Its beginning is of other words, so that nothing of the prompt is read.
            tried = "x " + " ".join(self._words[:100])
            count = client.generate(_MODEL, tried, max_tokens=1).input_tokens or 1
        self._words = self._words[: int(100 * self._tokens / count)]

    def ask(self, what: str, url: str) -> None:
        first, pieces, answer = None, [], None
        began = time.monotonic()
        with connect(url, timeout=_WAIT) as client:
            prompt = " ".join(self._words)
            stream = client.stream(_MODEL, prompt, max_tokens=_ANSWER, temperature=0.0)
            for piece in stream:
                first = first or time.monotonic() - began
                pieces.append(piece.text)
                answer = piece
        text = "".join(pieces)
        self.text = text if self.text is None else self.text
        self.is_same &= text == self.text
        cached = answer.extra.get(CACHED_TOKENS.name, 0) if answer else 0
        same = "" if text == self.text else ", ANOTHER ANSWER"
        print(f"{what:26} {first or 0:8.2f} s, {cached} tokens found{same}", flush=True)


def is_written(pages: Path) -> None:
    """Wait until no more pages are written."""
    count, since = -1, time.monotonic()
    while time.monotonic() - since < _WRITTEN:
        if (now := len(list(pages.glob("?" * 64)))) != count:
            count, since = now, time.monotonic()
        time.sleep(0.1)


def is_answering(url: str) -> None:
    def tried() -> bool:
        with suppress(LLMServeError), connect(url, timeout=60.0) as client:
            client.generate(_MODEL, "1", max_tokens=1)
            return True
        return False

    eventually(tried, 600.0)


def places(start: Iterator[Serving], pages: Path, asked: Asked) -> None:
    """Ask wherever the prompt may be."""
    serving = next(start)
    asked.fit(serving.url)
    asked.ask("nobody has had it", serving.url)
    is_written(pages)
    asked.ask("in memory", serving.url)
    asked.ask("the other replica", re.findall(r"replica +grpc (\S+:\d+)", serving.output)[0])
    for commands in (("unload", "reload"), ("reload",)):
        for command in commands:
            done = run(command, _MODEL, "--url", serving.url)
            assert done.returncode == 0, done.stderr
        is_answering(serving.url)
        asked.ask(f"after {' and '.join(commands)}", serving.url)
    for process in serving.processes(f"models/{_MODEL}/1/model.py "):
        os.kill(process, signal.SIGKILL)
    time.sleep(1)
    is_answering(serving.url)
    asked.ask("after kill -9 of the model", serving.url)
    serving.process.kill()
    serving = next(start)
    asked.ask("after kill -9 of serve", serving.url)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="")
    parser.add_argument("--plugin", default="openvino")
    parser.add_argument("--tokens", type=int, default=8000)
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE")
    args = parser.parse_args()
    options: dict[str, Any] = parse_assignments(args.set)
    with tempfile.TemporaryDirectory() as place:
        home, models = Path(place, "home"), Path(place, "models")
        llmserve.build(
            args.plugin, args.model or str(converted_model()), output=models, name=_MODEL,
            **options,
        )  # fmt: skip
        environment = {**os.environ, "LLMSERVE_HOME": str(home)}
        started: list[Serving] = []

        def start() -> Iterator[Serving]:
            while True:
                words = (str(models), "--replicas", "2", "--warm", "8")
                started.append(Serving(*words, env=environment))
                yield started[-1]

        asked = Asked(args.tokens)
        try:
            places(start(), home / "pages", asked)
        finally:
            for serving in started:
                serving.close()
    return 0 if asked.is_same else 1


if __name__ == "__main__":
    sys.exit(main())
