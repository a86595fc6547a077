"""The stand-in for TensorRT-LLM's engine backend: the same tensors, computed with PyTorch.

One thread runs all steps; a step generates a token of one sequence after another. In flight,
requests join between two steps, as with ``inflight_fused_batching``. With ``V1``, and under the LLM
API with ``STATIC_BATCH``, requests that arrive while a batch runs form the next batch.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from threading import Condition, Thread
from types import SimpleNamespace
from typing import Any

from llmserve.plugin import demo_model_path
from llmserve.runtime import Compiler, RequestError
from llmserve.runtime.causal import context_length, load
from llmserve_standins.notice import notice
from llmserve_standins.tensorrtllm.request import PendingRequest, TokenSequence
from llmserve_standins.tensorrtllm.settings import Settings


class TritonPythonModel:
    """The class that Triton loads for ``backend: "tensorrtllm"`` if TensorRT-LLM is missing."""

    def initialize(self, args: Mapping[str, str]) -> None:
        import triton_python_backend_utils as pb_utils

        self.start(Settings(args["model_name"], json.loads(args["model_config"])), pb_utils)

    def start(self, settings: Settings, pb_utils: Any) -> None:
        self._pb = pb_utils
        self._settings = settings
        self._model = load_model(settings)
        self._context = context_length(self._model)
        self._compiler: Compiler | None = None
        if info := settings.tokenizer_info:
            # llguidance replaces xgrammar.
            tokenizer: Any = SimpleNamespace(tokenizer_json=lambda: info["tokenizer_str"])
            self._compiler = Compiler(tokenizer, frozenset(info["stop_token_ids"]))
        batching = "static batches" if settings.static else "in-flight batching"
        self._notice = notice(pb_utils, settings.name, "TensorRT-LLM", f"PyTorch with {batching}")
        self._requests: list[PendingRequest] = []
        self._stopping = False
        self._changed = Condition()
        self._thread = Thread(target=self._run, name="steps", daemon=True)
        self._thread.start()

    def execute(self, requests: Sequence[Any]) -> None:
        """Accept requests; the answers are sent through their response senders."""
        with self._changed:
            for raw in requests:
                request = PendingRequest(raw, self._settings, self._pb)
                try:
                    self._accept(request)
                except Exception as error:
                    request.responder.fail(error)
            self._changed.notify_all()

    def finalize(self) -> None:
        """Stop after all requests have finished."""
        with self._changed:
            self._stopping = True
            self._changed.notify_all()
        self._thread.join()
        if self._compiler is not None:
            self._compiler.close()
        self._notice.clear()

    def _accept(self, request: PendingRequest) -> None:
        same_id = [other for other in self._requests if request.id and other.id == request.id]
        if request.flag("stop"):
            # It ends the request with its id, and gets an empty response.
            if not request.id:
                message = "Trying to stop a request but request ID is not provided"
                request.responder.refuse(message, internal=True)
            for row in (row for other in same_id for row in other.rows):
                row.generation.cancel()
            request.send_new()
            return
        if request.streams and not self._settings.decoupled:
            problem = "streaming is only supported where the model is decoupled"
            raise RequestError(problem, code="unsupported_option", param="streaming")
        if self._settings.is_0_5 and request.id:
            # 0.5.0 accepts only whole numbers, and no id twice at once.
            if not request.id.isdigit():
                raise RequestError(f"Invalid requestId, must be uint64_t. Got {request.id}")
            if same_id:
                message = f"requestId {request.id} is already in progress, request is ignored."
                raise RequestError(message)
        request.read(self._context, self._compiler)
        self._requests.append(request)

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._requests or self._stopping)
                if not self._requests:
                    return
                running = self._start_waiting()
            for request in running:
                self._step(request)
            with self._changed:
                self._requests = [
                    request for request in self._requests if not request.responder.closed
                ]

    def _start_waiting(self) -> list[PendingRequest]:
        """Start waiting requests that fit, in static batches only when none runs; return all."""
        running = [request for request in self._requests if request.started]
        if self._settings.static and running:
            return running
        # A row that has ended makes room for another, even if its request has others.
        rows = sum(not row.done for request in running for row in request.rows)
        for request in self._requests[len(running) :]:
            rows += len(request.rows)
            if rows > self._settings.max_batch_size and running:
                break
            request.started = True
            running.append(request)
        return running

    def _step(self, request: PendingRequest) -> None:
        try:
            for row in request.rows:
                if not row.done:
                    row.generation.push(row.sampler.choose(next_logits(self._model, row)))
            request.send_new()
        except Exception as error:
            request.responder.fail(error)


def load_model(settings: Settings) -> Any:
    """Load the model that the engine was built from."""
    source = dict(settings.source)
    if source.pop("demo", False):
        source["path"] = str(demo_model_path())
    return load({**source, "device": "auto", "dtype": "auto"}, Path())


def next_logits(model: Any, row: TokenSequence) -> Any:
    """Return the model's logits for the next token."""
    import torch

    ids = [row.generation.token_ids[-1]] if row.cache is not None else row.prompt_ids
    with torch.inference_mode():
        tensor = torch.tensor([ids], device=model.device)
        result = model(input_ids=tensor, past_key_values=row.cache, use_cache=True)
    row.cache = result.past_key_values
    return result.logits[0, -1].float().cpu().numpy()
