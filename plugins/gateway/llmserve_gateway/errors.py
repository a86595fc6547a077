"""Errors in the format of the OpenAI API: ``{"error": {message, type, param, code}}``."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping

from llmserve.client import ToolsError
from llmserve.errors import (
    ClientError,
    ContextLengthError,
    LLMServeError,
    ModelNotReadyError,
    UnreachableError,
    UnsupportedOptionError,
    UsageError,
)
from llmserve.runtime.contract import API_NAMES

_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
}

# The API's names of options. Those below are made of other fields than the contract's.
_API_NAMES = {
    **API_NAMES,
    "input_ids": "prompt",
    "text_input": "prompt",
    "prompt_logprobs": "echo",
    "prompt_only": "model",
    "json_schema": "response_format",
    "json_object": "response_format",
    "return_log_probs": "logprobs",
}


class ApiError(Exception):
    """A response with an error status; ``headers`` are sent along."""

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
        """OpenAI's name for this kind of error."""
        if self.status in _TYPES:
            return _TYPES[self.status]
        return "invalid_request_error" if self.status < 500 else "server_error"

    def json(self) -> bytes:
        error = {"message": self.message, "type": self.type, "param": self.param, "code": self.code}
        return json.dumps({"error": error}, ensure_ascii=False).encode(errors="replace")

    def jina_json(self) -> bytes:
        return self._json_with("detail")

    def cohere_json(self) -> bytes:
        return self._json_with("message")

    def _json_with(self, name: str) -> bytes:
        """Return the same with the message where the clients of another API read it."""
        content = {**json.loads(self.json()), name: self.message}
        return json.dumps(content, ensure_ascii=False).encode(errors="replace")

    def event(self) -> bytes:
        return b"data: " + self.json() + b"\n\n"


class ContextError(ApiError):
    """A prompt and its answer do not fit the context; ``prompt_tokens`` is None if uncounted.

    Clients shorten the conversation if they recognise the words, so each API has its provider's.
    """

    def __init__(
        self, context: int, prompt_tokens: int | None = None, max_tokens: int | None = None
    ) -> None:
        if prompt_tokens is not None and prompt_tokens >= context:
            max_tokens = None  # No length of the answer would do.
        what = f"This model's maximum context length is {context} tokens"
        if prompt_tokens is None:
            what += ", but the prompt is too long"
        elif max_tokens is None:
            what += f", but the prompt is too long: it has {prompt_tokens} tokens"
        else:
            what += (
                f". However, you requested {prompt_tokens + max_tokens} tokens ({prompt_tokens} in "
                f"the prompt, {max_tokens} in the completion), so max_tokens or the prompt is too "
                f"long: ask for at most {context - prompt_tokens}"
            )
        param = None if max_tokens is None else "max_tokens"
        super().__init__(400, what, param=param, code="context_length_exceeded")
        self.context = context
        self.prompt_tokens = prompt_tokens
        self.max_tokens = max_tokens


def bad_request(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    """Return the error for a request that the client must fix."""
    return ApiError(400, message, param=param, code=code)


def queue_full(why: str, seconds: float = 1.0) -> ApiError:
    """Return the error for a request that may succeed in so many seconds, from one to a minute."""
    after = math.ceil(min(max(seconds, 1.0), 60.0))
    when = "a second" if after == 1 else f"{after} seconds"
    return ApiError(
        429,
        f"too many requests: {why}; try again in {when}",
        code="queue_full",
        headers={"retry-after": f"{after}", "retry-after-ms": f"{after * 1000}"},
    )


def from_llmserve(error: LLMServeError, sent: Mapping[str, str] | None = None) -> ApiError:
    """Translate a failure between the gateway and the model for the client.

    ``sent`` maps names of the tensor contract to the fields that this client used for them.
    """
    if isinstance(error, ClientError):
        return _from_failure(error, {**_API_NAMES, **(sent or {})})
    if isinstance(error, UsageError):
        return bad_request(str(error), error.param if isinstance(error, ToolsError) else None)
    return ApiError(503, str(error))


def _from_failure(error: ClientError, names: Mapping[str, str]) -> ApiError:
    row, numbers = error.row, error.details
    if isinstance(error, ContextLengthError) and "context" in numbers:
        return ContextError(
            numbers["context"], numbers.get("prompt_tokens"), numbers.get("max_tokens")
        )
    message = error.words or str(error)
    param = names.get(error.param, error.param) if error.param else None
    if isinstance(error, ModelNotReadyError):
        param = "model"
    elif isinstance(error, UnreachableError):
        # What a user of the command line can do about it is nothing to a client of this API.
        message = f"{error.problem}: try again in a moment"
    elif row.code == "no_chat_template":
        message = "this model has no chat template: use /v1/completions, or another model"
    elif isinstance(error, UnsupportedOptionError) and param != error.param:
        # The client knows the option by another name than the model.
        message = f"{param}: {message}"
    # Who has failed may know better than the table.
    seconds = numbers.get("retry_after", row.retry_after)
    headers = {"retry-after": str(seconds)} if seconds else None
    return ApiError(row.status, message, param=param, code=row.api_code, headers=headers)
