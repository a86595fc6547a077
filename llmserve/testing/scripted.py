"""A Triton without models, for tests of what talks to one: clients, frontends, measurements."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

import grpc
from tritonclient.grpc import model_config_pb2, service_pb2, service_pb2_grpc

from llmserve.client.messages import pack_numbers, pack_texts, unpack_texts
from llmserve.contract.passport import DECLARED as FINGERPRINT
from llmserve.version import __version__

MODELS = {"whole": "unary", "pieces": "stream", "steps": "sequence"}
_STREAMS = 256


@dataclass
class ScriptedTriton:
    """Answers over gRPC as a test prescribes; a test may change every field while it serves.

    >>> with ScriptedTriton(pieces=["Hello ", "world"]).serving() as url:
    ...     with connect(url) as client:
    ...         client.generate("pieces", "Hi").text
    'Hello world'
    """

    pieces: Sequence[str] = ("x ", "x ", "x ", "x ")
    """The text of every answer; a request's ``max_tokens`` is the most pieces that it gets."""
    tokens: Sequence[int] = ()
    """How many tokens each piece contains; by default one."""
    reason: str = "stop"
    """The finish reason."""
    finish: Literal["complete", "early", "silent"] = "complete"
    """``early`` ends a stream without its final response, ``silent`` never ends it."""
    first: float = 0.0
    """Seconds to the first piece, or to a whole answer."""
    gap: float = 0.0
    """Seconds between pieces."""
    hold: int = 0
    """Nothing is answered before this many requests have arrived."""
    fail_every: int = 0
    """Every N-th request fails; 0 for none."""
    counts: bool = True
    """Whether tokens are counted."""
    lagging: bool = False
    """Whether statistics are those of the previous call, as Triton counts a batch late."""
    index: bool = True
    """Whether clients may list the models; Triton's API for it can be closed to them."""
    models: Mapping[str, str] = field(default_factory=lambda: MODELS)
    """The models, with how each exchanges requests and responses."""
    inputs: Sequence[str] = ()
    """What they take besides ``text_input``: names of tensors of text."""
    fingerprint: str = ""
    """What their configurations say that their answers depend on."""

    def __post_init__(self) -> None:
        self.requests: list[Any] = []
        """The requests so far, as sent."""
        self.stopped = threading.Event()
        self.answered = [0]
        self.steps: dict[int, int] = {}
        self.changed = threading.Condition()

    @property
    def prompts(self) -> list[str]:
        return [text for sent in self.requests for text in unpack_texts(sent.raw_input_contents[0])]

    @property
    def messages(self) -> list[str]:
        """The chats so far in JSON; empty for a request without."""
        return [sent.parameters["messages"].string_param for sent in self.requests]

    @contextmanager
    def serving(self) -> Iterator[str]:
        """Listen on a free port and yield its address."""
        self.stopped.clear()
        server = grpc.server(ThreadPoolExecutor(_STREAMS))
        service_pb2_grpc.add_GRPCInferenceServiceServicer_to_server(_Servicer(self), server)
        port = server.add_insecure_port("127.0.0.1:0")
        server.start()
        try:
            yield f"127.0.0.1:{port}"
        finally:
            # A thread that still waits would keep the process from ending.
            with self.changed:
                self.stopped.set()
                self.changed.notify_all()
            server.stop(None)

    @contextmanager
    def in_a_process(self) -> Iterator[tuple[str, subprocess.Popen[str]]]:
        """Serve in a process of its own, which a test may kill; yield the address and it.

        What happens in the test's process then takes nothing of the answers' time.
        """
        command = [sys.executable, "-m", __name__, json.dumps(asdict(self))]
        process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        try:
            assert process.stdout is not None
            yield process.stdout.readline().strip(), process
        finally:
            process.kill()
            process.wait()


