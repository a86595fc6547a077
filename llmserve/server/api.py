"""The few HTTP calls that running a server needs, with the standard library alone."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from llmserve.errors import ServerError
from llmserve.server.launch import KEY_HEADER
from llmserve.server.progress import in_plain_words

_QUICK = 5.0
"""Seconds for what a server answers at once; to load a model may take any time."""


class ServerApi:
    """One server's HTTP interface. No proxy is used, whatever the environment says."""

    def __init__(self, host: str, port: int, key: str) -> None:
        self._host = host
        self._port = port
        self._key = key

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
            connection.request(method, path, json.dumps(body or {}), {KEY_HEADER: self._key})
            response = connection.getresponse()
            return response.status, response.read()
        except HTTPException as error:
            raise ConnectionError(str(error) or type(error).__name__) from error
        finally:
            connection.close()


def _model(name: str, action: str) -> str:
    from urllib.parse import quote

    return f"/v2/repository/models/{quote(name, safe='')}/{action}"
