"""A server that runs: its process, its HTTP interface, and what a caller has of both."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any

from llmserve.errors import ServerError, UsageError
from llmserve.runtime.contract import STAND_IN_METRIC
from llmserve.server.launch import KEY_HEADER, Launch, link_model
from llmserve.server.log import in_plain_words
from llmserve.server.settings import Ports, ServerSettings

_ESTABLISHED = "01"
_LOOK = 0.2
_IDLE = 4.0
_PATIENT = 20.0
"""Seconds after which a server that does not answer is taken for one that hangs."""
_QUICK = 5.0
"""Seconds for what a server answers at once; to load a model may take any time."""


class GuardedProcess:
    """A process under a guard (:mod:`llmserve.server.guard`) that ends it and cleans up."""

    def __init__(
        self, launch: Launch, name: str, scratch: Path, log_file: Path, *, grace: float
    ) -> None:
        watch = {
            "argv": launch.argv,
            "parent": os.getpid(),
            "scratch": str(scratch),
            "shm_prefix": name,
            "grace": grace,
            "last_resort": launch.last_resort,
        }
        guard = Path(__file__).with_name("guard.py")
        with log_file.open("ab") as log:
            self._guard = subprocess.Popen(
                [sys.executable, "-I", "-S", str(guard), name],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env=dict(launch.env),
                # So that Ctrl-C in the terminal reaches this process alone.
                start_new_session=True,
            )
        if self._guard.stdout is None or self._guard.stdin is None:
            raise AssertionError("both were asked for as pipes")
        self._orders = self._guard.stdin
        self._send(json.dumps(watch).encode() + b"\n")
        with self._guard.stdout as answer:
            self.pid = int(answer.readline() or 0)

    def exit_code(self) -> int | None:
        """Return the exit code, or None while the server runs."""
        return self._guard.poll()

    def wait(self, timeout: float | None) -> int | None:
        """Wait for the server to end by itself; return None where it did not in time."""
        try:
            return self._guard.wait(timeout)
        except subprocess.TimeoutExpired:
            return None

    def stop(self, grace: float, *, idle: Callable[[], bool] = lambda: False) -> None:
        """End the process and wait until it and all that belongs to it is gone.

        Once it is ``idle`` it has no more than four seconds.
        """
        try:
            self._order(grace)
            # The guard kills after ``grace``, so this only ends late where the guard hangs.
            deadline, hurried = time.monotonic() + grace + 40.0, False
            while self.wait(_LOOK) is None:
                if time.monotonic() > deadline:
                    self._kill()
                elif not hurried and idle():
                    hurried = True
                    self._order(_IDLE)
        except BaseException:
            # Interrupted while waiting, as by a second Ctrl-C: no more patience.
            self._order(0.0)
            if self.wait(5.0) is None:
                self._kill()
            raise
        finally:
            with suppress(OSError):
                self._orders.close()

    def _order(self, grace: float) -> None:
        self._send(b"%f\n" % grace)

    def _send(self, line: bytes) -> None:
        # A guard that has ended reads nothing, and needs no order any more.
        with suppress(OSError, ValueError):
            self._orders.write(line)
            self._orders.flush()

    def _kill(self) -> None:
        if self.pid:
            with suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)
        self._guard.kill()
        self._guard.wait()


class ServerApi:
    """One server's HTTP interface. No proxy is used, whatever the environment says."""

    def __init__(self, host: str, port: int, key: str | None) -> None:
        self._host = host
        self._port = port
        self._headers = {KEY_HEADER: key} if key else {}

    def ready(self, name: str) -> bool:
        """Say whether the server of this name and all its models answer.

        The name is asked for since somebody else's server may have come first to the port.
        """
        try:
            if self._ask("GET", "/v2/health/ready", timeout=_QUICK)[0] != 200:
                return False
            return self.metadata().get("name") == name
        except (OSError, ServerError):
            return False

    def metadata(self) -> dict[str, Any]:
        """Return what the server says of itself: ``name``, ``version`` and ``extensions``."""
        answer: dict[str, Any] = self._checked("GET", "/v2", timeout=_QUICK)
        return answer

    def models(self) -> dict[str, str]:
        """Return the models of the repository and their states; unloaded ones have ``""``."""
        index = self._checked("POST", "/v2/repository/index")
        return {entry["name"]: entry.get("state", "") for entry in index}

    def answers(self) -> dict[str, int]:
        found = self._checked("GET", "/v2/models/stats", timeout=_PATIENT)["model_stats"]
        return {one["name"]: one["inference_stats"]["success"]["count"] for one in found}

    def load(self, name: str) -> None:
        """Load a model, or load it anew; return when it is ready."""
        self._checked("POST", _model(name, "load"))

    def unload(self, name: str) -> None:
        """Ask for a model to be unloaded."""
        body = {"parameters": {"unload_dependents": True}}
        self._checked("POST", _model(name, "unload"), body)

    def _checked(
        self,
        method: str,
        path: str,
        body: Mapping[str, Any] | None = None,
        *,
        timeout: float | None = None,
    ) -> Any:
        try:
            status, answer = self._ask(method, path, body, timeout=timeout)
        except OSError as error:
            raise ServerError(f"the server does not answer ({error})") from error
        if status == 200:
            return json.loads(answer or b"null")
        try:
            problem = in_plain_words(json.loads(answer)["error"])
        except (ValueError, KeyError, TypeError):
            problem = f"the server answered {status} to {path}"
        raise ServerError(problem)

    def _ask(
        self,
        method: str,
        path: str,
        body: Mapping[str, Any] | None = None,
        *,
        timeout: float | None,
    ) -> tuple[int, bytes]:
        from http.client import HTTPConnection, HTTPException

        connection = HTTPConnection(self._host, self._port, timeout=timeout)
        try:
            connection.request(method, path, json.dumps(body or {}), self._headers)
            response = connection.getresponse()
            return response.status, response.read()
        except HTTPException as error:
            raise ConnectionError(str(error) or type(error).__name__) from error
        finally:
            connection.close()


