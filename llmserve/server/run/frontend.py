"""Frontends: separate processes that serve another protocol in front of Triton."""

from __future__ import annotations

import shutil
import socket
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from typing import TYPE_CHECKING

from llmserve.errors import ServerError
from llmserve.server.find.launch import Launch, inherited_environment
from llmserve.server.run.activity import Activity
from llmserve.server.run.guard import members
from llmserve.server.run.private import new_log
from llmserve.server.run.process import SIGNALLED, GuardedProcess, make_scratch

if TYPE_CHECKING:
    from llmserve.plugins.roles import Frontend, Place

_START_TIMEOUT = 60.0
_POLL = 0.05
_LOG_TAIL = 2000


@dataclass(frozen=True)
class RunningFrontend:
    """A frontend that is listening; created by :func:`start_frontend`."""

    process: GuardedProcess
    frontend: Frontend
    place: Place
    log_file: Path

    @property
    def url(self) -> str:
        return self._url(self.frontend.path)

    @property
    def page_url(self) -> str:
        """The address of its page for people; "" if it has none."""
        return self._url(self.frontend.page) if self.frontend.page else ""

    def _url(self, path: str) -> str:
        host = _address(self.place)
        host = f"[{host}]" if ":" in host else host
        return f"{self.frontend.scheme}://{host}:{self.place.port}{path}"

    def stop(self, grace: float) -> None:
        """Stop it; requests in flight have ``grace`` seconds."""
        self.process.stop(grace)

    def reacts(self, timeout: float) -> bool:
        """Return whether it reacts to a request in time; refusing one, or hanging up, does count.

        Any process accepts connections, even one that hangs: the kernel does that for it.
        """
        connection = HTTPConnection(_address(self.place), self.place.port, timeout=timeout)
        try:
            connection.request("GET", self.frontend.health)
            connection.getresponse()
        except (ConnectionResetError, BrokenPipeError, HTTPException):
            return True
        except OSError:
            return False
        finally:
            connection.close()
        return True

    def activity(self) -> Activity:
        """Return what its processes have had of the machine so far."""
        return Activity.of(members(self.process.pid))

    def why_it_ended(self) -> str:
        """Return the signal that ended it, or the last line of its log."""
        code = self.process.wait(0)
        if code is None or 0 <= code <= SIGNALLED:
            return self._last_line()
        return self.process.why_it_ended()

    def _last_line(self) -> str:
        try:
            with self.log_file.open("rb") as log:
                log.seek(max(0, self.log_file.stat().st_size - _LOG_TAIL))
                lines = log.read().decode(errors="replace").split("\n")
        except OSError:
            return "its log is gone"
        return next((line.strip() for line in reversed(lines) if line.strip()), "its log is empty")


def log_beside(log_file: Path, frontend: Frontend, *, chosen: bool) -> Path:
    """Return a frontend's log, beside the server's, whose name the user has chosen or not."""
    name = f"{log_file.stem}-{frontend.name}"
    return (
        log_file.with_name(f"{name}{log_file.suffix}") if chosen else new_log(name, log_file.parent)
    )


def start_frontend(frontend: Frontend, place: Place, log_file: Path) -> RunningFrontend:
    """Start a frontend and wait until it listens."""
    return _start(frontend, place, log_file, lambda _: None)


def start_again(
    ended: RunningFrontend, on_wait: Callable[[RunningFrontend], None]
) -> RunningFrontend:
    """Start a frontend anew, in place of one that has ended or that hangs.

    While it waits until that listens, ``on_wait`` is called, and may raise to end it.
    """
    # It may have outlived its guard, and it would keep the port.
    ended.stop(0.0)
    return _start(ended.frontend, ended.place, ended.log_file, on_wait)


def _start(
    frontend: Frontend, place: Place, log_file: Path, on_wait: Callable[[RunningFrontend], None]
) -> RunningFrontend:
    arguments = frontend.arguments(place)
    name, scratch = make_scratch()
    launch = Launch((sys.executable, *arguments), inherited_environment(), frontend.name)
    process = None
    try:
        process = GuardedProcess(launch, name, scratch, log_file, grace=place.grace)
        running = RunningFrontend(process, frontend, place, log_file)
        deadline = time.monotonic() + _START_TIMEOUT
        while not _listens(place):
            on_wait(running)
            if not process.alive():
                raise ServerError(f"{frontend.name} ended: {running.why_it_ended()}")
            if time.monotonic() > deadline:
                raise ServerError(f"{frontend.name} does not listen after {_START_TIMEOUT:g} s")
            time.sleep(_POLL)
    except BaseException:
        if process is not None:
            process.stop(0.0)
        raise
    finally:
        if process is None:
            shutil.rmtree(scratch, ignore_errors=True)
    return running


def _address(place: Place) -> str:
    return {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(place.host, place.host)  # noqa: S104


def _listens(place: Place) -> bool:
    try:
        socket.create_connection((_address(place), place.port), timeout=1).close()
    except OSError:
        return False
    return True
