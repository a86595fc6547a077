"""A request under way in the stand-in, and the responses that it gets."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from llmserve.server.backends.tensorrtllm.settings import Settings
from llmserve.server.backends.tensorrtllm.tokens import Tokens

_TYPES = {
    "INT32": np.int32, "INT64": np.int64, "FP32": np.float32, "FP16": np.float16,
    "BF16": np.float32, "UINT8": np.uint8,
}  # fmt: skip
_RECENT = 0.02


class Flight:
    """Sends what its sequences say: pieces as they come, or everything at the end."""

    def __init__(self, raw: Any, given: Mapping[str, Any], settings: Settings, pb: Any) -> None:
        self.request_id: str = raw.request_id()
        self.wanted: frozenset[str] = frozenset(raw.requested_output_names())
        self._raw = raw
        self._sender = raw.get_response_sender()
        self._settings = settings
        self._pb = pb
        self._asked = 0.0
        self._gone = False
        self.closed = False
        self.rows: list[Tokens] = []
        self.streams = settings.decoupled and _true(given, "streaming", False)
        self._echo = not _true(given, "exclude_input_in_output", settings.excludes_input)

    def is_cancelled(self) -> bool:
        """Whether the client is gone, as far as is known."""
        now = time.monotonic()
        if not self.closed and now - self._asked >= _RECENT:
            self._asked = now
            self._gone = self._gone or bool(self._raw.is_cancelled())
        return self._gone

    def cancel(self) -> None:
        """End it at the next token."""
        self._gone = True

    def tell(self) -> None:
        """Send what is new, if anything is to be sent now."""
        done = all(row.done for row in self.rows)
        if self.closed or not (done or self.streams):
            return
        # One row at a time: rows of a stream have pieces of different lengths.
        pieces = [row.take_ids() for row in self.rows]
        if not done and not any(pieces):
            return
        if self._echo:
            pieces = [[*r.prompt_ids, *ids] for r, ids in zip(self.rows, pieces, strict=True)]
            self._echo = not self.streams
        self._send(self._pb.InferenceResponse(output_tensors=self._tensors(pieces)), done)

    def fail(self, message: str, *, internal: bool) -> None:
        """Send an error and close."""
        code = self._pb.TritonError.INTERNAL if internal else self._pb.TritonError.INVALID_ARG
        error = self._pb.TritonError(message, code)
        self._send(self._pb.InferenceResponse(output_tensors=[], error=error), True)

    def close(self) -> None:
        """Say that there is nothing to say, as of a request that only stops another."""
        self._sender.send(flags=self._pb.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
        self.closed = True
        self._raw = self._sender = None

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
        outputs = self._settings.outputs
        width = max((len(ids) for ids in pieces), default=0)
        if "sequence_length" not in outputs:
            # The oldest answers are as long as they could have become.
            width = max(len(r.prompt_ids) + r.max_tokens for r in self.rows)
        ids = np.zeros((len(pieces), 1, width), np.int32)
        for index, (row, piece) in enumerate(zip(self.rows, pieces, strict=True)):
            ids[index] = min(row.eos_ids, default=0)
            ids[index, 0, : len(piece)] = piece
        known: dict[str, Any] = {
            "output_ids": ids,
            "sequence_length": np.array([[len(piece)] for piece in pieces], np.int32),
            "batch_index": np.arange(len(pieces), dtype=np.int32)[:, None],
            "num_input_tokens": np.array([[len(r.prompt_ids)] for r in self.rows], np.int32),
            "num_output_tokens": np.array([[len(r.said)] for r in self.rows], np.int32),
        }
        names = [name for name in outputs if not self.wanted or name in self.wanted]
        return [self._pb.Tensor(n, known.get(n, self._nothing(n, len(pieces)))) for n in names]

    def _nothing(self, name: str, rows: int) -> Any:
        """What was not asked for is there all the same, for an ensemble waits for it."""
        kind, dims = self._settings.outputs[name]
        return np.zeros((rows, *(max(size, 1) for size in dims)), _TYPES[kind])


def _true(given: Mapping[str, Any], name: str, default: bool) -> bool:
    return bool(given[name].any()) if name in given else default
