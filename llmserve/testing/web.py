"""Small servers for what asks others over HTTP."""

from __future__ import annotations

import ssl
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread


@contextmanager
def http_server(
    answer: Callable[[BaseHTTPRequestHandler], None], tls: ssl.SSLContext | None = None
) -> Iterator[str]:
    """Serve HTTP in this process and yield the address; ``answer`` handles every request."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            answer(self)

        do_HEAD = do_POST = do_GET

        def log_message(self, format: str, *args: object) -> None: ...

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        if tls:
            server.socket = tls.wrap_socket(server.socket, server_side=True)
        Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()


def reply(
    request: BaseHTTPRequestHandler,
    content: bytes = b"",
    status: int = 200,
    headers: Mapping[str, str] | None = None,
) -> None:
    request.send_response(status)
    for name, value in {**(headers or {}), "Content-Length": str(len(content))}.items():
        request.send_header(name, value)
    request.end_headers()
    if request.command != "HEAD":
        request.wfile.write(content)


def metrics_page(page: str) -> AbstractContextManager[str]:
    """Serve a page at /metrics, as Triton does, and 404 for every other path."""
    return http_server(
        lambda request: reply(request, page.encode(), 200 if request.path == "/metrics" else 404)
    )
