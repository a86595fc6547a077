"""A server that runs."""

from __future__ import annotations

import time
from pathlib import Path
from types import TracebackType

from llmserve.errors import ServerError, UsageError
from llmserve.server.api import ServerApi
from llmserve.server.ports import Ports
from llmserve.server.process import GRACE, ServerProcess


class Server:
    """A running Triton, to be used in a ``with`` block or ended with :meth:`stop`.

    Its addresses are ``http_url``, ``grpc_url`` (without a scheme, as gRPC wants it) and
    ``metrics_url``; ``runtime`` says which Triton it is.
    """

    def __init__(
        self,
        process: ServerProcess,
        api: ServerApi,
        *,
        runtime: str,
        address: str,
        ports: Ports,
        log_file: Path,
        keep_log: bool,
        explicit: bool,
    ) -> None:
        self.pid = process.pid
        self.runtime = runtime
        self.log_file = log_file
        self.http_url = f"http://{address}:{ports.http}"
        self.grpc_url = f"{address}:{ports.grpc}"
        self.metrics_url = f"http://{address}:{ports.metrics}/metrics"
        self._process = process
        self._api = api
        self._explicit = explicit
        self._keep_log = keep_log

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

    def alive(self) -> bool:
        """Say whether the process still runs."""
        return self._process.exit_code() is None

    def wait(self, timeout: float | None = None) -> int | None:
        """Wait for the server to end by itself; return its exit code, or None if it runs on."""
        return self._process.wait(timeout)

    def stop(self, *, grace: float = GRACE) -> None:
        """End the server; requests in flight have ``grace`` seconds. Safe to call again.

        Nothing is left: no process, no shared memory, no temporary file. Only the log stays
        where it was asked for, or where the server had ended by itself.
        """
        ended_by_itself = not self.alive()
        try:
            self._process.stop(grace)
        finally:
            # Also where a second Ctrl-C has cut the stopping short.
            if not self._keep_log and not ended_by_itself:
                self.log_file.unlink(missing_ok=True)
                self._keep_log = True

    def _require_explicit(self) -> None:
        if not self._explicit:
            raise UsageError(
                "this server loads its models at the start and keeps them",
                mend="start it with explicit=True to load and unload",
            )
