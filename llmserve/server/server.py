"""A server that runs: its HTTP interface, and what a caller has of it and its process."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Collection, Mapping
from http.client import HTTPException
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.parse import quote
from urllib.request import ProxyHandler, Request, build_opener

from llmserve.errors import ServerError, UsageError
from llmserve.repository.dockerfile import KEY_HEADER
from llmserve.runtime.contract import STAND_IN_METRIC
from llmserve.server.launch import Instance, Launch, link_model
from llmserve.server.log import in_plain_words
from llmserve.server.process import GuardedProcess
from llmserve.server.settings import ServerSettings

_ESTABLISHED = "01"
_PATIENT = 20.0
"""Seconds after which a server that does not answer is taken for one that hangs."""
_QUICK = 5.0
"""Seconds for what a server answers at once; to load a model may take any time."""


class Server:
    """A running Triton, to be used in a ``with`` block or ended with :meth:`stop`.

    Its addresses are ``http_url``, ``grpc_url`` (without a scheme, as gRPC wants it) and
    ``metrics_url``; ``runtime`` says which Triton it is.
    """

    runtime = ""
    notes: tuple[str, ...] = ()
    """What models said at load that whoever serves them should know."""

    def __init__(
        self, settings: ServerSettings, instance: Instance, launch: Launch, log_file: Path
    ) -> None:
        self.ports = ports = instance.ports
        address = "127.0.0.1" if ports.host == "0.0.0.0" else ports.host  # noqa: S104
        self.http_url = f"http://{address}:{ports.http}"
        self.grpc_url = f"{address}:{ports.grpc}"
        self.metrics_url = f"http://{address}:{ports.metrics}/metrics"
        self.log_file = log_file
        self.renewable = settings.renewable
        self._settings = settings
        self._instance = instance
        self._kind = launch.kind
        self._keep_log = settings.log_file is not None
        self.process = GuardedProcess(
            launch, instance.name, instance.scratch, log_file, grace=settings.grace
        )
        self.pid = self.process.pid

    def __repr__(self) -> str:
        return f"<Server {self.runtime} at {self.http_url}, pid {self.pid}>"

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()

    def ready(self) -> bool:
        """Say whether it and all its models answer, and take down which Triton it is.

        Its name is asked for, since somebody else's server may have come first to the port.
        """
        try:
            self._ask("v2/health/ready", timeout=_QUICK)
            told = self._ask("v2", timeout=_QUICK)
        except (ServerError, ValueError):
            return False
        self.runtime = f"{self._kind} Triton {told.get('version')}"
        return bool(told.get("name") == self._instance.name)

    def models(self) -> dict[str, str]:
        """Return each model's state, such as ``READY``; ``""`` where it is not loaded."""
        index = self._ask("v2/repository/index", {})
        return {entry["name"]: entry.get("state", "") for entry in index}

    def stand_ins(self) -> dict[str, str]:
        """Return the models that a stand-in answers, and what it stands in for."""
        return stand_ins(self.metrics_url)

    def load(self, name: str) -> None:
        """Load a model of the repository, or load it anew. For ``explicit`` servers."""
        self._require_explicit()
        try:
            self._ask(_path(name, "load"), {})
        except ServerError as error:
            raise ServerError(
                f"model {name!r} failed to load: {error.problem}", mend=f"see {self.log_file}"
            ) from None

    def unload(self, name: str, *, timeout: float = 60.0) -> None:
        """Unload a model and wait until it is gone. For ``explicit`` servers."""
        self._require_explicit()
        self._ask(_path(name, "unload"), {"parameters": {"unload_dependents": True}})
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
        link_model(
            self._settings.repository.resolve() / name, self._instance.scratch / "models" / name
        )

    def answers(self) -> dict[str, int]:
        """Return how many requests each model has answered since it was loaded."""
        found = self._ask("v2/models/stats", timeout=_PATIENT)["model_stats"]
        return {one["name"]: one["inference_stats"]["success"]["count"] for one in found}

    def alive(self) -> bool:
        return self.process.alive()

    def wait(self, timeout: float | None = None) -> int | None:
        """Wait for the server to end by itself; return its exit code, or None if it runs on."""
        return self.process.wait(timeout)

    def stop(self, *, grace: float | None = None) -> None:
        """End the server; requests in flight have ``grace`` seconds, else what it was started with.

        Safe to call again.

        Nothing is left: no process, no shared memory, no temporary file. Only the log stays
        where it was asked for, or where the server had ended by itself.
        """
        ended_by_itself = not self.alive()
        try:
            grace = self._settings.grace if grace is None else grace
            self.process.stop(grace, idle=self._nobody_waits)
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

    def _ask(self, path: str, body: Any = None, *, timeout: float | None = None) -> Any:
        key = {KEY_HEADER: self._instance.key} if self._settings.explicit else {}
        data = None if body is None else json.dumps(body).encode()
        try:
            answer = _fetch(f"{self.http_url}/{path}", data, key, timeout)
        except HTTPError as error:
            try:
                problem = in_plain_words(json.loads(error.read())["error"])
            except (ValueError, KeyError, TypeError):
                problem = f"the server answered {error.code} to /{path}"
            raise ServerError(problem) from None
        except (OSError, HTTPException) as error:
            why = getattr(error, "reason", error)
            raise ServerError(f"the server does not answer ({why})") from error
        return json.loads(answer or b"null")


def _path(model: str, action: str) -> str:
    return f"v2/repository/models/{quote(model, safe='')}/{action}"


def _fetch(
    url: str, data: bytes | None, headers: Mapping[str, str], timeout: float | None
) -> bytes:
    """Ask over HTTP. No proxy is used, whatever the environment says."""
    direct = build_opener(ProxyHandler({}))
    request = Request(url, data, {"content-type": "application/json", **headers})  # noqa: S310
    with direct.open(request, timeout=timeout) as answer:
        return bytes(answer.read())


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
    try:
        page = _fetch(metrics_url, None, {}, _QUICK).decode()
    except (OSError, HTTPException, ValueError):
        return {}
    return {
        labels["model"]: labels["instead_of"]
        for line in re.findall(rf"^{STAND_IN_METRIC}{{(.*)}} 1(?:\.0)?$", page, re.MULTILINE)
        if (labels := dict(re.findall(r'(\w+)="([^"]*)"', line))).keys() >= {"model", "instead_of"}
    }
