"""A ``serve`` that runs beside a command, and ends with it."""

from __future__ import annotations

import subprocess
import sys
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from threading import Thread

from llmserve.commands import Status
from llmserve.errors import ModelNotReadyError, ServerError
from llmserve.server import ChildProcess, Running, find_servers

_GRACE = 5
"""Seconds that requests of others have at the end."""
_POLL = 0.1
_PREFIX = "llmserve: "
_NOTE = f"{_PREFIX}note: "


@dataclass
class ServerProcess:
    """The process of a ``serve``, and the last lines that it has printed."""

    process: ChildProcess
    status: Status
    lines: deque[str] = field(default_factory=lambda: deque(maxlen=20))
    is_starting: bool = True

    def server(self) -> Running | None:
        """Return it as other commands find it, once its frontends run too."""
        servers = (s for s in find_servers() if s.report.pid == self.process.pid)
        # It has an address from then on: its port is any free one.
        return next((server for server in servers if server.url), None)

    def check(self) -> None:
        """Raise if it has ended, with its own words, or cannot answer now."""
        code = self.process.poll()
        if code is None:
            self._refuse_while_loading()
            return
        if signal := self.process.killed_by:
            # Its last words were about something else.
            raise ServerError(f"the server has ended: killed by {signal}")
        self._reader.join(1.0)
        said = [line.removeprefix(_PREFIX) for line in self.lines if line.startswith(_PREFIX)]
        error = ServerError(said[-1] if said else f"the server has ended with the code {code}")
        error.exit_code = code or ServerError.exit_code
        raise error

    def _refuse_while_loading(self) -> None:
        server = None if self.is_starting else self.server()
        if server is not None and not server.is_answering:
            reasons = [model.why for model in server.report.models]
            why = next(filter(None, reasons), "llmserve status shows more")
            raise ModelNotReadyError(
                f"the server is {server.state} ({why})", hint="say it again in a moment"
            )

    def follow(self) -> None:
        """Read what it prints, and show it while it starts."""
        self._reader = Thread(target=self._read, daemon=True)
        self._reader.start()

    def stop(self) -> None:
        """Stop it in order; a second Ctrl-C meanwhile ends it at once."""
        if self.process.poll() is None:
            self.process.terminate()
        try:
            self.process.wait(_GRACE + 25)
        except (KeyboardInterrupt, subprocess.TimeoutExpired):
            # A second signal makes it end without waiting for anything.
            self.process.terminate()
            with suppress(subprocess.TimeoutExpired):
                self.process.wait(10)
        finally:
            self.process.kill()

    def _read(self) -> None:
        # Its last line is why it ended, which `check` raises: where all lines stay, that would
        # stand there twice.
        held = ""
        for line in map(str.rstrip, self.process.stderr or ()):
            self.lines.append(line)
            if held and self.is_starting:
                self.status.update(held)
            held = ""
            if self.is_starting and line.startswith(_NOTE):
                self.status.note(line)
            elif self.is_starting and line.startswith(_PREFIX):
                text = line.removeprefix(_PREFIX)
                if sys.stderr.isatty():
                    self.status.update(text)
                else:
                    held = text


@contextmanager
def serving(repository: Path, words: Sequence[str]) -> Iterator[tuple[Running, ServerProcess]]:
    """Serve a repository in a process of its own while the block runs."""
    command = [sys.executable, "-m", "llmserve_cli", "serve", str(repository)]
    ports = [word for name in ("http", "grpc", "metrics") for word in (f"--{name}-port", "0")]
    with Status("starting Triton") as status:
        started = ServerProcess(
            ChildProcess([*command, *ports, "--grace", str(_GRACE), *words]), status
        )
        started.follow()
        try:
            while (server := started.server()) is None:
                started.check()
                time.sleep(_POLL)
        except BaseException:
            started.stop()
            raise
        started.is_starting = False
    try:
        yield server, started
    finally:
        with Status("stopping the server"):
            started.stop()
