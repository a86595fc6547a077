"""The frontend ``scaffold``: a process in front of Triton."""

from __future__ import annotations

import argparse
import signal
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from llmserve.client import Client, connect
from llmserve.errors import LLMServeError

_MOST_BYTES = 1 << 20
_SECONDS_TO_SEND = 30


class ScaffoldServer(ThreadingHTTPServer):
    """An HTTP server that lets requests in flight finish when it ends."""

    daemon_threads = False

    def __init__(self, address: tuple[str, int], client: Client, model: str) -> None:
        self.client = client
        self.model = model
        super().__init__(address, Handler)


class Handler(BaseHTTPRequestHandler):
    # A client that sends nothing must not hold its connection for ever.
    timeout = _SECONDS_TO_SEND
    server: ScaffoldServer

    def do_POST(self) -> None:
        length = self.headers.get("Content-Length", "")
        if not length.isdecimal() or int(length) > _MOST_BYTES:
            self._answer(400, f"send Content-Length, at most {_MOST_BYTES}")
            return
        prompt = self.rfile.read(int(length)).decode(errors="replace")
        try:
            answer = self.server.client.generate(self.server.model, prompt)
        except LLMServeError as error:
            self._answer(400, str(error))
        else:
            self._answer(200, answer.text)

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
        # shutdown() waits for serve_forever(), which runs in this thread.
        end = threading.Thread(target=server.shutdown)
        signal.signal(signal.SIGTERM, lambda *_: end.start())
        server.serve_forever(poll_interval=0.05)
        server.server_close()


if __name__ == "__main__":
    main()
