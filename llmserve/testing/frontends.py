"""A test class that checks what ``serve`` expects of every frontend."""

from __future__ import annotations

import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import ClassVar

import pytest

from llmserve.contract.address import Address
from llmserve.errors import PortInUseError, ServerError
from llmserve.plugins.registry import Registry
from llmserve.plugins.roles import Frontend, Place
from llmserve.server.run.frontend import RunningFrontend, start_frontend
from llmserve.server.settings import free_port

_GRACE = 5.0
_ATTEMPTS = 3
_ANOTHER_ADDRESS = "127.0.0.2"


class FrontendConformance:
    """The tests of a frontend, without a Triton: it starts before anything is asked of one.

    >>> class TestAcme(FrontendConformance):
    ...     frontend = "acme"
    """

    frontend: ClassVar[str]
    models: ClassVar[tuple[str, ...]] = ("demo",)

    @pytest.fixture
    def started(self, tmp_path: Path) -> Iterator[list[RunningFrontend]]:
        """Two of them at once, as two `serve` on one machine have."""
        with ExitStack() as stack:
            running = []
            for number in range(2):
                running.append(self._started(tmp_path / f"{number}.log"))
                stack.callback(running[-1].stop, 0.0)
            yield running

    def place(self) -> Place:
        """Return a free place on this machine; no Triton answers behind it."""
        host = "127.0.0.1"
        port = free_port(host, 0, "frontend")
        triton = Address(f"{host}:{free_port(host, 0, 'Triton')}")
        return Place((triton,), host, port, _GRACE, models=self.models)

    def _started(self, log: Path) -> RunningFrontend:
        for _ in range(_ATTEMPTS - 1):
            place = self.place()
            try:
                return start_frontend(self._registered(), place, log)
            except ServerError:
                try:
                    free_port(place.host, place.port, "frontend")
                except PortInUseError:
                    # Someone else took the port before the frontend could.
                    continue
                raise
        return start_frontend(self._registered(), self.place(), log)

    def _registered(self) -> Frontend:
        return Registry.load().get(Frontend, self.frontend)

    def test_its_command_is_a_list_of_arguments(self) -> None:
        place = self.place()
        frontend = self._registered()
        assert frontend.arguments(place) == frontend.arguments(place)

    def test_it_listens_at_its_place_and_nowhere_else(self, started: list[RunningFrontend]) -> None:
        for running in started:
            socket.create_connection((running.place.host, running.place.port), timeout=5).close()
            # All of 127.0.0.0/8 is this machine: whoever listens on all addresses answers here.
            with socket.socket() as other:
                other.settimeout(5)
                assert other.connect_ex((_ANOTHER_ADDRESS, running.place.port))

    def test_it_ends_on_sigterm_within_its_grace(self, started: list[RunningFrontend]) -> None:
        running = started[0]
        began = time.monotonic()
        running.stop(_GRACE)
        assert time.monotonic() - began < _GRACE, "it was killed, because SIGTERM did not end it"

    def test_it_says_why_it_cannot_listen(self, tmp_path: Path) -> None:
        place = self.place()
        with socket.socket() as taken:
            taken.bind((place.host, place.port))
            taken.listen()
            log = tmp_path / "taken.log"
            process_log = _run(self._registered(), place, log)
        assert process_log.strip(), "the last line on standard error is what `serve` shows"
        assert "Traceback" not in process_log, "say it in one line"


def _run(frontend: Frontend, place: Place, log: Path) -> str:
    """Return what a frontend writes that is expected to end by itself."""
    words = [sys.executable, *frontend.arguments(place)]
    with log.open("wb") as target:
        process = subprocess.Popen(words, stdout=target, stderr=target)
        try:
            code = process.wait(30)
        except subprocess.TimeoutExpired:
            raise ServerError(f"{frontend.name} runs although it cannot listen") from None
        finally:
            process.kill()
            process.wait()
    assert code, "it ends with an exit status other than 0"
    return log.read_text(encoding="utf-8", errors="replace")
