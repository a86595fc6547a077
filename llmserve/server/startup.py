"""Start a server and wait until it is ready."""

from __future__ import annotations

import os
import secrets
import shutil
import tempfile
from pathlib import Path

from llmserve.errors import PortInUseError, ServerError, UsageError
from llmserve.server import ports, runtimes
from llmserve.server.api import ServerApi
from llmserve.server.handle import Server
from llmserve.server.launch import Own
from llmserve.server.process import ServerProcess
from llmserve.server.progress import ServerLog
from llmserve.server.settings import ServerSettings
from llmserve.server.waiting import OnProgress, Waiting

_GRACE = 3.0
"""Seconds to end in for a server that is not ready yet: it has no requests in flight."""
_ATTEMPTS = 3


def start(settings: ServerSettings, *, on_progress: OnProgress | None = None) -> Server:
    """Start a server, wait until all its models are ready, and return it.

    ``on_progress`` is called several times a second meanwhile. Whatever interrupts the wait,
    Ctrl-C included, ends the server first. Raises :class:`PortInUseError` before anything is
    started, and :class:`ServerError` where a model does not load.
    """
    if not settings.repository.is_dir():
        raise ServerError(
            f"no repository at {settings.repository}", mend="llmserve build makes one"
        )
    for _ in range(_ATTEMPTS - 1):
        try:
            return _start_once(settings, on_progress)
        except PortInUseError:
            # A free port may be taken by somebody else before the server listens on it.
            if 0 not in (settings.http_port, settings.grpc_port, settings.metrics_port):
                raise
    return _start_once(settings, on_progress)


def _start_once(settings: ServerSettings, on_progress: OnProgress | None) -> Server:
    name = f"llmserve-{secrets.token_hex(6)}"
    chosen = ports.choose(settings)
    scratch = Path(tempfile.mkdtemp(prefix=f"{name}-"))
    process = None
    log_file = None
    try:
        own = Own(chosen, scratch, name, key=secrets.token_urlsafe(24))
        launch = runtimes.prepare(settings, own)
        log_file = _log_file(settings, name)
        log = ServerLog(log_file)
        address = "127.0.0.1" if chosen.host == "0.0.0.0" else chosen.host  # noqa: S104
        api = ServerApi(address, chosen.http, own.key)
        process = ServerProcess(launch, own, log_file)
        Waiting(settings, own, process, api, log).until_ready(on_progress or (lambda _: None))
        return Server(
            process,
            api,
            runtime=f"{launch.kind} Triton {api.metadata()['version']}",
            address=address,
            ports=chosen,
            log_file=log_file,
            keep_log=settings.log_file is not None,
            explicit=settings.explicit,
        )
    except BaseException as error:
        # A server's error sends its reader to the log; nobody else would look for it.
        log_is_told = isinstance(error, ServerError) or settings.log_file is not None
        try:
            if process is not None:
                process.stop(_GRACE)
        except BaseException:
            # A second Ctrl-C is told instead of the error.
            log_is_told = settings.log_file is not None
            raise
        finally:
            shutil.rmtree(scratch, ignore_errors=True)
            if log_file and not log_is_told:
                log_file.unlink(missing_ok=True)
        raise


def _log_file(settings: ServerSettings, name: str) -> Path:
    if settings.log_file is None:
        handle, path = tempfile.mkstemp(prefix=f"{name}-", suffix=".log")
        os.close(handle)
        return Path(path)
    try:
        settings.log_file.touch()
    except OSError as error:
        raise UsageError(
            f"cannot write the log to {settings.log_file} ({error.strerror})"
        ) from None
    return settings.log_file.absolute()
