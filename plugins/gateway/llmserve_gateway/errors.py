"""Errors in the format of the OpenAI API: ``{"error": {message, type, param, code}}``."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping

from llmserve.client import ToolsError
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

# From the tensor contract's names to the API's, where they differ.
_API_NAMES = {
    "stop_words": "stop",
    "input_ids": "prompt",
    "text_input": "prompt",
    "prompt_logprobs": "echo",
    "prompt_only": "model",
    "text": "prompt",
    "chat template": "messages",
    "json_schema": "response_format",
    "json_object": "response_format",
    "return_log_probs": "logprobs",
}
# All of them are for the beginning of a message: further on it may quote the request.
_FAILED = re.compile(r"the model failed: |\w*(?:Error|Exception|Exit|Interrupt): ")
_QUEUE_FULL = re.compile(r"the queue of ('[^']*'|new constraints) is full")
_NO_CHAT_TEMPLATE = re.compile(r"(?:this )?\S+ has no chat template")
_OVER_CONTEXT = re.compile(
    r"(?:the prompt has|(?:max_tokens|request_output_len) \d+ and the prompt's) \d+ "
    r"(?:tokens|characters)[a-z, ]* the model's context (?:of )?(\d+)"
)
_PROMPT_TOKENS = re.compile(r"the prompt(?: has|'s) (\d+) tokens")
_MAX_TOKENS = re.compile(r"(?:max_tokens|request_output_len) (\d+) and ")
_UNSUPPORTED = re.compile(r"this model does not take (\w+)")
_INVALID = re.compile(
    r"(?:the (?=json|regex|grammar|text |chat template))?(json schema|chat template|\w+)"
    r"(?: must be| takes|:| has (?:a character|no tokens)| is (?:empty|not )"
    r"| cannot | refuses | \d+ is over )"
)
# A model whose process has died usually answers again after seven seconds.
_RELOAD_SECONDS = "5"
_PREFIX = "the server refused the request: "


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

    def event(self) -> bytes:
        return b"data: " + self.json() + b"\n\n"


class ContextError(ApiError):
    """A prompt and its answer do not fit the context; ``prompt_tokens`` is None if uncounted.

    Clients shorten the conversation if they recognise the words, so each API has its provider's.
    """

    def __init__(
        self, context: int, prompt_tokens: int | None = None, max_tokens: int | None = None
    ) -> None:
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


def from_llmserve(error: LLMServeError, sent: Mapping[str, str] | None = None) -> ApiError:
    """Translate a failure between the gateway and the model for the client.

    ``sent`` maps names of the tensor contract to the fields that this client used for them.
    """
    message = str(error)
    if isinstance(error, ModelNotReadyError):
        return ApiError(404, message, param="model", code="model_not_found")
    if isinstance(error, RequestTimeoutError):
        return ApiError(504, message, code="timeout")
    if isinstance(error, UnreachableError):
        return ApiError(503, message, code="backend_unavailable", headers={"retry-after": "2"})
    if isinstance(error, RequestRejectedError):
        names = {**_API_NAMES, **(sent or {})}
        names["json schema"] = names["json_schema"]
        return _from_refusal(message.removeprefix(_PREFIX), names)
    if isinstance(error, UsageError):
        return bad_request(message, error.param if isinstance(error, ToolsError) else None)
    status = 500 if isinstance(error, ClientError) else 503
    return ApiError(status, message)


def has_died(problem: str) -> bool:
    """Return whether a failure is the death of a model's process; a refusal may quote the words."""
    return problem.startswith("the process that runs ") and "has died" in problem


def _from_refusal(message: str, names: Mapping[str, str]) -> ApiError:
    if has_died(message):
        # It is being loaded again, which clients wait for.
        return ApiError(503, message, code="model_died", headers={"retry-after": _RELOAD_SECONDS})
    # llmserve.runtime reports failures of the model like this; a driver's exception has its type.
    if _FAILED.match(message):
        return ApiError(500, message, code="model_failed")
    if _QUEUE_FULL.match(message):
        return ApiError(429, message, code="queue_full", headers={"retry-after": "1"})
    if _NO_CHAT_TEMPLATE.match(message):
        return bad_request(
            "this model has no chat template: use /v1/completions, or another model",
            "messages",
            "no_chat_template",
        )
    if over := _OVER_CONTEXT.match(message):
        prompt, answer = _PROMPT_TOKENS.search(message), _MAX_TOKENS.match(message)
        return ContextError(
            int(over[1]), int(prompt[1]) if prompt else None, int(answer[1]) if answer else None
        )
    if unsupported := _UNSUPPORTED.match(message):
        name = names.get(unsupported[1], unsupported[1])
        return bad_request(message.replace(unsupported[1], name, 1), name)
    match = _INVALID.match(message)
    name = names.get(match[1], match[1]) if match else ""
    return bad_request(message, name or None)
