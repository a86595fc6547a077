"""The requests of ``llmserve batch``: many in flight, and tried again while the server is full."""

from __future__ import annotations

import json
import queue
import threading
import time
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from http.client import HTTPConnection, HTTPException, HTTPSConnection
from typing import Any
from urllib.parse import quote, urlsplit

from llmserve.client import BatchRequest, BatchRequests, OpenAIApi, answer_line
from llmserve.contract.failures import DEATHS_OF_ONE, FAILURES, MAY_SUCCEED_LATER, back_off
from llmserve.errors import RequestCancelledError, RequestRejectedError, UnreachableError

FIRST_PAUSE = 1.0
LONGEST_PAUSE = 30.0
CHECK_SECONDS = 20.0
_LOOK_AGAIN = 0.2
_DIED, _MISSING = FAILURES["model_died"], FAILURES["not_ready"]


class _BrokenError(OSError):
    """The connection was made, and ended before there was an answer."""


@dataclass(frozen=True)
class Response:
    status: int
    headers: dict[str, str]
    body: bytes


@dataclass
class _Tries:
    """What has come of the attempts to send one request."""

    count: int = 0
    broken: int = 0
    """How often the model, or the server, ended meanwhile; after the first time it is alone."""
    pause: float = 0.0


class _Turns:
    """Many requests at a time, or one that may end the server, and then others with it."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._running = 0
        self._alone = 0
        """How many wait to be alone, or are: nothing else begins meanwhile."""

    @contextmanager
    def turn(self, *, alone: bool) -> Iterator[None]:
        with self._changed:
            self._alone += alone
            self._changed.wait_for(lambda: not self._running if alone else not self._alone)
            self._running += 1
        try:
            yield
        finally:
            with self._changed:
                self._running -= 1
                self._alone -= alone
                self._changed.notify_all()


class Server:
    """A server with OpenAI's API; each thread keeps its connection for its next request."""

    def __init__(self, url: str, timeout: float | None, patience: float) -> None:
        self._api = OpenAIApi(url)
        self._connection_type = HTTPSConnection if self._api.is_encrypted else HTTPConnection
        self._timeout = timeout
        self._patience = patience
        self._kept = threading.local()
        self._lock = threading.Lock()
        self._turns = _Turns()
        self._refused_since: dict[str, float] = {}
        """When each model began to refuse all requests; "" is the server that does not answer."""
        self._answered: set[str] = set()
        """The models that have answered: if one is missing later, it is loaded again."""
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

    def answer(self, request: BatchRequest, body: bytes) -> dict[str, Any]:
        """Return the line of the output for a request.

        What would affect all other requests too raises instead: a key that is refused, and a server
        that is not reachable for as long as patience lasts.
        """
        tries = _Tries()
        while True:
            with self._turns.turn(alone=tries.broken > 0):
                self._stop_if_asked(0)
                # Of a model that is still away, a death says nothing of this request.
                while tries.broken and self._is_loading(request.model):
                    if self._gives_up(request.model, tries.pause):
                        break
                    self._stop_if_asked(max(tries.pause, _LOOK_AGAIN))
                line = self._attempt(request, body, tries)
            if line is not None:
                return line
            self._stop_if_asked(tries.pause)
            tries.count += 1

    def _stop_if_asked(self, seconds: float) -> None:
        if self.stopped.wait(seconds):
            raise RequestCancelledError("the batch has stopped")

    def _attempt(self, request: BatchRequest, body: bytes, tries: _Tries) -> dict[str, Any] | None:
        """Send a request; None if it is to be sent again after its pause."""
        tries.pause = back_off(tries.count, FIRST_PAUSE, LONGEST_PAUSE)
        try:
            path = request.endpoint.removeprefix("/v1")
            response = self._send("POST", path, body, self._timeout)
        except TimeoutError as error:
            if self._timeout is None:
                raise self._api.unreachable(error) from None
            problem = f"no answer within {self._timeout:g} s"
            return answer_line(request.custom_id, error=("timeout", problem))
        except (OSError, HTTPException) as error:
            return self._after_break(request, error, tries)
        self._has_answered("")
        tries.pause = _pause(response, tries.pause)
        tries.broken += _has_died(response)
        is_last = tries.broken == DEATHS_OF_ONE or not self._may_answer_later(request, response)
        if is_last:
            self._has_answered(request.model)
        if is_last or self._gives_up(request.model, tries.pause):
            return self._read(request, response)
        return None

    def _after_break(
        self, request: BatchRequest, error: Exception, tries: _Tries
    ) -> dict[str, Any] | None:
        if isinstance(error, _BrokenError) and self.is_proven:
            tries.broken += 1
            if tries.broken == DEATHS_OF_ONE:
                problem = f"the connection broke {DEATHS_OF_ONE} times: {error}"
                return answer_line(request.custom_id, error=("connection_broken", problem))
        if not self._answers_others() and self._gives_up("", tries.pause):
            raise self._api.unreachable(error) from None
        return None

    def _may_answer_later(self, request: BatchRequest, response: Response) -> bool:
        if response.status != _MISSING.status:
            return response.status in MAY_SUCCEED_LATER
        return request.model in self._answered or self._is_loading(request.model)

    def _is_loading(self, model: str) -> bool:
        """Return whether the server says that a model is not ready; only llmserve's says so."""
        try:
            path = f"/readyz/{quote(model)}"
            return self._send("GET", path, None, CHECK_SECONDS, at_root=True).status == 503
        except (OSError, HTTPException):
            return False

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

    def _read(self, request: BatchRequest, response: Response) -> dict[str, Any]:
        body = _json(response)
        answered = {"status": response.status, "body": body}
        answered["request_id"] = response.headers.get("x-request-id", "")
        if response.status == 200 and isinstance(body, dict):
            self.is_proven = True
            self._answered.add(request.model)
            return answer_line(request.custom_id, **answered)
        if response.status == 200:
            error = ("bad_answer", "the server's answer is not JSON")
            return answer_line(request.custom_id, error=error)
        refusal = self._api.refusal(response.status, response.body)
        if response.status == 401:
            raise refusal
        error = (_code(body) or RequestRejectedError.code, refusal.problem)
        return answer_line(request.custom_id, **answered, error=error)

    def _send(
        self,
        method: str,
        path: str,
        body: bytes | None,
        timeout: float | None,
        *,
        at_root: bool = False,
    ) -> Response:
        if not at_root:
            path = urlsplit(self._api.url).path + path
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
    server: Server, requests: BatchRequests, waiting: Sequence[BatchRequest], concurrency: int
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
                body = json.dumps(requests.body(request)).encode()
                arrived.put(server.answer(request, body))
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


def _json(response: Response) -> Any:
    try:
        return json.loads(response.body)
    except (ValueError, RecursionError):
        return None


def _code(body: Any) -> str | None:
    """Return the code of a refusal; servers use a number, a name or nothing."""
    error = body.get("error") if isinstance(body, dict) else None
    code = error.get("code") or error.get("type") if isinstance(error, dict) else None
    return str(code) if code else None


def _has_died(response: Response) -> bool:
    """Return whether the process of the model has ended, perhaps because of this request."""
    return response.status == _DIED.status and _code(_json(response)) == _DIED.api_code


def _pause(response: Response, otherwise: float) -> float:
    """Return how long the server asks to wait, within reason."""
    try:
        seconds = float(response.headers["retry-after"])
    except (LookupError, ValueError):
        return otherwise
    # A date, or not a number, is not what a server with this API sends.
    return min(max(seconds, 0.05), LONGEST_PAUSE) if seconds == seconds else otherwise
