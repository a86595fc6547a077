"""A soak test on a real Triton: a mixed load in which 40 of 100 clients disconnect.

    python bench/soak.py --seconds 600 [--plugin iterative] [--model demo] [--clients 24] [--images]

The first half minute measures the peak load; from then on the load is 80 % of it. Prints memory,
sequences and requests over time. Exits with 1 if a request failed, a sequence is left at the end,
or memory grew by over 5 %, or 100 MB, after its first two minutes. With ``--images``, two of three
requests show up to three to a model that reads them (``demo-vision``, if none is named).
"""

from __future__ import annotations

import argparse
import base64
import io
import itertools
import random
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console

from llmserve.errors import LLMServeError, RequestRejectedError
from llmserve.plugin import parse_assignments
from llmserve.runtime.contract import with_images
from llmserve.testing import LiveTriton

WORDS = ("Programming", "The capital", "Once upon a time", "weather", "in", "a", "cat", "grüße")
LONGEST = 60
"""The largest number of words in a prompt."""
PICTURES = 64
WARM_UP = 120.0
"""Seconds after which memory has no reason to grow any more."""
MAX_GROWTH = 0.05
MAX_GROWN_BYTES = 100 << 20
PEAK_SHARE, TRIAL_SECONDS = 0.8, 30.0
"""The share of the peak that the soak requests, and how long the peak is measured."""
RELEASE_SECONDS = 5.0
"""Seconds after which nothing may be left of disconnected clients."""


@dataclass(frozen=True)
class Sample:
    """The state at this many seconds after the start; memory is in bytes."""

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
    """The result of a soak; ``failures`` has a line for each unexpectedly failed request."""

    samples: list[Sample] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    left: float = 0.0

    def growth(self) -> float | None:
        """Return the relative growth of the model's memory after the warm-up."""
        warm = [sample.model_memory for sample in self.samples if sample.seconds >= WARM_UP]
        return warm[-1] / warm[0] - 1 if len(warm) > 1 else None

    def grown_bytes(self) -> int:
        """Return the growth of the model's and its server's memory after the warm-up."""
        warm = [s.model_memory + s.server_memory for s in self.samples if s.seconds >= WARM_UP]
        return warm[-1] - warm[0] if warm else 0

    def problems(self) -> list[str]:
        problems = [f"a request failed: {failure}" for failure in self.failures[:5]]
        if len(self.failures) > 5:
            problems.append(f"and {len(self.failures) - 5} more failed")
        if self.left:
            problems.append(f"{self.left:g} sequences are left after all requests ended")
        if not all(sample.model_memory and sample.server_memory for sample in self.samples):
            problems.append("the memory of the model or of its server could not be measured")
        growth = self.growth()
        if growth is not None and growth > MAX_GROWTH:
            problems.append(f"memory grew by {growth:.0%} after the warm-up")
        if self.grown_bytes() > MAX_GROWN_BYTES:
            problems.append(f"memory grew by {self.grown_bytes() >> 20} MB after the warm-up")
        return problems


