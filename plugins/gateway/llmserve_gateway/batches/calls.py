"""A request of a batch, as the gateway's application gets it: like a client's, without a socket."""

from __future__ import annotations

import asyncio
from typing import Any

from llmserve.client import BatchReply
from llmserve_gateway.gateway import BATCH_KEY
from llmserve_gateway.headers import AsgiApp
from llmserve_gateway.keys import BatchKey

_NO_ANSWER = 499


class Call:
    """One request; it can be left as a client that disconnects leaves its own."""

    def __init__(self, app: AsgiApp, path: str, body: bytes, key: BatchKey) -> None:
        self.key = key
        self._app = app
        self._body = body
        self._is_read = False
        self._left = asyncio.Event()
        self._status = 0
        self._headers: dict[str, str] = {}
        self._pieces: list[bytes] = []
        self._is_whole = False
        headers = {"content-type": "application/json", "content-length": str(len(body))}
        self._scope: dict[str, Any] = {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "method": "POST",
            "scheme": "http",
            "path": path,
            "raw_path": path.encode(),
            "root_path": "",
            "query_string": b"",
            "headers": [(name.encode(), value.encode()) for name, value in headers.items()],
            "client": None,
            "server": None,
            "state": {},
            BATCH_KEY: key,
        }

    def leave(self) -> None:
        self._left.set()

    async def answer(self) -> BatchReply | None:
        """Return the answer, or None if the request was left before it."""
        # A task of its own: who leaves it may cancel it when it has just ended, and that would hit
        # whatever the same task does next.
        asked = asyncio.ensure_future(self._ask())
        await asyncio.wait([asked])
        if not asked.cancelled():
            asked.result()
        if not self._is_whole or self._status == _NO_ANSWER:
            return None
        return BatchReply(self._status, self._headers, b"".join(self._pieces))

    async def _ask(self) -> None:
        await self._app(self._scope, self._receive, self._send)

    async def _receive(self) -> dict[str, Any]:
        if not self._is_read:
            self._is_read = True
            return {"type": "http.request", "body": self._body, "more_body": False}
        await self._left.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: Any) -> None:
        if message["type"] == "http.response.start":
            self._status = message["status"]
            self._headers = {
                name.decode("latin-1"): value.decode("latin-1")
                for name, value in message["headers"]
            }
        else:
            self._pieces.append(message.get("body", b""))
            self._is_whole = not message.get("more_body")
