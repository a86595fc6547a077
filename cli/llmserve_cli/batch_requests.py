"""The requests of ``llmserve batch``: many in flight, and tried again while the server is full."""

from __future__ import annotations

import json
import queue
import threading
import time
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from http.client import HTTPConnection, HTTPException, HTTPSConnection
from typing import Any
from urllib.parse import urlsplit
from uuid import uuid4

from llmserve.client import OpenAIApi
from llmserve.errors import RequestCancelledError, RequestRejectedError, UnreachableError
from llmserve_cli.batch_files import Request, Requests

BUSY = (429, 502, 503, 504)
"""The statuses of a server, or of a proxy before it, that may answer the same request later."""
FIRST_PAUSE = 1.0
LONGEST_PAUSE = 30.0
CHECK_SECONDS = 20.0
BREAKS = 3
"""How many times a request may break its connection to a server that answers others."""


class _BrokenError(OSError):
    """The connection was made, and ended before there was an answer."""


@dataclass(frozen=True)
class Response:
    status: int
    headers: dict[str, str]
    body: bytes


class Server:
    """A server with OpenAI's API; each thread keeps its connection for its next request."""

    def __init__(self, url: str, timeout: float | None, patience: float) -> None:
        self._api = OpenAIApi(url)
        self._connection_type = HTTPSConnection if self._api.is_encrypted else HTTPConnection
        self._timeout = timeout
        self._patience = patience
        self._kept = threading.local()
        self._lock = threading.Lock()
        self._refused_since: dict[str, float] = {}
        """When each model began to refuse all requests; "" is the server that does not answer."""
        self.stopped = threading.Event()
        self.is_proven = False
        """Whether it has answered any: then a request that breaks each time is itself at fault."""

    def check(self) -> None:
        """Raise before anything is sent if the address or the key is wrong."""
        try:
            response = self._send("GET", "/models", None, CHECK_SECONDS)
        except (OSError, HTTPException) as error:
            raise self._api.unreachable(error) from None
        finally:
            self.hang_up()
        if response.status == 401:
            raise self._api.refusal(response.status, response.body)
        if response.status == 404:
            raise UnreachableError(
                f"the server at {self._api.url} does not have OpenAI's API",
                hint="give another address with --openai",
            )

    def answer(self, request: Request, body: bytes) -> dict[str, Any]:
        """Return the line of the output for a request.

        What would affect all other requests too raises instead: a key that is refused, and a server
        that is not reachable for as long as patience lasts.
        """
        attempt = broken = 0
        while True:
            pause = min(FIRST_PAUSE * 2.0**attempt, LONGEST_PAUSE)
            try:
                path = request.endpoint.removeprefix("/v1")
                response = self._send("POST", path, body, self._timeout)
            except TimeoutError as error:
                if self._timeout is None:
                    raise self._api.unreachable(error) from None
                return _line(request, None, ("timeout", f"no answer within {self._timeout:g} s"))
            except (OSError, HTTPException) as error:
                if isinstance(error, _BrokenError) and self._answers_others():
                    broken += 1
                    if broken == BREAKS:
                        problem = f"the connection broke {broken} times: {error}"
                        return _line(request, None, ("connection_broken", problem))
                elif self._gives_up("", pause):
                    raise self._api.unreachable(error) from None
            else:
                self._has_answered("")
                pause = _pause(response, pause)
                if response.status not in BUSY:
                    self._has_answered(request.model)
                    return self._read(request, response)
                if self._gives_up(request.model, pause):
                    return self._read(request, response)
            attempt += 1
            if self.stopped.wait(pause):
                raise RequestCancelledError("the batch has stopped")

    def _answers_others(self) -> bool:
        """Whether the server is there and does its work, so that it is not to be waited for."""
        if not self.is_proven:
            return False
        try:
            self._send("GET", "/models", None, CHECK_SECONDS)
        except (OSError, HTTPException):
            return False
        self._has_answered("")
        return True

    def _gives_up(self, name: str, pause: float) -> bool:
        """Whether patience ends before the next attempt; it is that of all requests together.

        So a model that is gone costs a batch this time once, and not once for each line.
        """
        now = time.monotonic()
        with self._lock:
            since = self._refused_since.setdefault(name, now)
        return now + pause > since + self._patience

    def _has_answered(self, name: str) -> None:
        with self._lock:
            self._refused_since.pop(name, None)

    def _read(self, request: Request, response: Response) -> dict[str, Any]:
        try:
            body = json.loads(response.body)
        except (ValueError, RecursionError):
            body = None
        if response.status == 200 and isinstance(body, dict):
            self.is_proven = True
            return _line(request, _as_response(response, body), None)
        if response.status == 200:
            return _line(request, None, ("bad_answer", "the server's answer is not JSON"))
        refusal = self._api.refusal(response.status, response.body)
        if response.status == 401:
            raise refusal
        return _line(request, _as_response(response, body), (_code(body), refusal.problem))

    def _send(self, method: str, path: str, body: bytes | None, timeout: float | None) -> Response:
        connection: HTTPConnection | None = getattr(self._kept, "connection", None)
        if connection is not None and connection.sock is not None:
            connection.sock.settimeout(timeout)
            try:
                return self._exchange(connection, method, path, body)
            except TimeoutError:
                raise
            except (OSError, HTTPException):
                pass  # Servers close what is idle: only a new connection says more.
        connection = self._connection_type(self._api.host, self._api.port, timeout=timeout)
        try:
            connection.connect()
        except TimeoutError as error:
            # Nobody is there: another matter than an answer that takes too long.
            raise ConnectionError(str(error) or "no connection is made in time") from None
        self._kept.connection = connection
        try:
            return self._exchange(connection, method, path, body)
        except TimeoutError:
            raise
        except (OSError, HTTPException) as error:
            raise _BrokenError(str(error) or type(error).__name__) from None

    def _exchange(
        self, connection: HTTPConnection, method: str, path: str, body: bytes | None
    ) -> Response:
        try:
            path = urlsplit(self._api.url).path + path
            connection.request(method, path, body, self._api.headers())
            response = connection.getresponse()
            headers = {name.lower(): value for name, value in response.getheaders()}
            return Response(response.status, headers, response.read())
        except BaseException:
            connection.close()
            raise

    def hang_up(self) -> None:
        """Close this thread's connection."""
        if (connection := getattr(self._kept, "connection", None)) is not None:
            connection.close()


