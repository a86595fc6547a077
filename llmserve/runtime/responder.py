"""Answers on their way back: one response, or pieces of it as they come."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from llmserve.runtime.generation import Generation
from llmserve.runtime.protocols import Answer, Parts


class Responder:
    """Sends the answers of one request: each prompt of it is a row of every response."""

    def __init__(self, raw: Any, parts: Parts) -> None:
        self._raw = raw
        self._parts = parts
        self._sender = raw.get_response_sender()
        self.closed = False

    def cancelled(self) -> bool:
        """Whether the client is gone or asked to stop."""
        return bool(self._raw.is_cancelled())

    def send(self, generations: Sequence[Generation], *, whole: bool) -> None:
        """Send what is new, or everything; close when every row is done."""
        final = all(generation.done for generation in generations)
        if not final and not any(generation.has_news for generation in generations):
            return
        answers = [self._answer(generation, whole) for generation in generations]
        pb = self._parts.pb_utils
        tensors = self._parts.formatter.format(answers)
        if self._parts.batched:
            tensors = {name: values.reshape(-1, 1) for name, values in tensors.items()}
        outputs = [pb.Tensor(name, values) for name, values in tensors.items()]
        self._send(pb.InferenceResponse(output_tensors=outputs), final)

    def refuse(self, message: str, *, internal: bool = False) -> None:
        """Send an error: the request's own fault, unless it is ``internal``."""
        pb = self._parts.pb_utils
        code = pb.TritonError.INTERNAL if internal else pb.TritonError.INVALID_ARG
        error = pb.TritonError(message, code)
        self._send(pb.InferenceResponse(output_tensors=[], error=error), True)

    def _send(self, response: Any, final: bool) -> None:
        if self.closed:
            return
        self.closed = final
        if final:
            # The flag goes with the last response: clients of /generate count one for one.
            flag = self._parts.pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL
            self._sender.send(response, flags=flag)
        else:
            self._sender.send(response)

    def _answer(self, generation: Generation, whole: bool) -> Answer:
        exclude = generation.params.exclude_input_in_output
        echo = bool(self._parts.defaults.get("echo")) if exclude is None else not exclude
        first = whole or generation.untold
        return Answer(
            text=generation.text if whole else generation.take(),
            prompt=generation.prompt,
            finish_reason=generation.finish_reason,
            input_tokens=len(generation.prompt_ids),
            output_tokens=len(generation.token_ids),
            echo=echo and first,
        )
