"""The stand-in itself: takes requests, makes steps for all of them, sends what comes.

One thread makes the steps, a token of one sequence after another. In flight, requests join between
two steps, as with ``inflight_fused_batching``. With ``V1``, and under the LLM API with
``STATIC_BATCH``, what has come while a batch ran is the next one, which runs to its end.
"""

from __future__ import annotations

import threading
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from llmserve.runtime.causal import context_length, load
from llmserve.runtime.errors import RequestError
from llmserve_standins.notice import Notice
from llmserve_standins.tensorrtllm.request import PendingRequest
from llmserve_standins.tensorrtllm.sequences import Guides, TokenSequence, read_sequences
from llmserve_standins.tensorrtllm.settings import Settings


class StandIn:
    """Answers an engine's tensors with PyTorch."""

    def __init__(self, settings: Settings, pb_utils: Any) -> None:
        self._pb = pb_utils
        self._settings = settings
        self._model = load_model(settings)
        self._context = context_length(self._model)
        self._guides = Guides(settings.tokenizer_info) if settings.tokenizer_info else None
        way = "static batches" if settings.static else "in-flight batching"
        self._notice = Notice(pb_utils, settings.name, "TensorRT-LLM", f"PyTorch with {way}")
        self._running: list[PendingRequest] = []
        self._waiting: list[PendingRequest] = []
        self._closing = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._work, name="steps", daemon=True)
        self._thread.start()

    def execute(self, requests: Sequence[Any]) -> None:
        """Take requests; the answers leave through their senders."""
        taken = [request for raw in requests if (request := self._take(raw)) is not None]
        with self._changed:
            self._waiting += taken
            self._changed.notify_all()

    def finalize(self) -> None:
        """Stop, once nothing is under way any more."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._thread.join()
        self._notice.close()

    def _take(self, raw: Any) -> PendingRequest | None:
        given = {tensor.name(): tensor.as_numpy() for tensor in raw.inputs()}
        request = PendingRequest(raw, given, self._settings, self._pb)
        if "stop" in given and given["stop"].any():
            self._stop(request)
            return None
        try:
            if request.streams and not self._settings.decoupled:
                raise RequestError("streaming is only supported where the model is decoupled")
            self._check_id(request.request_id)
            request.rows = read_sequences(given, self._context, request.is_cancelled, self._guides)
        except RequestError as error:
            request.fail(str(error), internal=False)
        except Exception as error:
            self._fail(request, error)
        else:
            return request
        return None

    def _check_id(self, name: str) -> None:
        """0.5.0 takes whole numbers, and each of them once at a time."""
        if not name or not self._settings.is_first:
            return
        if not name.isdigit():
            raise RequestError(f"Invalid requestId, must be uint64_t. Got {name}")
        if self._with_id(name):
            raise RequestError(f"requestId {name} is already in progress, request is ignored.")

    def _stop(self, stopping: PendingRequest) -> None:
        """A request that says stop ends the one that has its id."""
        if not stopping.request_id:
            stopping.fail("Trying to stop a request but request ID is not provided", internal=True)
            return
        for request in self._with_id(stopping.request_id):
            request.cancel()
        stopping.close()

    def _with_id(self, name: str) -> list[PendingRequest]:
        with self._changed:
            return [one for one in (*self._running, *self._waiting) if one.request_id == name]

    def _work(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or self._running or self._closing)
                if not self._running and not self._waiting:
                    return
                self._running += self._joining()
            for request in self._running:
                self._step(request)
            with self._changed:
                self._running = [request for request in self._running if not request.closed]

    def _joining(self) -> list[PendingRequest]:
        """Take those that begin now: while there is room, or the next batch when none runs."""
        if self._settings.static and self._running:
            return []
        rows = sum(len(request.rows) for request in self._running)
        count = 0
        for request in self._waiting:
            rows += len(request.rows)
            if rows > self._settings.max_batch_size and (count or self._running):
                break
            count += 1
        joining, self._waiting = self._waiting[:count], self._waiting[count:]
        return joining

    def _step(self, request: PendingRequest) -> None:
        try:
            for row in request.rows:
                if not row.done:
                    row.push(row.sampler.choose(next_logits(self._model, row)))
            request.send_new()
        except Exception as error:
            self._fail(request, error)

    def _fail(self, request: PendingRequest, error: Exception) -> None:
        self._pb.Logger.log_error("".join(traceback.format_exception(error)))
        request.fail(f"the stand-in failed: {type(error).__name__}: {error}", internal=True)


def load_model(settings: Settings) -> Any:
    """Load the model that the engine was built from."""
    source = dict(settings.source)
    if source.pop("demo", False):
        from llmserve.demo import demo_model_path

        source["path"] = str(demo_model_path())
    return load({**source, "device": "auto", "dtype": "auto"}, Path())


def next_logits(model: Any, row: TokenSequence) -> Any:
    """Return what the model says of the next token."""
    import torch

    ids = [row.token_ids[-1]] if row.cache is not None else row.prompt_ids
    with torch.inference_mode():
        given = torch.tensor([ids], device=model.device)
        result = model(input_ids=given, past_key_values=row.cache, use_cache=True)
    row.cache = result.past_key_values
    return result.logits[0, -1].float().cpu().numpy()
