"""Exchanges with a model: which requests to send, and how to read the responses.

An exchange consists of rounds. Each round is a list of requests that may run concurrently; their
responses are passed to :meth:`Exchange.take`. The exchange is complete when no round is left.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from llmserve.client.messages import Value, build_request, check_options, read_response
from llmserve.client.model import ModelInfo
from llmserve.client.results import Piece
from llmserve.contract.options import PROMPT_ONLY, SHARED_STREAM, is_carried
from llmserve.contract.shared_stream import SharedPiece
from llmserve.contract.tasks import GENERATE, task_of
from llmserve.contract.tensors import CACHED_TOKENS
from llmserve.errors import ClientError, UsageError


def open_exchange(
    info: ModelInfo, prompts: Sequence[str], options: Mapping[str, Any], *, pieces: bool
) -> AtOnce | Stepwise:
    """Choose the exchange for a model; ``pieces`` requests streaming, if the model can stream."""
    refuse_other_task(info, GENERATE, asks=not options.get(PROMPT_ONLY.name))
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


def refuse_other_task(info: ModelInfo, task: str, *, asks: bool = True) -> None:
    """Refuse to ask a model for something that it is not for, in one sentence."""
    if asks and info.task not in (task, ""):
        own = task_of(info.task)
        raise UsageError(f"{info.name} {own.does}", hint=f"call {own.call}, or use llmserve query")


ASK_FOR_COUNTS = ("return_num_input_tokens", "return_num_output_tokens")
FINAL_RESPONSE = "triton_enable_empty_final_response"
"""Asks Triton to mark the end of an answer, with an empty response if necessary."""


class AtOnce:
    """The exchange of unary and streaming models: one round with all requests."""

    def __init__(
        self, info: ModelInfo, prompts: Sequence[str], options: Mapping[str, Value]
    ) -> None:
        self.info = info
        self._rows: dict[str, tuple[int, int]] = {}
        self._finished: set[int] = set()
        # How much of each answer a shared stream has shown, and the requests' own responses said.
        self._shown: dict[int, int] = {}
        self._said: dict[int, int] = {}
        self._is_shared = False
        self._round: list[Any] = []
        self.can_share = (
            info.shared_stream and options.get("stream") is True and is_carried(options.get)
        )
        """Whether the pieces may arrive in a shared stream."""
        size = info.rows or max(1, len(prompts))
        for first in range(0, len(prompts), size):
            rows = prompts[first : first + size]
            # Some backends expect ids to be numbers and unique across all clients: TensorRT-LLM
            # 0.5.0 refuses an id that is in flight.
            number = str(secrets.randbits(63) or 1)
            self._rows[number] = first, len(rows)
            request = build_request(info, rows, options, request_id=number)
            if info.exchange == "stream":
                # Without it, a truncated answer would look like a short one.
                request.parameters[FINAL_RESPONSE].bool_param = True
            self._round.append(request)

    def next_round(self) -> list[Any]:
        """Return the requests to send now, none when the exchange is complete."""
        requests, self._round = self._round, []
        return requests

    def take(self, response: Any) -> list[Piece]:
        """Read a response; its id identifies its rows."""
        if response.id not in self._rows:
            raise ClientError("the server answered a request that was not sent")
        first, count = self._rows[response.id]
        pieces = _shift(read_response(response, count, self.info.answer), first)
        if self._is_shared:
            pieces = [self._not_shown(piece) for piece in pieces]
        return [piece for piece in pieces if self._is_wanted(piece)]

    def share(self, requests: Sequence[Any], name: str) -> list[str]:
        """Let a shared stream show the answers to requests, and return their ids."""
        self._is_shared = True
        for request in requests:
            request.parameters[SHARED_STREAM].string_param = name
        return [request.id for request in requests]

    def preview(self, shared: SharedPiece) -> list[Piece]:
        """Read a piece of a shared stream, which counts until the request's own responses come."""
        first, count = self._rows[shared.request]
        index = first + shared.row
        if not 0 <= shared.row < count or index in self._said or index in self._finished:
            return []
        self._shown[index] = self._shown.get(index, 0) + len(shared.text)
        cached = shared.cached_tokens
        piece = Piece(
            shared.text, index, shared.finish_reason or None, shared.input_tokens,
            shared.output_tokens, {} if cached is None else {CACHED_TOKENS.name: cached},
        )  # fmt: skip
        return [piece] if self._is_wanted(piece) else []

    def _not_shown(self, piece: Piece) -> Piece:
        """Return a piece of a request's own response without what has been shown."""
        said = self._said.get(piece.index, 0)
        self._said[piece.index] = said + len(piece.text)
        known = max(0, self._shown.get(piece.index, 0) - said)
        return replace(piece, text=piece.text[known:]) if known else piece

    def _is_wanted(self, piece: Piece) -> bool:
        # While other rows of a request continue, each response has empty text for completed rows.
        if piece.index in self._finished and not piece.text:
            return False
        if piece.finish_reason:
            self._finished.add(piece.index)
        return True

    def end_requests(self) -> list[Any]:
        """Return the requests that must be sent in any case: none for stateless models."""
        return []