class _Servicer(service_pb2_grpc.GRPCInferenceServiceServicer):  # type: ignore[misc]
    def __init__(self, script: ScriptedTriton) -> None:
        self.script = script

    def ServerReady(self, request: Any, context: Any) -> Any:
        return service_pb2.ServerReadyResponse(ready=True)

    def RepositoryIndex(self, request: Any, context: Any) -> Any:
        self._wait_if_silent()
        if not self.script.index:
            refusal = "This protocol is restricted, expecting header"
            context.abort(grpc.StatusCode.UNAVAILABLE, refusal)
        response = service_pb2.RepositoryIndexResponse()
        for name in self.script.models:
            response.models.add(name=name, version="1", state="READY")
        return response

    def ModelConfig(self, request: Any, context: Any) -> Any:
        # A C string ends at its first NUL, so Triton reads no further.
        name = request.name.partition("\0")[0]
        if name not in self.script.models:
            unknown = f"Request for unknown model: '{request.name}' is not found"
            context.abort(grpc.StatusCode.NOT_FOUND, unknown)
        config = model_config_pb2.ModelConfig(name=name, max_batch_size=8)
        text = model_config_pb2.TYPE_STRING
        for input_name in ("text_input", *self.script.inputs):
            config.input.add(name=input_name, data_type=text, dims=[1])
        outputs = {"text_output": text, "finish_reason": text}
        if self.script.counts:
            outputs |= dict.fromkeys(
                ("num_input_tokens", "num_output_tokens"), model_config_pb2.TYPE_INT32
            )
        for output, kind in outputs.items():
            config.output.add(name=output, data_type=kind, dims=[1])
        exchange = self.script.models[name]
        config.model_transaction_policy.decoupled = exchange == "stream"
        config.parameters["llmserve.exchange"].string_value = exchange
        config.parameters["llmserve.version"].string_value = __version__
        if self.script.fingerprint:
            config.parameters[FINGERPRINT].string_value = self.script.fingerprint
        return service_pb2.ModelConfigResponse(config=config)

    def ModelStatistics(self, request: Any, context: Any) -> Any:
        response, script = service_pb2.ModelStatisticsResponse(), self.script
        count = script.answered[-1]
        if script.lagging:
            count, script.answered = script.answered[0], script.answered[-1:]
        for name in [request.name] if request.name else script.models:
            stats = response.model_stats.add(name=name, version="1")
            stats.inference_count = stats.execution_count = count
            stats.inference_stats.success.count = count
        return response

    def ModelInfer(self, request: Any, context: Any) -> Any:
        parameters, pieces = request.parameters, self.script.pieces
        if parameters["sequence_end"].bool_param:
            return self._response(request, "", 0, None)
        if sequence := parameters["sequence_id"].int64_param:
            at = self.script.steps.get(sequence, 0)
            self.script.steps[sequence] = at + 1
            time.sleep(self.script.gap if at else self.script.first)
            return self._piece(request, at)
        if self._fails(request):
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, "scripted to fail")
        self._wait_if_silent()
        self._count()
        tokens = self._tokens(len(pieces))
        return self._response(request, "".join(pieces), tokens, self.script.reason)

    def ModelStreamInfer(self, requests: Any, context: Any) -> Iterator[Any]:
        for request in requests:
            if self._fails(request):
                yield service_pb2.ModelStreamInferResponse(error_message="scripted to fail")
                continue
            most = request.parameters["max_tokens"].int64_param or len(self.script.pieces)
            for at in range(min(most, len(self.script.pieces))):
                time.sleep(self.script.gap if at else 0)
                piece = self._piece(request, at)
                yield service_pb2.ModelStreamInferResponse(infer_response=piece)
            self._wait_if_silent()
            if self.script.finish == "early":
                return
            self._count()
            if request.parameters["triton_enable_empty_final_response"].bool_param:
                end = service_pb2.ModelInferResponse(id=request.id)
                end.parameters["triton_final_response"].bool_param = True
                yield service_pb2.ModelStreamInferResponse(infer_response=end)

    def _fails(self, request: Any) -> bool:
        """Let a request arrive, wait until it is due, and return whether it fails."""
        with self.script.changed:
            self.script.requests.append(request)
            number = len(self.script.requests)
            self.script.changed.notify_all()
            self.script.changed.wait_for(self._may_answer)
        time.sleep(self.script.first)
        every = self.script.fail_every
        return bool(every) and number % every == 0

    def _may_answer(self) -> bool:
        return len(self.script.requests) >= self.script.hold or self.script.stopped.is_set()

    def _wait_if_silent(self) -> None:
        if self.script.finish == "silent":
            self.script.stopped.wait()

    def _count(self) -> None:
        with self.script.changed:
            self.script.answered.append(self.script.answered[-1] + 1)

    def _tokens(self, pieces: int) -> int:
        """Return how many tokens the first pieces of the answer contain."""
        return sum(self.script.tokens[:pieces]) if self.script.tokens else pieces

    def _piece(self, request: Any, at: int) -> Any:
        """Return the piece at a position of the answer, with the count of all tokens so far."""
        reason = self.script.reason if at == len(self.script.pieces) - 1 else ""
        return self._response(request, self.script.pieces[at], self._tokens(at + 1), reason)

    def _response(self, request: Any, text: str, tokens: int, reason: str | None) -> Any:
        response = service_pb2.ModelInferResponse(model_name=request.model_name, id=request.id)
        tensors = {"text_output": ("BYTES", pack_texts([text]))}
        if reason is not None:
            tensors["finish_reason"] = ("BYTES", pack_texts([reason]))
        if self.script.counts:
            tensors["num_input_tokens"] = ("INT32", pack_numbers("INT32", [5]))
            tensors["num_output_tokens"] = ("INT32", pack_numbers("INT32", [tokens]))
        for name, (kind, raw) in tensors.items():
            response.outputs.add(name=name, datatype=kind, shape=[1, 1])
            response.raw_output_contents.append(raw)
        return response


if __name__ == "__main__":
    with ScriptedTriton(**json.loads(sys.argv[1])).serving() as url:
        print(url, flush=True)  # noqa: T201
        # Until the test ends, even if it is killed.
        sys.stdin.read()
