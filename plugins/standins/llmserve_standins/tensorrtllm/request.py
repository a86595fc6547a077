"""A request under way in the stand-in, and the responses that it gets."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from llmserve_standins.graphs import numpy_type
from llmserve_standins.tensorrtllm.sequences import TokenSequence
from llmserve_standins.tensorrtllm.settings import Settings

_SCORES = ("cum_log_probs", "output_log_probs", "context_logits", "generation_logits")
_CHECK_EVERY = 0.02


class PendingRequest:
    """Sends what its sequences make: pieces as they come, or everything at the end."""

    def __init__(self, raw: Any, given: Mapping[str, Any], settings: Settings, pb: Any) -> None:
        self.request_id: str = raw.request_id()
        self.closed = False
        self.rows: list[TokenSequence] = []
        self._raw, self._given, self._settings, self._pb = raw, given, settings, pb
        self._sender = raw.get_response_sender()
        self._outputs = frozenset(raw.requested_output_names()) or settings.outputs.keys()
        self._checked = 0.0
        self._cancelled = False
        self.streams = self._flag("streaming")
        # A stream has new tokens only.
        self._echo = not self.streams and not self._flag(
            "exclude_input_in_output", settings.excludes_input
        )

    def is_cancelled(self) -> bool:
        """Whether the client is gone, as far as is known."""
        now = time.monotonic()
        if not self.closed and now - self._checked >= _CHECK_EVERY:
            self._checked = now
            self._cancelled = self._cancelled or bool(self._raw.is_cancelled())
        return self._cancelled

    def cancel(self) -> None:
        """End it at the next token."""
        self._cancelled = True

    def send_new(self) -> None:
        """Send the new tokens, if any are to be sent now."""
        done = all(row.done for row in self.rows)
        if self.closed or not (done or self.streams):
            return
        pieces = [row.take_ids() for row in self.rows]
        if not done and not any(pieces):
            return
        if self._echo:
            pieces = [[*r.prompt_ids, *ids] for r, ids in zip(self.rows, pieces, strict=True)]
        self._send(self._pb.InferenceResponse(output_tensors=self._tensors(pieces)), done)

    def fail(self, message: str, *, internal: bool) -> None:
        """Send an error and close."""
        code = self._pb.TritonError.INTERNAL if internal else self._pb.TritonError.INVALID_ARG
        error = self._pb.TritonError(message, code)
        self._send(self._pb.InferenceResponse(output_tensors=[], error=error), True)

    def close(self) -> None:
        """Answer with nothing, as the backend answers a request that only stops another."""
        self._send(self._pb.InferenceResponse(output_tensors=[]), True)

    def _send(self, response: Any, final: bool) -> None:
        if self.closed:
            return
        self.closed = final
        flag = self._pb.TRITONSERVER_RESPONSE_COMPLETE_FINAL if final else 0
        self._sender.send(response, flags=flag)
        if final:
            # A request that outlives its model brings the process down with it.
            self._raw = self._sender = None

    def _tensors(self, pieces: Sequence[Sequence[int]]) -> list[Any]:
        rows, settings = self.rows, self._settings
        width = max((len(ids) for ids in pieces), default=0)
        if settings.is_first:
            # The oldest answers are as long as they could have become.
            width = max(len(row.prompt_ids) + row.max_tokens for row in rows)
        ids = np.zeros((len(pieces), 1, width), np.int32)
        for index, (row, piece) in enumerate(zip(rows, pieces, strict=True)):
            ids[index] = min(row.eos_ids, default=0)
            ids[index, 0, : len(piece)] = piece
        lengths = np.array([[len(piece)] for piece in pieces], np.int32)
        known: dict[str, Any] = {"output_ids": ids, "sequence_length": lengths}
        if len(pieces) > 1 or settings.fills_in_scores:
            known["batch_index"] = np.arange(len(pieces), dtype=np.int32)[:, None]
        if self._flag("return_num_input_tokens"):
            known["num_input_tokens"] = np.array([[len(row.prompt_ids)] for row in rows], np.int32)
        if self._flag("return_num_output_tokens"):
            known["num_output_tokens"] = lengths
        if settings.fills_in_scores:
            known |= {name: self._zeros(name) for name in _SCORES if name in settings.outputs}
        wanted = (name for name in settings.outputs if name in self._outputs and name in known)
        return [self._pb.Tensor(name, known[name]) for name in wanted]

    def _zeros(self, name: str) -> Any:
        kind, dims = self._settings.outputs[name]
        return np.zeros((len(self.rows), *(max(size, 1) for size in dims)), numpy_type(kind))

    def _flag(self, name: str, default: bool = False) -> bool:
        return bool(self._given[name].any()) if name in self._given else default