def _model(name: str, action: str) -> str:
    from urllib.parse import quote

    return f"/v2/repository/models/{quote(name, safe='')}/{action}"


class Server:
    """A running Triton, to be used in a ``with`` block or ended with :meth:`stop`.

    Its addresses are ``http_url``, ``grpc_url`` (without a scheme, as gRPC wants it) and
    ``metrics_url``; ``runtime`` says which Triton it is.
    """

    def __init__(
        self,
        process: GuardedProcess,
        api: ServerApi,
        *,
        settings: ServerSettings,
        runtime: str,
        address: str,
        ports: Ports,
        log_file: Path,
        models: Path,
        notes: tuple[str, ...] = (),
    ) -> None:
        self.pid = process.pid
        self.runtime = runtime
        self.log_file = log_file
        self.notes = notes
        """What models said at load that whoever serves them should know."""
        self.http_url = f"http://{address}:{ports.http}"
        self.grpc_url = f"{address}:{ports.grpc}"
        self.metrics_url = f"http://{address}:{ports.metrics}/metrics"
        self.ports = ports
        self.renewable = settings.renewable
        self._process = process
        self._api = api
        self._settings = settings
        self._models = models
        self._keep_log = settings.log_file is not None

    def __repr__(self) -> str:
        return f"<Server {self.runtime} at {self.http_url}, pid {self.pid}>"

    def __enter__(self) -> Server:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.stop()

    def models(self) -> dict[str, str]:
        """Return each model's state, such as ``READY``; ``""`` where it is not loaded."""
        return self._api.models()

    def stand_ins(self) -> dict[str, str]:
        """Return the models that a stand-in answers, and what it stands in for."""
        return stand_ins(self.metrics_url)

    def load(self, name: str) -> None:
        """Load a model of the repository, or load it anew. For ``explicit`` servers."""
        self._require_explicit()
        try:
            self._api.load(name)
        except ServerError as error:
            raise ServerError(
                f"model {name!r} failed to load: {error.problem}", mend=f"see {self.log_file}"
            ) from None

    def unload(self, name: str, *, timeout: float = 60.0) -> None:
        """Unload a model and wait until it is gone. For ``explicit`` servers."""
        self._require_explicit()
        self._api.unload(name)
        deadline = time.monotonic() + timeout
        while (state := self.models().get(name, "")) not in ("", "UNAVAILABLE"):
            if time.monotonic() > deadline:
                raise ServerError(f"model {name!r} is still {state} after {timeout:g} s")
            time.sleep(0.05)

    def renew(self, name: str) -> None:
        """Have a model loaded anew, from what the repository has now; for ``renewable`` servers.

        That takes a second to begin. Until the new one is loaded the old one answers, and what it
        has begun it finishes.
        """
        if not self.renewable:
            raise UsageError("this server cannot load a model anew", mend="start it again")
        link_model(self._settings.repository.resolve() / name, self._models / name)

    def answers(self) -> dict[str, int]:
        """Return how many requests each model has answered since it was loaded."""
        return self._api.answers()

    def alive(self) -> bool:
        """Say whether the process still runs."""
        return self._process.exit_code() is None

    def wait(self, timeout: float | None = None) -> int | None:
        """Wait for the server to end by itself; return its exit code, or None if it runs on."""
        return self._process.wait(timeout)

    def stop(self, *, grace: float | None = None) -> None:
        """End the server; requests in flight have ``grace`` seconds, else what it was started with.

        Safe to call again.

        Nothing is left: no process, no shared memory, no temporary file. Only the log stays
        where it was asked for, or where the server had ended by itself.
        """
        ended_by_itself = not self.alive()
        try:
            grace = self._settings.grace if grace is None else grace
            self._process.stop(grace, idle=self._nobody_waits)
        finally:
            # Also where a second Ctrl-C has cut the stopping short.
            if not self._keep_log and not ended_by_itself:
                self.log_file.unlink(missing_ok=True)
                self._keep_log = True

    def _nobody_waits(self) -> bool:
        """Say whether no client is left: Triton counts what was cancelled in a queue for ever."""
        if self._settings.runtime == "docker":
            return False
        return connections((self.ports.http, self.ports.grpc)) == 0

    def _require_explicit(self) -> None:
        if not self._settings.explicit:
            raise UsageError(
                "this server loads its models at the start and keeps them",
                mend="start it with explicit=True to load and unload",
            )


def connections(ports: Collection[int]) -> int | None:
    """Return how many connections this machine has at its own ports, None where it cannot say."""
    found = 0
    try:
        for table in ("tcp", "tcp6"):
            for line in Path(f"/proc/net/{table}").read_text(encoding="ascii").splitlines()[1:]:
                local, state = line.split()[1:4:2]
                found += state == _ESTABLISHED and int(local.rpartition(":")[2], 16) in ports
    except FileNotFoundError:
        return None
    return found


def stand_ins(metrics_url: str) -> dict[str, str]:
    """Return what a server's metrics say of stand-ins: for each model, what answers in its place.

    Nothing where the server publishes no metrics.
    """
    import urllib.request

    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with direct.open(metrics_url, timeout=_QUICK) as answer:
            page = answer.read().decode()
    except (OSError, ValueError):
        return {}
    return {
        labels["model"]: labels["instead_of"]
        for line in re.findall(rf"^{STAND_IN_METRIC}{{(.*)}} 1(?:\.0)?$", page, re.MULTILINE)
        if (labels := dict(re.findall(r'(\w+)="([^"]*)"', line))).keys() >= {"model", "instead_of"}
    }
