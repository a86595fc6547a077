"""Sends the answers of a request to Triton, as one response or in pieces."""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import PurePath
from threading import Lock
from typing import Any

import numpy.typing as npt

from llmserve.contract.failures import Failure, write
from llmserve.runtime.answer.generation import Generation
from llmserve.runtime.answer.logprobs import Logprob
from llmserve.runtime.answer.outputs import format_answers
from llmserve.runtime.errors import RequestError, panics_as_errors
from llmserve.runtime.protocols import Answer, Parts

Tensors = Mapping[str, npt.NDArray[Any]]

# Checking for cancellation takes Triton 0.06 ms, so the result is reused for this many seconds.
_CANCELLED_VALID = 0.02


def respond(requests: Sequence[Any], answer: Callable[[Any], Tensors], parts: Parts) -> list[Any]:
    """Return a response to every request of a part that is not decoupled.

    ``answer`` returns the output tensors of one request. If it raises, only that request gets the
    error, converted by :func:`failure`.
    """

    def response(raw: Any) -> Any:
        try:
            with panics_as_errors():
                return _response(answer(raw), parts)
        except Exception as error:
            return _refusal(failure(error, parts), parts)

    return [response(raw) for raw in requests]


def tensors_of(raw: Any) -> dict[str, npt.NDArray[Any]]:
    return {tensor.name(): tensor.as_numpy() for tensor in raw.inputs()}


def failure(error: Exception, parts: Parts) -> Any:
    """Return Triton's error for an exception.

    A :class:`RequestError` is the client's fault. For any other error, the client gets its type,
    the first meaningful line of its message and the line of the plugin, and the log gets a
    traceback.
    """
    if isinstance(error, RequestError):
        return _error(error.failure, parts)
    parts.pb_utils.Logger.log_error("".join(traceback.format_exception(error)))
    place = _place(error, parts)
    message = f"the model failed: {type(error).__name__}: {_first_line(error)}{place}"
    return _error(Failure("model_failed", message), parts)


def _place(error: Exception, parts: Parts) -> str:
    """Return where in the code of a plugin an error was raised, as a user could report it."""
    runtimes = (parts.tokenizer, parts.generator, parts.formatter)
    packages = {type(runtime).__module__.partition(".")[0] for runtime in runtimes} - {"llmserve"}
    found, trace = "", error.__traceback__
    while trace is not None:
        frame, code = trace.tb_frame, trace.tb_frame.f_code
        if str(frame.f_globals.get("__name__")).partition(".")[0] in packages:
            owner = type(frame.f_locals["self"]).__name__ if "self" in frame.f_locals else ""
            where = f"{owner}.{code.co_name}" if owner else code.co_name
            found = f"{where} in {PurePath(code.co_filename).name}, line {trace.tb_lineno}"
        trace = trace.tb_next
    return f" ({found}; the server's log has the traceback)" if found else ""


def _first_line(error: Exception) -> str:
    """Return an error's first line, and the next one if the first ends with a colon."""
    lines = []
    for line in filter(None, map(str.strip, str(error).splitlines())):
        lines.append(line)
        if not line.endswith(":"):
            break
    return " ".join(lines)


def _error(failure: Failure, parts: Parts) -> Any:
    triton_error = parts.pb_utils.TritonError
    # The message may quote the request, which may contain an unpaired surrogate.
    message = write(failure).encode(errors="replace").decode()
    internal = failure.code == "model_failed"
    return triton_error(message, triton_error.INTERNAL if internal else triton_error.INVALID_ARG)


def _response(tensors: Tensors, parts: Parts) -> Any:
    pb = parts.pb_utils
    outputs = [pb.Tensor(name, values) for name, values in tensors.items()]
    return pb.InferenceResponse(output_tensors=outputs)


def _refusal(error: Any, parts: Parts) -> Any:
    return parts.pb_utils.InferenceResponse(output_tensors=[], error=error)