def answers(
    server: Server, requests: Requests, waiting: Sequence[Request], concurrency: int
) -> Generator[dict[str, Any], None, None]:
    """Yield the lines of the output as answers arrive; leaving the loop sends nothing more."""
    left = iter(waiting)
    lock = threading.Lock()
    # As many as there are threads: what nobody writes must not pile up.
    arrived: queue.Queue[dict[str, Any] | BaseException] = queue.Queue(concurrency)

    def work() -> None:
        try:
            while not server.stopped.is_set():
                with lock:
                    request = next(left, None)
                if request is None:
                    return
                arrived.put(server.answer(request, requests.body(request)))
        except BaseException as error:
            arrived.put(error)
        finally:
            server.hang_up()

    # Daemons, because Python waits for all others at exit, and so Ctrl-C would.
    for _ in range(min(concurrency, len(waiting))):
        threading.Thread(target=work, daemon=True).start()
    try:
        for _ in waiting:
            line = arrived.get()
            if isinstance(line, BaseException):
                raise line
            yield line
    finally:
        server.stopped.set()


def _line(
    request: Request, response: dict[str, Any] | None, error: tuple[str, str] | None
) -> dict[str, Any]:
    return {
        "id": f"batch_req_{uuid4().hex}",
        "custom_id": request.custom_id,
        "response": response,
        "error": None if error is None else {"code": error[0], "message": error[1]},
    }


def _as_response(response: Response, body: Any) -> dict[str, Any]:
    request_id = response.headers.get("x-request-id", "")
    return {"status_code": response.status, "request_id": request_id, "body": body}


def _code(body: Any) -> str:
    """Return the code of a refusal; servers use a number, a name or nothing."""
    error = body.get("error") if isinstance(body, dict) else None
    code = error.get("code") or error.get("type") if isinstance(error, dict) else None
    return str(code or RequestRejectedError.code)


def _pause(response: Response, otherwise: float) -> float:
    """Return how long the server asks to wait, within reason."""
    try:
        seconds = float(response.headers["retry-after"])
    except (LookupError, ValueError):
        return otherwise
    # A date, or not a number, is not what a server with this API sends.
    return min(max(seconds, 0.05), LONGEST_PAUSE) if seconds == seconds else otherwise
