"""Several Tritons of one repository on one machine: what each has, and how all are started."""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from llmserve.errors import LLMServeError, ServerError
from llmserve.runtime.contract import THREADS
from llmserve.server.log import Progress
from llmserve.server.server import Server
from llmserve.server.settings import ServerSettings
from llmserve.server.startup import OnProgress, start

_OPENMP = "OMP_NUM_THREADS"
_GPUS = "CUDA_VISIBLE_DEVICES"


def settings_of_each(settings: ServerSettings) -> list[ServerSettings]:
    """Return what each replica is started with: the first has the ports that were asked for."""
    each = [
        replace(settings, replicas=1, env={**_share(settings, number), **settings.env})
        for number in range(settings.replicas)
    ]
    for number, one in enumerate(each[1:], start=2):
        log = settings.log_file
        each[number - 1] = replace(
            one,
            host="127.0.0.1",
            http_port=0,
            grpc_port=0,
            metrics_port=0,
            log_file=log and log.with_name(f"{log.stem}-{number}{log.suffix}"),
        )
    return each


def _share(settings: ServerSettings, number: int) -> dict[str, str]:
    """Return which threads and which GPU a replica has, as far as nobody has said it."""
    if settings.replicas == 1:
        return {}
    env = {}
    if _OPENMP not in os.environ:
        threads = max(1, len(os.sched_getaffinity(0)) // settings.replicas)
        env = {_OPENMP: str(threads), THREADS: str(threads)}
    told = os.environ.get(_GPUS)
    there = [path.name.removeprefix("nvidia") for path in Path("/dev").glob("nvidia[0-9]*")]
    gpus = sorted(there, key=int) if told is None else [one for one in told.split(",") if one]
    return env | ({_GPUS: gpus[number % len(gpus)]} if gpus else {})


def start_all(
    each: Sequence[ServerSettings], *, on_progress: OnProgress = lambda _: None
) -> list[Server]:
    """Start all at once, and return when all are ready; where one fails, none is left."""
    if len(each) == 1:
        return [start(each[0], on_progress=on_progress)]
    given_up = threading.Event()

    def one(number: int) -> Server:
        def look(progress: Progress) -> None:
            if given_up.is_set():
                raise ServerError("interrupted")
            if not number:
                on_progress(progress)

        return start(each[number], on_progress=look)

    with ThreadPoolExecutor(len(each)) as pool:
        starts = [pool.submit(one, number) for number in range(len(each))]
        try:
            for done in wait(starts, return_when=FIRST_EXCEPTION).done:
                done.result()
            return [each.result() for each in starts]
        except BaseException:
            given_up.set()
            for begun in starts:
                with suppress(LLMServeError):
                    begun.result().stop(grace=0.0)
            raise
