"""The processes that make a load, seen from the one that started them."""

from __future__ import annotations

import json
import queue
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from statistics import median
from threading import Thread
from types import TracebackType
from typing import Any

from llmserve import errors
from llmserve.errors import ClientError, LLMServeError
from llmserve.measure.codec import decode, encode
from llmserve.measure.job import Job
from llmserve.measure.runs import LoaderCost, Record
from llmserve.measure.summary import first_token

_HEAD_START = 0.1
"""Seconds from the order to the start, so that every process has heard of it."""
_STOPPING = 15.0
_BUSY = 0.8
_LATE = 0.005
_SHARE = 0.05
"""How late it may be, of the time that a first piece takes, before that is said."""


@dataclass(frozen=True)
class Noted:
    """What all processes noted together.

    ``start`` is when the window began, by the monotonic clock. ``texts`` are the pieces of answers
    whose tokens the model did not count, ``cut`` is when those requests were sent that were under
    way when the load was ended. ``gone`` is since when there was no server, where that ended it,
    and ``given_up`` what was said of it.
    """

    start: float

    records: tuple[Record, ...]
    texts: Mapping[int, Sequence[str]]
    cost: LoaderCost
    seconds: float
    cut: tuple[float, ...]
    interrupted: bool
    gone: float | None = None
    given_up: str | None = None


class Crew:
    """Load generators, one per job, to be used in a ``with`` block."""

    def __init__(self, jobs: Sequence[Job]) -> None:
        self._heard: queue.Queue[tuple[int, dict[str, Any] | None]] = queue.Queue()
        self._workers = [_start() for _ in jobs]
        for at, (worker, job) in enumerate(zip(self._workers, jobs, strict=True)):
            Thread(target=self._read, args=(at, worker), daemon=True).start()
            _order(worker, encode(job))

    def __enter__(self) -> Crew:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for worker in self._workers:
            with suppress(OSError):
                worker.stdin.close()  # type: ignore[union-attr]
        for worker in self._workers:
            try:
                worker.wait(timeout=2.0)
            except subprocess.TimeoutExpired:
                worker.kill()
                worker.wait()

    def warm_up(self) -> None:
        """Wait until all are warm; raise what kept all of a warm-up's requests from success."""
        for _ in self._workers:
            at, told = self._heard.get()
            if told is None:
                raise self._gone(at)
            if "failed" in told:
                made = getattr(errors, told["failed"], ClientError)
                raise made(told["problem"], mend=told["mend"])

    def run(self, on_progress: Callable[[int, float], None]) -> Noted:
        """Start all at the same moment and gather what they noted; Ctrl-C ends them early."""
        start = time.monotonic() + _HEAD_START
        for worker in self._workers:
            _order(worker, {"start": start})
        reports: dict[int, dict[str, Any]] = {}
        done = [0] * len(self._workers)
        interrupted = False
        deadline: float | None = None
        while len(reports) < len(self._workers):
            try:
                patience = None if deadline is None else max(0.1, deadline - time.monotonic())
                at, told = self._heard.get(timeout=patience)
                if told is None and at in reports:
                    continue  # It has said all that it had to say.
                if told is None:
                    raise self._gone(at)
                if "records" in told:
                    reports[at] = told
                else:
                    done[at] = told["done"]
                    on_progress(sum(done), told["at"])
            except KeyboardInterrupt:
                if interrupted:
                    raise
                interrupted = True
                deadline = time.monotonic() + _STOPPING
                for worker in self._workers:
                    _order(worker, {"stop": True})
            except queue.Empty:
                raise KeyboardInterrupt from None
        return _joined(start, list(reports.values()), interrupted)

    def _read(self, at: int, worker: subprocess.Popen[bytes]) -> None:
        for line in worker.stdout or ():
            self._heard.put((at, json.loads(line)))
        self._heard.put((at, None))

    def _gone(self, at: int) -> LLMServeError:
        code = self._workers[at].wait()
        return LLMServeError(
            f"a load generator ended by itself (exit code {code})",
            mend="what it printed above says why",
        )


def _start() -> subprocess.Popen[bytes]:
    # In a session of its own: Ctrl-C is ours to pass on, after which it still has to report.
    return subprocess.Popen(
        [sys.executable, "-m", "llmserve.measure.loader"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        start_new_session=True,
    )


def _order(worker: subprocess.Popen[bytes], content: Any) -> None:
    with suppress(OSError):
        worker.stdin.write(json.dumps(content).encode() + b"\n")  # type: ignore[union-attr]
        worker.stdin.flush()  # type: ignore[union-attr]


def _joined(start: float, reports: list[dict[str, Any]], interrupted: bool) -> Noted:
    records = [decode(Record, record) for report in reports for record in report["records"]]
    busy, late = (max(report[name] for report in reports) for name in ("busy", "late"))
    cost = LoaderCost(
        processes=len(reports),
        cpu=sum(report["cpu"] for report in reports),
        busy=busy,
        late=late,
        warning=warning(busy, late, records),
        wire=", ".join(sorted({report["wire"] for report in reports})),
    )
    gave_up = [report for report in reports if report["given_up"] is not None]
    texts = {int(i): texts for report in reports for i, texts in report["texts"].items()}
    return Noted(
        start=start,
        records=tuple(sorted(records, key=lambda record: record.index)),
        texts=texts,
        cost=cost,
        seconds=max(report["seconds"] for report in reports),
        cut=tuple(sent for report in reports for sent in report["cut"]),
        interrupted=interrupted,
        gone=min((report["gone"] for report in gave_up), default=None),
        given_up=next((report["given_up"] for report in gave_up), None),
    )


def warning(busy: float, late: float, records: Sequence[Record]) -> str | None:
    """Say whether the load generator is to blame for a part of the figures, and for which."""
    if busy > _BUSY:
        return (
            f"the load generator used {busy:.0%} of a core and may have been the bottleneck: "
            "use more --processes"
        )
    waits = [first_token(record) for record in records if record.error is None]
    # Against what is measured: 50 ms are nothing in an answer of 10 s, and all in one of 60 ms.
    if waits and late > max(_LATE, _SHARE * median(waits)):
        return (
            f"the load generator came up to {late * 1000:.0f} ms late to what was due: "
            "the machine was busy, so times are blurred by as much"
        )
    return None
