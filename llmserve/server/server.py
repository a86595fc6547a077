"""A running server, controlled through its HTTP interface and its process."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping
from contextlib import suppress
from http.client import HTTPException
from pathlib import Path
from types import MappingProxyType
from typing import Any
from urllib.error import HTTPError
from urllib.parse import quote
from urllib.request import ProxyHandler, Request, build_opener

from llmserve.contract.address import Address
from llmserve.contract.names import STAND_IN_METRIC
from llmserve.errors import ServerError, UsageError
from llmserve.server.find.launch import (
    Instance,
    Launch,
    link_model,
    unlink_model,
)
from llmserve.server.run.log import in_plain_words
from llmserve.server.run.process import GuardedProcess
from llmserve.server.run.stubs import Stubs
from llmserve.server.settings import ServerSettings
from llmserve.server.workarounds import keep_model, withdraw_model

_NOT_READY = (400, 404)
"""How Triton answers if a model is not ready, or not known."""
_ESTABLISHED = "01"
_HANG_TIMEOUT = 20.0
"""Seconds after which a server that does not answer is considered hung."""
_TIMEOUT = 5.0
"""Seconds for requests that a server answers at once."""


class RefusedError(ServerError):
    """An HTTP answer that is an error."""

    def __init__(self, problem: str, code: int) -> None:
        super().__init__(problem)
        self.code = code


class Server:
    """A running Triton; use it in a ``with`` block, or end it with :meth:`stop`.

    ``address`` is where it listens; ``runtime`` describes the kind and version of Triton.
    """

    runtime = ""
    notes: tuple[str, ...] = ()
    """Messages to the operator that models have logged while loading."""
    failures: Mapping[str, str] = MappingProxyType({})
    """The models that it serves without, since they failed to load, and why."""

    def __init__(
        self, settings: ServerSettings, instance: Instance, launch: Launch, log_file: Path
    ) -> None:
        self.ports = ports = instance.ports
        address = "127.0.0.1" if ports.host == "0.0.0.0" else ports.host  # noqa: S104
        self.address = Address(
            grpc=f"{address}:{ports.grpc}",
            http=f"http://{address}:{ports.http}",
            metrics=f"http://{address}:{ports.metrics}/metrics",
        )
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
        self.stubs = Stubs(self.pid)

    @property
    def grpc_url(self) -> str:
        return self.address.grpc

    @property
    def http_url(self) -> str:
        return self.address.http

    @property
    def metrics_url(self) -> str:
        return self.address.metrics

    def __repr__(self) -> str:
        return f"<Server {self.runtime} at {self.http_url}, pid {self.pid}>"

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()

    def ready(self) -> bool:
        """Return whether the server and all its models are ready, and set ``runtime``.

        The name is compared, since another user's server may have taken the port first.
        """
        try:
            self._ask("v2/health/ready", timeout=_TIMEOUT)
            metadata = self._ask("v2", timeout=_TIMEOUT)
        except (ServerError, ValueError):
            return False
        if not isinstance(metadata, dict):
            return False
        self.runtime = f"{self._kind} Triton {metadata.get('version')}"
        return bool(metadata.get("name") == self._instance.name)

    def models(self) -> dict[str, str]:
        """Return the state of each model, such as ``READY``; ``""`` if it is not loaded."""
        index = self._ask("v2/repository/index", {})
        return {entry["name"]: entry.get("state", "") for entry in index}

    def takes_requests(self, name: str) -> bool:
        """Return whether a model is ready; :meth:`models` forgets one whose folder was dropped.

        Raises :class:`ServerError` if the server does not say so: it may hang, and serve it later.
        """
        try:
            self._ask(f"v2/models/{quote(name, safe='')}/ready", timeout=_TIMEOUT)
        except RefusedError as error:
            if error.code not in _NOT_READY:
                raise
            return False
        return True

    def stand_ins(self) -> dict[str, str]:
        """Return the models that a stand-in runs, each with the backend that it replaces."""
        return stand_ins(self.metrics_url)

    def renew(self, name: str) -> None:
        """Make Triton reload a model from the current repository; for ``renewable`` servers.

        This takes a second to begin. The old model answers until the new one is loaded, and
        finishes its requests in flight.
        """
        self._require_renewable()
        model = self._settings.repository.resolve() / name
        if not (model / "config.pbtxt").is_file():
            raise ServerError(f"no model {name!r} in {self._settings.repository}")
        link_model(model, self._links / name, self._settings.texts.get(name))

    def drop(self, name: str) -> None:
        """Make Triton unload a model; for ``renewable`` servers. This takes a second to begin."""
        self._require_renewable()
        unlink_model(self._links / name)

    def stop_trying(self, name: str, *, loaded_before: bool) -> None:
        """Keep Triton from trying again and again to load a model that has failed to load.

        If it was ``loaded_before``, that one stays. Otherwise, this takes a few seconds.
        """
        with suppress(OSError):
            (keep_model if loaded_before else withdraw_model)(self._links / name)

    def answers(self) -> dict[str, int]:
        """Return how many requests each model has answered since it was loaded."""
        models = self._ask("v2/models/stats", timeout=_HANG_TIMEOUT)["model_stats"]
        return {model["name"]: model["inference_stats"]["success"]["count"] for model in models}

    def alive(self) -> bool:
        return self.process.alive()

    def wait(self, timeout: float | None = None) -> int | None:
        """Wait for the server to end on its own; return its exit code, or None on timeout."""
        return self.process.wait(timeout)

    def stop(self, *, grace: float | None = None) -> None:
        """Stop the server; requests in flight have ``grace`` seconds, by default the settings'.

        Safe to call again.

        Nothing is left: no process, no shared memory, no temporary file. Only the log is kept if
        the settings name a file for it, or if the server had ended on its own.
        """
        ended_on_its_own = not self.alive()
        try:
            grace = self._settings.grace if grace is None else grace
            self.process.stop(grace, idle=self._has_no_clients)
        finally:
            # Even if a second Ctrl-C has cut the shutdown short.
            if not self._keep_log and not ended_on_its_own:
                self.log_file.unlink(missing_ok=True)
                self._keep_log = True

    def _has_no_clients(self) -> bool:
        """Return whether no client is left (workarounds.COUNTED_FOREVER)."""
        if self._settings.runtime == "docker":
            return False
        return connections((self.ports.http, self.ports.grpc)) == 0

    @property
    def _links(self) -> Path:
        return self._instance.scratch / "models"

    def _require_renewable(self) -> None:
        if not self.renewable:
            raise UsageError("this server cannot change its models", hint="restart it")

    def _ask(self, path: str, body: Any = None, *, timeout: float | None = None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        try:
            response = _fetch(f"{self.http_url}/{path}", data, timeout)
        except HTTPError as error:
            problem = f"the server answered {error.code} to /{path}"
            # Another program may have taken the port, which answers as it likes.
            with suppress(ValueError, KeyError, TypeError, AttributeError):
                problem = in_plain_words(json.loads(error.read())["error"])
            raise RefusedError(problem, error.code) from None
        except (OSError, HTTPException) as error:
            reason = getattr(error, "reason", error)
            raise ServerError(f"the server does not answer ({reason})") from error
        return json.loads(response or b"null")


def _fetch(url: str, data: bytes | None, timeout: float | None) -> bytes:
    """Send an HTTP request. The environment's proxy settings are ignored."""
    direct = build_opener(ProxyHandler({}))
    request = Request(url, data, {"content-type": "application/json"})  # noqa: S310
    with direct.open(request, timeout=timeout) as response:
        return bytes(response.read())


def connections(ports: Collection[int]) -> int | None:
    """Return the number of connections to these ports of this machine, None if it is unknown."""
    count = 0
    try:
        for table in ("tcp", "tcp6"):
            for line in Path(f"/proc/net/{table}").read_text(encoding="ascii").splitlines()[1:]:
                local, state = line.split()[1:4:2]
                count += state == _ESTABLISHED and int(local.rpartition(":")[2], 16) in ports
    except FileNotFoundError:
        return None
    return count


def stand_ins(metrics_url: str) -> dict[str, str]:
    """Return the models that a stand-in runs, each with the backend that it replaces.

    The result is empty if the server publishes no metrics.
    """
    try:
        page = _fetch(metrics_url, None, _TIMEOUT).decode()
    except (OSError, HTTPException, ValueError):
        return {}
    return {
        labels["model"]: labels["instead_of"]
        for line in re.findall(rf"^{STAND_IN_METRIC}{{(.*)}} 1(?:\.0)?$", page, re.MULTILINE)
        if (labels := dict(re.findall(r'(\w+)="([^"]*)"', line))).keys() >= {"model", "instead_of"}
    }
