"""What to send next and what came back: the part that sync and asyncio share.

An exchange is a loop of rounds. Each round is a list of requests that may run at the same
time; their responses go to :meth:`Exchange.take`. Without a further round it is complete.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from llmserve.client.messages import Value, build_request, check_options, read_response
from llmserve.client.model import ModelInfo
from llmserve.client.results import Piece
from llmserve.errors import ClientError


def open_exchange(
    info: ModelInfo, prompts: Sequence[str], options: Mapping[str, Any], *, pieces: bool
) -> AtOnce | Stepwise:
    """Choose the exchange; ``pieces`` asks a model that can stream for single pieces."""
    checked = check_options(options)
    if info.exchange == "sequence":
        return Stepwise(info, prompts, checked, pieces=pieces)
    declared = info.inputs.get("stream")
    if info.exchange == "stream" and (info.made_by_llmserve or declared):
        checked["stream"] = pieces
    elif declared and not declared.optional and not info.made_by_llmserve:
        checked["stream"] = False
    if not info.made_by_llmserve:
        # TensorRT-LLM counts tokens only on request.
        for name in ASK_FOR_COUNTS:
            if name in info.inputs:
                checked.setdefault(name, True)
    return AtOnce(info, prompts, checked)


ASK_FOR_COUNTS = ("return_num_input_tokens", "return_num_output_tokens")
FINAL_RESPONSE = "triton_enable_empty_final_response"
"""Asks Triton to say when an answer is complete, with an empty response if need be."""


class AtOnce:
    """Unary and streaming models: everything is sent in one round, and answers follow."""

    def __init__(
        self, info: ModelInfo, prompts: Sequence[str], options: Mapping[str, Value]
    ) -> None:
        self.info = info
        self._rows: dict[str, tuple[int, int]] = {}
        self._finished: set[int] = set()
        self._round: list[Any] = []
        size = info.rows or max(1, len(prompts))
        for first in range(0, len(prompts), size):
            rows = prompts[first : first + size]
            # Some backends take an id as the request's own among those of all clients, and as a
            # number: TensorRT-LLM 0.5.0 refuses one that is under way.
            number = str(secrets.randbits(63) or 1)
            self._rows[number] = first, len(rows)
            request = build_request(info, rows, options, request_id=number)
            if info.exchange == "stream":
                # So that an answer that was cut off is not taken for a short one.
                request.parameters[FINAL_RESPONSE].bool_param = True
            self._round.append(request)

    def next_round(self) -> list[Any]:
        """Return the requests to send now, none when the exchange is complete."""
        waiting, self._round = self._round, []
        return waiting

    def take(self, response: Any) -> list[Piece]:
        """Read a response; its id says which rows it is of."""
        if response.id not in self._rows:
            raise ClientError("the server answered a request that was not sent")
        first, count = self._rows[response.id]
        pieces = _moved(read_response(response, count), first)
        return [piece for piece in pieces if self._is_wanted(piece)]

    def _is_wanted(self, piece: Piece) -> bool:
        # In a request of several rows those that are complete go along, empty, to the end.
        if piece.index in self._finished and not piece.text:
            return False
        if piece.finish_reason:
            self._finished.add(piece.index)
        return True

    def end_requests(self) -> list[Any]:
        """Return what must still be sent, whatever happened: here nothing keeps a state."""
        return []


STEP_TOKENS = "step_tokens"
"""How many tokens one request of a sequence generates, for models that have this option."""
_WHOLE, _PIECE = 1 << 20, 4
"""As many as the model gives at a time, and few enough to see them come."""


class Steps:
    """One sequence of a model that keeps state: it has a start, steps and an end."""

    def __init__(self, info: ModelInfo, *, index: int = 0) -> None:
        self.info = info
        self.request_id = str(index)
        # 0 would mean that the request belongs to no sequence.
        self._correlation = secrets.randbits(63) or 1
        self._options: Mapping[str, Value] = {}
        self._started = self._ended = False

    def step(self, text: str, options: Mapping[str, Value]) -> Any:
        controls: dict[str, Value] = {"sequence_id": self._correlation}
        if not self._started:
            controls["sequence_start"] = True
        request = self._request(text, options, controls)
        self._started = True
        return request

    def end_requests(self) -> list[Any]:
        """Build the request that frees the model's state, once and if there is any."""
        if not self._started or self._ended:
            return []
        self._ended = True
        # The end needs no further token.
        options: dict[str, Value] = {STEP_TOKENS: 0} if STEP_TOKENS in self.info.inputs else {}
        controls: dict[str, Value] = {"sequence_id": self._correlation, "sequence_end": True}
        return [self._request("", options, controls)]

    def _request(self, text: str, options: Mapping[str, Value], controls: dict[str, Value]) -> Any:
        if not self.info.made_by_llmserve:
            # Inputs that such a model requires, it requires at every step.
            options = self._options = {**self._options, **options}
        return build_request(
            self.info, [text], options, request_id=self.request_id, controls=controls
        )


class Stepwise:
    """Sequence models: one sequence per prompt, all of them a step further each round."""

    def __init__(
        self, info: ModelInfo, prompts: Sequence[str], options: Mapping[str, Value], *, pieces: bool
    ) -> None:
        self.info = info
        self._each: dict[str, Value] = {}
        if STEP_TOKENS in info.inputs:
            self._each[STEP_TOKENS] = options.get(STEP_TOKENS, _PIECE if pieces else _WHOLE)
        self._steps = [Steps(info, index=index) for index in range(len(prompts))]
        self._round = [
            steps.step(prompt, {**options, **self._each})
            for steps, prompt in zip(self._steps, prompts, strict=True)
        ]

    def next_round(self) -> list[Any]:
        waiting, self._round = self._round, []
        return waiting

    def take(self, response: Any) -> list[Piece]:
        index = int(response.id)
        pieces = _moved(read_response(response, 1), index)
        # Without a reason to stop, the loop would never end.
        says_its_end = "finish_reason" in self.info.outputs
        if says_its_end and not any(piece.finish_reason for piece in pieces):
            self._round.append(self._steps[index].step("", self._each))
        return pieces

    def end_requests(self) -> list[Any]:
        return [end for steps in self._steps for end in steps.end_requests()]


Exchange = AtOnce | Stepwise
"""One call of ``generate`` or ``stream``, as the model wants it."""


def _moved(pieces: list[Piece], first: int) -> list[Piece]:
    return [replace(piece, index=piece.index + first) for piece in pieces] if first else pieces
