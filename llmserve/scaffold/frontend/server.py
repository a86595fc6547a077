"""The frontend ``scaffold``: a process in front of Triton."""

from __future__ import annotations

import argparse
import signal
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from llmserve.client import Client, connect
from llmserve.errors import LLMServeError

_MOST_BYTES = 1 << 20
_SECONDS_TO_SEND = 30


class ScaffoldServer(ThreadingHTTPServer):
    """An HTTP server that can let requests in flight finish when it ends."""

    def __init__(self, address: tuple[str, int], client: Client, model: str) -> None:
        self.client = client
        self.model = model
        self._in_flight: list[threading.Thread] = []
        super().__init__(address, Handler)

    def process_request(self, request: Any, client_address: Any) -> None:
        arguments = (request, client_address)
        # The process does not wait for it: ``finish`` decides how long to.
        thread = threading.Thread(target=self.process_request_thread, args=arguments, daemon=True)
        self._in_flight = [*(other for other in self._in_flight if other.is_alive()), thread]
        thread.start()

    def finish(self, seconds: float) -> None:
        """Wait that long for requests in flight; call it when no more are accepted."""
        deadline = time.monotonic() + seconds
        for thread in self._in_flight:
            thread.join(max(0.0, deadline - time.monotonic()))


class Handler(BaseHTTPRequestHandler):
    # A client that sends nothing must not hold its connection for ever.
    timeout = _SECONDS_TO_SEND
    server: ScaffoldServer

    def do_POST(self) -> None:
        length = self.headers.get("Content-Length", "")
        if not length.isdecimal() or int(length) > _MOST_BYTES:
            self._answer(400, f"send Content-Length, at most {_MOST_BYTES}")
            return
        body = self._body(int(length))
        if len(body) < int(length):
            self._answer(400, "the body is shorter than Content-Length")
            return
        try:
            answer = self.server.client.generate(self.server.model, body.decode(errors="replace"))
        except LLMServeError as error:
            self._answer(400, str(error))
        else:
            self._answer(200, answer.text)

    def _body(self, length: int) -> bytes:
        """Read the body; all of it has to arrive in time, not only its next byte."""
        deadline = time.monotonic() + _SECONDS_TO_SEND
        body = b""
        while len(body) < length:
            self.connection.settimeout(max(0.001, deadline - time.monotonic()))
            part = self.rfile.read1(length - len(body))
            if not part:
                break
            body += part
        self.connection.settimeout(self.timeout)
        return body

    def _answer(self, status: int, text: str) -> None:
        body = text.encode()
        self.send_response(status)
        self.send_header("Content-Type", "text/plain; charset=utf-8")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Do not log requests: they are private."""


def main() -> None:
    parser = argparse.ArgumentParser()
    for option in ("--host", "--url", "--model"):
        parser.add_argument(option)
    parser.add_argument("--port", type=int)
    parser.add_argument("--grace", type=float)
    options = parser.parse_args()
    with connect(options.url, timeout=300) as client:
        address = (options.host, options.port)
        try:
            server = ScaffoldServer(address, client, options.model)
        except OSError as error:
            # The last line on standard error is what `llmserve serve` shows.
            raise SystemExit(f"cannot listen on port {options.port}: {error.strerror}") from None

        def end(*_: Any) -> None:
            # shutdown() waits for serve_forever(), which runs in this thread.
            threading.Thread(target=server.shutdown, daemon=True).start()

        signal.signal(signal.SIGTERM, end)
        server.serve_forever(poll_interval=0.05)
        server.server_close()
        server.finish(options.grace)


if __name__ == "__main__":
    main()
