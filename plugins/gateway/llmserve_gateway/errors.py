"""Errors as clients of the OpenAI API read them: ``{"error": {message, type, param, code}}``."""

from __future__ import annotations

import json
from typing import Any

from llmserve.errors import (
    ClientError,
    LLMServeError,
    ModelNotReadyError,
    RequestRejectedError,
    RequestTimeoutError,
    UnreachableError,
    UsageError,
)

_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
}


class ApiError(Exception):
    """An answer other than 200; ``headers`` go with it."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code
        self.headers = headers or {}

    @property
    def type(self) -> str:
        """The kind of error, in OpenAI's words."""
        if self.status in _TYPES:
            return _TYPES[self.status]
        return "invalid_request_error" if self.status < 500 else "server_error"

    def body(self) -> dict[str, Any]:
        """Return what the client gets."""
        error = {
            "message": self.message,
            "type": self.type,
            "param": self.param,
            "code": self.code,
        }
        return {"error": error}

    def json(self) -> bytes:
        """Return the body as it is sent."""
        return json.dumps(self.body(), ensure_ascii=False).encode()


def bad_request(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    """Return the refusal of a request that is the client's to mend."""
    return ApiError(400, message, param=param, code=code)


def from_llmserve(error: LLMServeError) -> ApiError:
    """Return what a failure between here and the model means to the client."""
    message = str(error)
    if isinstance(error, ModelNotReadyError):
        return ApiError(404, message, param="model", code="model_not_found")
    if isinstance(error, RequestTimeoutError):
        return ApiError(504, message, code="timeout")
    if isinstance(error, UnreachableError):
        return ApiError(503, message, code="backend_unavailable", headers={"retry-after": "2"})
    if isinstance(error, RequestRejectedError):
        # The model's own failures begin so; see llmserve.runtime.
        if "the model failed" in message or "has died" in message:
            return ApiError(500, message, code="model_failed")
        if "queue" in message and "is full" in message:
            return ApiError(429, message, code="queue_full", headers={"retry-after": "1"})
        return bad_request(message)
    if isinstance(error, UsageError):
        return bad_request(message)
    status = 500 if isinstance(error, ClientError) else 503
    return ApiError(status, message)
