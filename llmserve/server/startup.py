"""Starts servers, waits until they are ready, and reports why one failed to start."""

from __future__ import annotations

import os
import shutil
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

from llmserve.contract.names import THREADS
from llmserve.errors import LLMServeError, PortInUseError, ServerError
from llmserve.server.checks import find_problems, first_available, with_dependents
from llmserve.server.find.embedded import prepare_embedded
from llmserve.server.find.launch import (
    Instance,
    Launch,
    launch_scripts,
    prepare_binary,
    prepare_docker,
)
from llmserve.server.run.log import LoadProgress, ServerLog
from llmserve.server.run.private import new_log, open_log
from llmserve.server.run.process import make_scratch, sweep
from llmserve.server.run.readiness import (
    ModelsFailedError,
    OnProgress,
    Readiness,
)
from llmserve.server.server import Server
from llmserve.server.settings import ServerSettings, choose_ports

Notify = Callable[[str], None]

_GRACE = 3.0
"""Seconds to stop a server that is not ready yet and so has no requests in flight."""
_ATTEMPTS = 3
_PREPARE: dict[str, Callable[[ServerSettings, Instance], Launch]] = {
    "binary": prepare_binary,
    "embedded": prepare_embedded,
    "docker": prepare_docker,
}


def start(
    settings: ServerSettings,
    *,
    on_progress: OnProgress | None = None,
    notify: Notify = lambda _: None,
) -> Server:
    """Start a server, wait until all its models are ready, and return it.

    While it waits, ``on_progress`` is called several times a second, and ``notify`` with the reason
    whenever it starts again. An interruption of the wait, such as Ctrl-C, stops the server first.
    Raises :class:`PortInUseError` before anything is started, and :class:`ServerError` if a model
    does not load; a ``partial`` server raises it only if none does.
    """
    on_progress = on_progress or (lambda _: None)
    # A copy, which reads what the repository contains now.
    settings = replace(settings)
    if settings.runtime == "auto":
        settings = replace(settings, runtime=first_available())
    for problem in find_problems(settings):
        raise problem.error()
    sweep()
    if settings.renewable and (settings.runtime == "docker" or launch_scripts(settings)):
        # A container does not see the links, and a multi-process engine only starts as a whole.
        settings = replace(settings, renewable=False)
    left_out: dict[str, str] = {}
    tries: Counter[str] = Counter()
    attempts = 1
    while True:
        try:
            server = _start_once(settings, on_progress)
        except ModelsFailedError as error:
            tries.update(error.may_be_chance)
            again = {name for name in error.may_be_chance if tries[name] < _ATTEMPTS}
            failures = {n: why for n, why in error.failures.items() if n not in again}
            what = error.problem + (f" ({error.remarks})" if error.remarks else "")
            if not failures:
                notify(f"starting again: {what}")
                continue
            failed = with_dependents(settings.opened, failures)
            names = settings.names()
            rest = tuple(name for name in names if name not in failed)
            # Without what no model of this server explains, it would fail in the same way again.
            may_be_empty = settings.on_demand and not rest
            if not settings.partial or not (rest or may_be_empty) or len(rest) == len(names):
                raise
            left_out |= failed
            settings = replace(settings, models=rest, empty=may_be_empty)
            notify(f"starting again without {', '.join(failed)}: {what}")
        except PortInUseError as error:
            # Another program may take a free port before the server listens on it.
            if 0 not in settings.ports().values() or attempts == _ATTEMPTS:
                raise
            attempts += 1
            notify(f"starting again: {error.problem}")
        else:
            server.failures = left_out
            return server


