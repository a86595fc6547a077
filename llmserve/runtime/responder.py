"""Answers on their way back: one response, or pieces of it as they come."""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from threading import Lock
from typing import Any

import numpy.typing as npt

from llmserve.runtime.errors import RequestError, panics_as_errors
from llmserve.runtime.generation import Generation
from llmserve.runtime.logprobs import Logprob
from llmserve.runtime.outputs import format_answers
from llmserve.runtime.protocols import Answer, Parts

Tensors = Mapping[str, npt.NDArray[Any]]

# Asking whether the client is there takes Triton 0.06 ms: an answer holds for so many seconds.
_CANCELLED_HOLDS = 0.02


def respond(requests: Sequence[Any], answer: Callable[[Any], Tensors], parts: Parts) -> list[Any]:
    """Return a response to every request of a part that is not decoupled, each for itself.

    ``answer`` returns a request's output tensors. What it raises becomes that request's error, as
    :func:`failure` says.
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
    """Return Triton's error for what went wrong.

    It is the request's own fault where it is a :class:`RequestError`. Of any other the client is
    told the kind and the first line that says something, and the log gets a traceback.
    """
    if isinstance(error, RequestError):
        return _error(str(error), parts, internal=False)
    parts.pb_utils.Logger.log_error("".join(traceback.format_exception(error)))
    return _error(
        f"the model failed: {type(error).__name__}: {_beginning(error)}", parts, internal=True
    )


def _beginning(error: Exception) -> str:
    """Return an error's first line, and the next where it ends with a colon and says only where."""
    told = []
    for line in filter(None, map(str.strip, str(error).splitlines())):
        told.append(line)
        if not line.endswith(":"):
            break
    return " ".join(told)


def _error(message: str, parts: Parts, *, internal: bool) -> Any:
    kind = parts.pb_utils.TritonError
    # The message may quote the request, and that may hold half a character.
    told = message.encode(errors="replace").decode()
    return kind(told, kind.INTERNAL if internal else kind.INVALID_ARG)


def _response(tensors: Tensors, parts: Parts) -> Any:
    pb = parts.pb_utils
    outputs = [pb.Tensor(name, values) for name, values in tensors.items()]
    return pb.InferenceResponse(output_tensors=outputs)


def _refusal(error: Any, parts: Parts) -> Any:
    return parts.pb_utils.InferenceResponse(output_tensors=[], error=error)


class Responder:
    """Sends the answers of one request: each prompt of it is a row of every response."""

    def __init__(self, raw: Any, parts: Parts) -> None:
        self._parts = parts
        self.closed = False
        self.gone = False
        """Whether the client is known to have left."""
        self._checked = 0.0
        # Asking after a request that has just been answered would be fatal.
        self._asking = Lock()
        self.attach(raw)

    def attach(self, raw: Any) -> None:
        """Take the request anew: one that is rescheduled comes as another object each time."""
        self._raw = raw
        self._sender = raw.get_response_sender()

    def detach(self) -> None:
        """Let go of a request that was given back to Triton; touching it would be fatal."""
        self._raw = self._sender = None

    @property
    def attached(self) -> bool:
        return self._raw is not None

    @property
    def waits(self) -> bool:
        """Whether somebody is there for more."""
        return not (self.closed or self.gone)

    def cancelled(self, *, now: bool = False) -> bool:
        """Whether the client is gone or asked to stop: lately, or ``now``."""
        moment = time.monotonic()
        if now or moment - self._checked >= _CANCELLED_HOLDS:
            with self._asking:
                if self._raw is not None:
                    self._checked = moment
                    self.gone = bool(self._raw.is_cancelled())
        return self.gone

    def send(self, generations: Sequence[Generation], *, whole: bool) -> None:
        """Send what is new, or everything; close when every row is done."""
        final = all(generation.done for generation in generations)
        if not final and not any(generation.has_news for generation in generations):
            return
        answers = [self._answer(generation, whole) for generation in generations]
        tensors = format_answers(answers, self._parts)
        if self._parts.batched:
            tensors = {name: values[:, None] for name, values in tensors.items()}
        self._send(_response(tensors, self._parts), final)

    def refuse(self, message: str, *, internal: bool = False) -> None:
        """Send an error: the request's own fault, unless it is ``internal``."""
        error = _error(message, self._parts, internal=internal)
        self._send(_refusal(error, self._parts), True)

    def fail(self, error: Exception) -> None:
        """Send what went wrong; if it is not the request's own fault, the log gets a traceback."""
        self._send(_refusal(failure(error, self._parts), self._parts), True)

    def _send(self, response: Any, final: bool) -> None:
        if self.closed:
            return
        self.closed = final
        try:
            self._hand_over(response, final)
        except Exception as error:
            # Triton may have no memory left for it. An error takes little, and somebody waits.
            self.closed = True
            self._hand_over(_refusal(failure(error, self._parts), self._parts), True)

    def _hand_over(self, response: Any, final: bool) -> None:
        if not final:
            self._sender.send(response)
            return
        # The flag goes with the last response: clients of /generate count one for one.
        flag = self._parts.pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL
        with self._asking:
            self._sender.send(response, flags=flag)
            # A request that outlives its model, in a cycle say, brings the process down too.
            self.detach()

    def _texts(self, logprobs: Sequence[Logprob]) -> dict[int, str]:
        ids = {one.token for place in logprobs for one in (place, *place.top)}
        return {token: self._parts.tokenizer.decode([token]) for token in ids}

    def _answer(self, generation: Generation, whole: bool) -> Answer:
        exclude = generation.params.exclude_input_in_output
        echo = bool(self._parts.defaults.get("echo")) if exclude is None else not exclude
        first = whole or not generation.taken
        wanted = generation.wants_logits
        logprobs = generation.take_logprobs() if wanted else None
        read = generation.prompt_logprobs if first else []
        written = len(generation.token_ids)
        if generation.params.return_num_output_tokens and not whole:
            written -= generation.tokens_reported
            generation.tokens_reported = len(generation.token_ids)
        return Answer(
            text=generation.text if whole else generation.take(),
            prompt=generation.prompt,
            finish_reason=generation.finish_reason,
            input_tokens=len(generation.prompt_ids),
            output_tokens=written,
            echo=echo and first,
            so_far=generation.text,
            logprobs=logprobs,
            texts=self._texts([*(logprobs or ()), *read]),
            prompt_logprobs=read or None,
            total_logprob=generation.total_logprob,
        )