class Responder:
    """Sends the answers of one request; each of its prompts is a row of every response."""

    def __init__(self, raw: Any, parts: Parts) -> None:
        self._parts = parts
        self.closed = False
        self.gone = False
        """Whether the client is known to have disconnected."""
        self._checked_at = 0.0
        # Checking a request that has just been answered would crash the process.
        self._request_lock = Lock()
        self.attach(raw)

    def attach(self, raw: Any) -> None:
        """Replace the request: Triton passes a rescheduled one as a new object each time."""
        self._raw = raw
        self._sender = raw.get_response_sender()

    def detach(self) -> None:
        """Release a request that was returned to Triton; using it would crash the process."""
        self._raw = self._sender = None

    @property
    def attached(self) -> bool:
        return self._raw is not None

    @property
    def waits(self) -> bool:
        """Whether a client still waits for an answer."""
        return not (self.closed or self.gone)

    def cancelled(self, *, now: bool = False) -> bool:
        """Whether the client disconnected or cancelled, from a recent check or one made ``now``."""
        timestamp = time.monotonic()
        if now or timestamp - self._checked_at >= _CANCELLED_VALID:
            with self._request_lock:
                if self._raw is not None:
                    self._checked_at = timestamp
                    self.gone = bool(self._raw.is_cancelled())
        return self.gone

    def send(self, generations: Sequence[Generation], *, whole: bool) -> None:
        """Send the new text, or the ``whole`` answers; close when every row is done."""
        final = all(generation.done for generation in generations)
        if final or any(generation.has_news for generation in generations):
            self.send_tensors(self._tensors(generations, whole), final=final)

    def closing(self, generations: Sequence[Generation]) -> Callable[[], None]:
        """Count as closed from now on, and return the function that sends the end."""
        sender, self.closed = self._sender, True

        def close() -> None:
            try:
                with panics_as_errors():
                    response = _response(self._tensors(generations, False), self._parts)
            except Exception as error:
                response = _refusal(failure(error, self._parts), self._parts)
            self._deliver(response, True, sender)

        return close

    def send_tensors(self, tensors: Tensors, *, final: bool) -> None:
        """Send a response of the driver's own tensors; nothing follows a ``final`` one."""
        self._send(_response(tensors, self._parts), final)

    def refuse(self, message: str, *, internal: bool = False) -> None:
        """Send an error: the client's fault, unless it is ``internal``."""
        code = "model_failed" if internal else "invalid_request"
        error = _error(Failure(code, message), self._parts)
        self._send(_refusal(error, self._parts), True)

    def fail(self, error: Exception) -> None:
        """Send an error; if it is not the client's fault, also log a traceback."""
        self._send(_refusal(failure(error, self._parts), self._parts), True)

    def _send(self, response: Any, final: bool) -> None:
        if not self.closed:
            self.closed = final
            self._deliver(response, final, self._sender)

    def _deliver(self, response: Any, final: bool, sender: Any) -> None:
        try:
            self._pass_to_triton(response, final, sender)
        except Exception as error:
            # Triton may be out of memory for it. An error needs little, and the client waits.
            self.closed = True
            self._pass_to_triton(_refusal(failure(error, self._parts), self._parts), True, sender)

    def _pass_to_triton(self, response: Any, final: bool, sender: Any) -> None:
        if not final:
            sender.send(response)
            return
        # The flag is sent with the last response: clients of /generate expect exactly one response.
        flag = self._parts.pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL
        with self._request_lock:
            sender.send(response, flags=flag)
            # A request that outlives its model, for example in a cycle, crashes the process too.
            self.detach()

    def _texts(self, logprobs: Sequence[Logprob]) -> dict[int, str]:
        ids = {item.token for logprob in logprobs for item in (logprob, *logprob.top)}
        return {token: self._parts.tokenizer.decode([token]) for token in ids}

    def _tensors(self, generations: Sequence[Generation], whole: bool) -> Tensors:
        answers = [self.answer(generation, whole=whole) for generation in generations]
        tensors = format_answers(answers, self._parts)
        if self._parts.batched:
            return {name: self._row(name, values) for name, values in tensors.items()}
        return tensors

    def _row(self, name: str, values: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Return an output with the dimension of each prompt's values."""
        declared = self._parts.outputs.get(name)
        return values if declared is not None and declared.vector else values[:, None]

    def answer(self, generation: Generation, *, whole: bool) -> Answer:
        """Return what a formatter needs of the new text, or of the ``whole`` answer."""
        exclude = generation.params.exclude_input_in_output
        echo = bool(self._parts.defaults.get("echo")) if exclude is None else not exclude
        first = whole or not generation.taken
        logprobs = generation.take_logprobs() if generation.wants_logits else None
        prompt_logprobs = generation.prompt_logprobs if first else []
        output_tokens = len(generation.token_ids)
        if generation.params.return_num_output_tokens and not whole:
            output_tokens -= generation.tokens_reported
            generation.tokens_reported = len(generation.token_ids)
        return Answer(
            text=generation.text if whole else generation.take(),
            prompt=generation.prompt,
            finish_reason=generation.finish_reason,
            input_tokens=len(generation.prompt_ids),
            cached_tokens=generation.cached_tokens if generation.done else None,
            output_tokens=output_tokens,
            echo=echo and first,
            so_far=generation.text,
            logprobs=logprobs,
            texts=self._texts([*(logprobs or ()), *prompt_logprobs]),
            prompt_logprobs=prompt_logprobs or None,
            total_logprob=generation.total_logprob,
            value=generation.value,
            params=generation.params,
        )