STEP_TOKENS = "step_tokens"
"""How many tokens one request of a sequence generates, for models that have this option."""
_WHOLE, _PIECE = 1 << 20, 4
"""As many as the model generates at once, or few enough to stream them."""


class Steps:
    """One sequence of a model that keeps state, with a start, steps and an end."""

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
        """Return the request that frees the model's state; none if already sent or not started."""
        if not self._started or self._ended:
            return []
        self._ended = True
        # The end request must not generate tokens.
        options: dict[str, Value] = {STEP_TOKENS: 0} if STEP_TOKENS in self.info.inputs else {}
        controls: dict[str, Value] = {"sequence_id": self._correlation, "sequence_end": True}
        return [self._request("", options, controls)]

    def _request(self, text: str, options: Mapping[str, Value], controls: dict[str, Value]) -> Any:
        if not self.info.made_by_llmserve:
            # Such a model needs its required inputs at every step.
            options = self._options = {**self._options, **options}
        return build_request(
            self.info, [text], options, request_id=self.request_id, controls=controls
        )


class Stepwise:
    """The exchange of sequence models: one sequence per prompt, one step per round."""

    can_share = False

    def __init__(
        self, info: ModelInfo, prompts: Sequence[str], options: Mapping[str, Value], *, pieces: bool
    ) -> None:
        self.info = info
        self._step_options: dict[str, Value] = {}
        if STEP_TOKENS in info.inputs:
            self._step_options[STEP_TOKENS] = options.get(STEP_TOKENS, _PIECE if pieces else _WHOLE)
        self._steps = [Steps(info, index=index) for index in range(len(prompts))]
        self._round = [
            steps.step(prompt, {**options, **self._step_options})
            for steps, prompt in zip(self._steps, prompts, strict=True)
        ]

    def next_round(self) -> list[Any]:
        requests, self._round = self._round, []
        return requests

    def take(self, response: Any) -> list[Piece]:
        index = int(response.id)
        pieces = _shift(read_response(response, 1, self.info.answer), index)
        # A model without finish reasons gets one step only: the loop would never end.
        has_reasons = "finish_reason" in self.info.outputs
        if has_reasons and not any(piece.finish_reason for piece in pieces):
            self._round.append(self._steps[index].step("", self._step_options))
        return pieces

    def end_requests(self) -> list[Any]:
        return [request for steps in self._steps for request in steps.end_requests()]


Exchange = AtOnce | Stepwise
"""The messages of one call of ``generate`` or ``stream``."""


def _shift(pieces: list[Piece], first: int) -> list[Piece]:
    return [replace(piece, index=piece.index + first) for piece in pieces] if first else pieces