def _start_once(settings: ServerSettings, on_progress: OnProgress) -> Server:
    ports = choose_ports(settings)
    name, scratch = make_scratch()
    server = None
    log_file = None
    try:
        instance = Instance(ports, scratch, name)
        launch = _PREPARE[settings.runtime](settings, instance)
        log_file = _make_log_file(settings, name)
        log = ServerLog(log_file)
        server = Server(settings, instance, launch, log_file)
        Readiness(server, log, settings).wait(on_progress)
        log.read()
        server.notes = (*launch.notes, *dict.fromkeys(log.notes))
        return server
    except BaseException as error:
        # A ServerError refers the user to the log; other errors do not.
        keep_log = isinstance(error, ServerError) or settings.log_file is not None
        try:
            if server is not None:
                server.process.stop(_GRACE)
        except BaseException:
            # A second Ctrl-C is reported instead of the error.
            keep_log = settings.log_file is not None
            raise
        finally:
            shutil.rmtree(scratch, ignore_errors=True)
            if log_file and not keep_log:
                log_file.unlink(missing_ok=True)
        raise


# Several servers of one repository that share the machine.

_OPENMP = "OMP_NUM_THREADS"
_GPUS = "CUDA_VISIBLE_DEVICES"


def settings_of_each(settings: ServerSettings) -> list[ServerSettings]:
    """Return the settings of each replica; only the first listens on the given host and ports."""
    replicas = []
    for number in range(settings.replicas):
        replica = replace(settings, replicas=1, env={**_share(settings, number), **settings.env})
        if number:
            log = settings.log_file
            log = log and log.with_name(f"{log.stem}-{number + 1}{log.suffix}")
            replica = replace(replica, host="127.0.0.1", log_file=log)
            replica = replace(replica, http_port=0, grpc_port=0, metrics_port=0)
        replicas.append(replica)
    return replicas


def _share(settings: ServerSettings, number: int) -> dict[str, str]:
    """Return a replica's threads and GPU, unless the environment already sets them."""
    if settings.replicas == 1:
        return {}
    env = {}
    if _OPENMP not in os.environ:
        threads = max(1, len(os.sched_getaffinity(0)) // settings.replicas)
        env = {_OPENMP: str(threads), THREADS: str(threads)}
    visible = os.environ.get(_GPUS)
    all_gpus = [path.name.removeprefix("nvidia") for path in Path("/dev").glob("nvidia[0-9]*")]
    gpus = sorted(all_gpus, key=int) if visible is None else list(filter(None, visible.split(",")))
    return env | ({_GPUS: gpus[number % len(gpus)]} if gpus else {})


def start_all(
    each: Sequence[ServerSettings],
    *,
    on_progress: OnProgress = lambda _: None,
    notify: Notify = lambda _: None,
) -> list[Server]:
    """Start all servers at once and return when all are ready; if one fails, stop the others."""
    if len(each) == 1:
        return [start(each[0], on_progress=on_progress, notify=notify)]
    one_failed = threading.Event()

    def start_replica(number: int) -> Server:
        def check(progress: LoadProgress) -> None:
            if one_failed.is_set():
                raise ServerError("interrupted")
            if not number:
                on_progress(progress)

        def notify_of(line: str) -> None:
            notify(f"replica {number + 1}: {line}")

        return start(each[number], on_progress=check, notify=notify_of)

    with ThreadPoolExecutor(len(each)) as pool:
        starts = [pool.submit(start_replica, number) for number in range(len(each))]
        try:
            for done in wait(starts, return_when=FIRST_EXCEPTION).done:
                done.result()
            return [future.result() for future in starts]
        except BaseException:
            one_failed.set()
            for future in starts:
                with suppress(LLMServeError):
                    future.result().stop(grace=0.0)
            raise


@contextmanager
def one_log(
    settings: ServerSettings, *, keep: Callable[[], bool] = lambda: False
) -> Iterator[ServerSettings]:
    """Use one log for all starts of a server; keep it if the server fails, or ``keep`` says so."""
    if settings.log_file is not None:
        yield settings
        return
    log_file = _make_log_file(settings, "llmserve")
    try:
        yield replace(settings, log_file=log_file)
    except ServerError:
        raise
    except BaseException:
        log_file.unlink(missing_ok=True)
        raise
    if not keep():
        log_file.unlink(missing_ok=True)


def _make_log_file(settings: ServerSettings, name: str) -> Path:
    if settings.log_file is None:
        return new_log(name)
    open_log(settings.log_file).close()
    return settings.log_file.absolute()