class Soak:
    """Clients that send all kinds of requests, disconnect at random, and go on."""

    def __init__(
        self,
        live: LiveTriton,
        model: str,
        *,
        clients: int = 24,
        max_tokens: int = 200,
        seed: int = 0,
        rate: float | None = None,
        images: Sequence[str] = (),
    ) -> None:
        self._images = images
        self._pause = 1 / rate if rate else 0.0
        self._due = 0.0
        self._live, self._model = live, model
        self._clients, self._max_tokens, self._seed = clients, max_tokens, seed
        self._counts = dict.fromkeys(("answered", "cancelled", "refused"), 0)
        self._lock = threading.Lock()
        self._report = Report()

    def fill(self) -> None:
        """Send the largest requests from all clients at once: caches may grow with the demand."""
        prompt = " ".join(LONGEST * [max(WORDS, key=len)])
        options: dict[str, Any] = {"max_tokens": self._max_tokens, "ignore_eos": True}

        def send(number: int) -> None:
            self._live.client.generate(self._model, f"{number} {prompt}", **options)

        with ThreadPoolExecutor(self._clients) as pool:
            list(pool.map(send, range(self._clients)))

    def run(
        self, seconds: float, *, every: float = 10.0, on_sample: Callable[[Sample], object] = id
    ) -> Report:
        """Send requests for this long; take a sample every few seconds and at the end."""
        started = time.monotonic()
        threads = [
            threading.Thread(target=self._run_client, args=(number, started + seconds), daemon=True)
            for number in range(self._clients)
        ]
        for thread in threads:
            thread.start()
        for count in itertools.count(1):
            pause = min(started + count * every, started + seconds) - time.monotonic()
            time.sleep(max(0.0, pause))
            on_sample(self._observe(time.monotonic() - started))
            if time.monotonic() - started >= seconds:
                break
        for thread in threads:
            thread.join()
        # Disconnected clients are noticed when no request arrives; then no sequence may be left.
        deadline = time.monotonic() + RELEASE_SECONDS
        while figure(self._live, self._model, "running_sequences"):
            if time.monotonic() > deadline:
                break
            time.sleep(0.1)
        on_sample(last := self._observe(time.monotonic() - started))
        self._report.left = last.running
        return self._report

    def _run_client(self, number: int, end: float) -> None:
        rng = random.Random(f"{self._seed} {number}")
        while time.monotonic() < end:
            self._wait_for_turn()
            try:
                outcome = self._send(rng)
            except Exception as error:
                with self._lock:
                    self._report.failures.append(f"{type(error).__name__}: {error}")
            else:
                with self._lock:
                    self._counts[outcome] += 1

    def _wait_for_turn(self) -> None:
        with self._lock:
            self._due = max(self._due + self._pause, time.monotonic())
            due = self._due
        time.sleep(max(0.0, due - time.monotonic()))

    def _send(self, rng: random.Random) -> str:
        prompt = " ".join(rng.choice(WORDS) for _ in range(rng.randint(1, LONGEST)))
        content = self._content(prompt, rng)
        kind = rng.random()
        if kind < 0.4:
            return self._send_and_disconnect(content, rng)
        if kind < 0.45:
            return self._send_invalid(content, rng)
        options: dict[str, Any] = rng.choice(
            [{}, {"temperature": 0.8}, {"top_p": 0.9}, {"repetition_penalty": 1.2}]
        )
        tokens = rng.randint(1, self._max_tokens // 2)
        options |= {"max_tokens": tokens, "ignore_eos": True}
        client = self._live.client
        if kind < 0.6:
            pieces = client.stream(self._model, **content, **options)
            output_tokens = [piece.output_tokens for piece in pieces][-1]
        else:
            output_tokens = client.generate(self._model, **content, **options).output_tokens
        if output_tokens != tokens:
            raise RuntimeError(f"got {output_tokens} tokens, not {tokens}")
        return "answered"

    def _content(self, prompt: str, rng: random.Random) -> dict[str, Any]:
        """Return what asks a prompt, about some images if the model reads any."""
        urls = rng.sample([*self._images], rng.randint(1, 3)) if self._images else []
        if not urls or rng.random() < 1 / 3:
            return {"prompt": prompt}
        message = {"role": "user", "content": with_images(prompt, urls, in_parts=False)}
        return {"messages": [message], "image_url": urls}

    def _send_and_disconnect(self, content: dict[str, Any], rng: random.Random) -> str:
        """Request a stream and disconnect after some pieces."""
        limit, tokens = rng.randint(0, 6), rng.randint(1, self._max_tokens)
        options: dict[str, Any] = {"max_tokens": tokens, "ignore_eos": True}
        pieces = self._live.client.stream(self._model, **content, **options)
        for count, _ in enumerate(pieces):
            if count >= limit:
                break
        pieces.close()
        return "cancelled"

    def _send_invalid(self, content: dict[str, Any], rng: random.Random) -> str:
        invalid: dict[str, Any] = rng.choice(
            [{"max_tokens": -1}, {"temperature": -1.0}, {"max_tokens": 2**31 - 1}]
        )
        if "image_url" in content and rng.random() < 0.5:
            first, *others = content["image_url"]
            invalid = {"image_url": [first[: len(first) // 8 * 4], *others]}
        try:
            self._live.client.generate(self._model, **{**content, **invalid})
        except RequestRejectedError:
            return "refused"
        raise LLMServeError(f"{invalid} was not refused")

    def _observe(self, seconds: float) -> Sample:
        with self._lock:
            sample = Sample(
                seconds,
                memory_of(process_of("triton_python_backend_stub", f"/{self._model}/1/model.py")),
                memory_of(self._live.server.pid),
                int(figure(self._live, self._model, "running_sequences")),
                **self._counts,
                failed=len(self._report.failures),
            )
            self._report.samples.append(sample)
        return sample


def pictures() -> list[str]:
    """Return images of many sizes and types, as requests have them."""
    from PIL import Image

    rng, urls = random.Random(1), []
    sizes = [(24, 16), (33, 70), (320, 240), (1024, 768)]
    for number in range(PICTURES):
        file, kind = io.BytesIO(), ("PNG", "JPEG", "WEBP")[number % 3]
        dots = Image.frombytes("RGB", (8, 8), rng.randbytes(8 * 8 * 3))
        dots.resize(sizes[number % 4]).save(file, kind)
        content = base64.b64encode(file.getvalue()).decode()
        urls.append(f"data:image/{kind.lower()};base64,{content}")
    return urls


def figure(live: LiveTriton, model: str, name: str) -> float:
    """Return one of a model's metrics from ``/metrics``."""
    with urllib.request.urlopen(live.server.metrics_url) as response:
        lines = response.read().decode().splitlines()
    prefix = f'llmserve_{name}{{model="{model}"'
    return next(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(prefix))


def process_of(*fragments: str) -> int:
    """Return the process whose command line contains all fragments, or 0 if there is none."""
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            command = (
                (process / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            )
            if all(fragment in command for fragment in fragments):
                return int(process.name)
    return 0


def memory_of(process: int) -> int:
    """Return the resident memory of a process; 0 if it has ended."""
    with suppress(OSError):
        status = Path(f"/proc/{process}/status").read_text(encoding="utf-8")
        if "VmRSS:" in status:
            return int(status.split("VmRSS:")[1].split()[0]) * 1024
    return 0


COLUMNS = (
    "seconds", "model MB", "server MB", "running", "answered", "cancelled", "refused", "failed"
)  # fmt: skip


def line(sample: Sample) -> str:
    values = (
        round(sample.seconds),
        sample.model_memory >> 20,
        sample.server_memory >> 20,
        sample.running,
        sample.answered,
        sample.cancelled,
        sample.refused,
        sample.failed,
    )
    return " ".join(f"{value:>9}" for value in values)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--plugin", choices=("iterative", "openvino"), default="iterative")
    parser.add_argument("--model", default="")
    parser.add_argument("--clients", type=int, default=24)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--images", action="store_true")
    parser.add_argument("--set", dest="assignments", action="append", default=[])
    args = parser.parse_args()
    console = Console(highlight=False)
    options = parse_assignments(args.assignments)
    with (
        tempfile.TemporaryDirectory() as folder,
        LiveTriton.start(Path(folder) / "repository") as live,
    ):
        images: list[str] = []
        if args.images:
            images, args.model = pictures(), args.model or "demo-vision"
        model = live.build(args.plugin, args.model or "demo", **options)
        console.print(" ".join(f"{name:>9}" for name in COLUMNS))
        trial = Soak(live, model, clients=args.clients, seed=args.seed, images=images)
        trial.fill()
        last = trial.run(TRIAL_SECONDS).samples[-1]
        peak = (last.answered + last.cancelled + last.refused) / last.seconds
        console.print(f"peak: {peak:.1f} requests a second, from now on {PEAK_SHARE:.0%} of that")
        rate = PEAK_SHARE * peak
        soak = Soak(live, model, clients=args.clients, seed=args.seed, rate=rate, images=images)
        report = soak.run(
            args.seconds,
            every=max(1.0, args.seconds / 20),
            on_sample=lambda sample: console.print(line(sample)),
        )
    if (growth := report.growth()) is not None:
        summary = f"the model {growth:+.1%}, with its server {report.grown_bytes() / 1e6:+.1f} MB"
        console.print(f"memory after the first two minutes: {summary}")
    for problem in report.problems():
        console.print(problem)
    return 1 if report.problems() else 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except LLMServeError as error:
        sys.exit(f"soak: {error}")
    except KeyboardInterrupt:
        sys.exit(130)
