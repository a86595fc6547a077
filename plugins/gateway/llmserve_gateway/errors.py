"""Errors as clients of the OpenAI API read them: ``{"error": {message, type, param, code}}``."""

from __future__ import annotations

import json
import re

from llmserve.client.tools import ToolsError
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

# Fields that have another name in the tensor contract.
_FIELDS = {
    "stop_words": "stop",
    "input_ids": "prompt",
    "text_input": "prompt",
    "prompt_logprobs": "echo",
    "prompt_only": "model",
    "text": "prompt",
    "chat template": "messages",
    "json_schema": "response_format",
    "json schema": "response_format",
    "json_object": "response_format",
    "return_log_probs": "logprobs",
}
_OVER_CONTEXT = re.compile(r"over the model's context|the model's context \d+")
_NOT_TAKEN = re.compile(r"this model does not take (\w+)")
_NAMED = re.compile(
    r"(?:the (?=json|regex|grammar|text |chat template))?(json schema|chat template|\w+)"
    r"(?: must be| takes|:| has (?:a character|no tokens)| is (?:empty|not )"
    r"| cannot | refuses | \d+ is over )"
)
_RAISED = re.compile(r"\w*(?:Error|Exception|Exit|Interrupt): ")
_PREFIX = "the server refused the request: "


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

    def json(self) -> bytes:
        told = {"message": self.message, "type": self.type, "param": self.param, "code": self.code}
        return json.dumps({"error": told}, ensure_ascii=False).encode(errors="replace")

    def event(self) -> bytes:
        return b"data: " + self.json() + b"\n\n"


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
        return _refused(message.removeprefix(_PREFIX))
    if isinstance(error, UsageError):
        return bad_request(message, error.param if isinstance(error, ToolsError) else None)
    status = 500 if isinstance(error, ClientError) else 503
    return ApiError(status, message)


def _refused(message: str) -> ApiError:
    # The model's own failures begin so; see llmserve.runtime. What its driver raises has a name.
    if "the model failed" in message or "has died" in message or _RAISED.match(message):
        return ApiError(500, message, code="model_failed")
    if "queue" in message and "is full" in message:
        return ApiError(429, message, code="queue_full", headers={"retry-after": "1"})
    if "no chat template" in message:
        return bad_request(
            "this model has no chat template: ask /v1/completions, or another model",
            "messages",
            "no_chat_template",
        )
    if _OVER_CONTEXT.search(message):
        wants = "max_tokens" if message.startswith("max_tokens") else None
        return bad_request(message, wants, "context_length_exceeded")
    found = _NOT_TAKEN.match(message) or _NAMED.match(message)
    name = found[1] if found else None
    return bad_request(message, _FIELDS.get(name, name) if name else None)
