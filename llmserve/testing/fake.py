"""Fakes of Triton's Python backend, for unit tests of runtime classes.

They behave like ``triton_python_backend_utils`` as far as llmserve uses it, and record what a
model sends.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from llmserve.contract.failures import Failure, read
from llmserve.contract.options import ALIASES, OPTIONS
from llmserve.contract.tasks import TOKENS
from llmserve.contract.tensors import MESSAGES, TEXT_INPUT, Tensor
from llmserve.plugins import roles
from llmserve.runtime.answer.generation import Generation
from llmserve.runtime.answer.params import Params
from llmserve.runtime.answer.text_formatter import TextFormatter
from llmserve.runtime.protocols import Formatter, Parts, Tokenizer

_INPUTS = (TEXT_INPUT, MESSAGES, *roles.Batching.inputs, *roles.Formatter.inputs)


class FakeTensor:
    def __init__(self, name: str, values: npt.NDArray[Any]) -> None:
        self._name = name
        self._values = values

    def name(self) -> str:
        return self._name

    def as_numpy(self) -> npt.NDArray[Any]:
        return self._values

    def is_cpu(self) -> bool:
        return True


class FakeError:
    INTERNAL = 1
    INVALID_ARG = 2

    def __init__(self, message: str, code: int = INTERNAL) -> None:
        self._message = message
        self._code = code

    def message(self) -> str:
        return self._message

    def code(self) -> int:
        return self._code


class FakeResponse:
    def __init__(
        self, output_tensors: Sequence[FakeTensor] = (), error: FakeError | None = None
    ) -> None:
        self.tensors = {tensor.name(): tensor.as_numpy() for tensor in output_tensors}
        self.error = error

    @property
    def texts(self) -> list[str]:
        """The texts of ``text_output``, one per row."""
        return [value.decode() for value in self.tensors["text_output"].reshape(-1)]


class FakeModelException(Exception):
    """A ``TritonModelException``."""


def as_array(values: Any) -> npt.NDArray[Any]:
    """Return values as Triton passes them to a model: one per row, texts as bytes."""
    if isinstance(values, np.ndarray):
        return values
    rows = [value.encode() if isinstance(value, str) else value for value in values]
    kind: Any = np.object_ if rows and isinstance(rows[0], bytes) else None
    return np.array(rows, dtype=kind).reshape(len(rows), 1)


class FakeLogger:
    def __init__(self) -> None:
        self.errors: list[str] = []
        self.warnings: list[str] = []
        self.infos: list[str] = []

    def log_error(self, message: str) -> None:
        self.errors.append(message)

    def log_warn(self, message: str) -> None:
        self.warnings.append(message)

    def log_info(self, message: str) -> None:
        self.infos.append(message)

    log_verbose = log_info


class FakeMetric:
    def __init__(self) -> None:
        self.value = 0.0

    def increment(self, amount: float) -> None:
        self.value += amount

    def set(self, value: float) -> None:
        self.value = value


class FakeMetricFamily:
    """A metric family with a single metric."""

    COUNTER = 0
    GAUGE = 1

    def __init__(self, name: str, description: str, kind: int) -> None:
        self.name, self.description, self.kind = name, description, kind
        self.metric = FakeMetric()

    def Metric(self, labels: Mapping[str, str]) -> FakeMetric:
        del labels
        return self.metric


Answers = Callable[["FakeInferenceRequest"], "FakeResponse | Iterable[FakeResponse]"]
"""The behaviour of another model: it returns one response, or several if it streams."""


class FakeReply:
    """A response as the calling model receives it."""

    def __init__(self, response: FakeResponse) -> None:
        self._response = response

    def output_tensors(self) -> list[FakeTensor]:
        return [FakeTensor(name, values) for name, values in self._response.tensors.items()]

    def has_error(self) -> bool:
        return self._response.error is not None

    def error(self) -> FakeError | None:
        return self._response.error


class FakeInferenceRequest:
    def __init__(
        self,
        models: Mapping[str, Answers],
        model_name: str,
        inputs: Sequence[FakeTensor],
        *,
        requested_output_names: Sequence[str] = (),
        **arguments: Any,
    ) -> None:
        self._models = models
        self.name = model_name
        self.requested_outputs = list(requested_output_names)
        self.arguments = arguments
        self._inputs = list(inputs)

    def inputs(self) -> list[FakeTensor]:
        return self._inputs

    def exec(self, decoupled: bool = False) -> Any:
        """Call the model and return a reply, or an iterator of replies if it is decoupled."""
        replies = self._replies()
        return replies if decoupled else next(replies)

    async def async_exec(self, decoupled: bool = False) -> Any:
        return self.exec(decoupled)

    def _replies(self) -> Iterator[FakeReply]:
        answers = self._models.get(self.name)
        if answers is None:
            message = f"Failed for execute the inference request. Model '{self.name}' is not ready."
            yield FakeReply(FakeResponse(error=FakeError(message)))
            return
        result = answers(self)
        for response in [result] if isinstance(result, FakeResponse) else result:
            yield FakeReply(response)


class FakeBackendUtils:
    """A fake of the module ``triton_python_backend_utils``.

    ``models`` are the models that the tested model can call: functions of a request that return
    one response, or several if the model streams.

    >>> pb = FakeBackendUtils(models={"echo": lambda request: FakeResponse(request.inputs())})
    >>> request = pb.InferenceRequest(model_name="echo", inputs=[FakeTensor("IN", as_array([1]))])
    >>> request.exec().output_tensors()[0].name()
    'IN'
    """

    TRITONSERVER_RESPONSE_COMPLETE_FINAL = 1
    TRITONSERVER_REQUEST_RELEASE_RESCHEDULE = 2
    TRITONSERVER_REQUEST_FLAG_SEQUENCE_START = 1
    TRITONSERVER_REQUEST_FLAG_SEQUENCE_END = 2
    TritonModelException = FakeModelException
    Tensor = FakeTensor
    TritonError = FakeError
    InferenceResponse = FakeResponse
    MetricFamily = FakeMetricFamily

    def __init__(self, models: Mapping[str, Answers] | None = None) -> None:
        self.Logger = FakeLogger()
        self.models = dict(models or {})

    def InferenceRequest(
        self, model_name: str, inputs: Sequence[FakeTensor], **arguments: Any
    ) -> FakeInferenceRequest:
        return FakeInferenceRequest(self.models, model_name, inputs, **arguments)

    @staticmethod
    def get_input_tensor_by_name(request: Any, name: str) -> FakeTensor | None:
        return next((tensor for tensor in request.inputs() if tensor.name() == name), None)

    @staticmethod
    def get_output_tensor_by_name(response: Any, name: str) -> FakeTensor | None:
        return next((t for t in response.output_tensors() if t.name() == name), None)


class FakeRequest:
    """A request with inputs and parameters, which records its responses.

    Texts become BYTES. As in Triton, nothing may be sent after the final response.
    """

    def __init__(
        self,
        inputs: Mapping[str, Any],
        *,
        sequence: int | str = 0,
        flags: int = 0,
        request_id: str = "",
        **parameters: Any,
    ) -> None:
        self._request_id = request_id
        self._inputs = [FakeTensor(name, as_array(values)) for name, values in inputs.items()]
        self._parameters = parameters
        self.sequence = sequence
        self._flags = flags
        self.responses: list[FakeResponse] = []
        self.closed = False
        self.cancelled = False
        self.rescheduled = False

    def inputs(self) -> list[FakeTensor]:
        return self._inputs

    def parameters(self) -> str:
        return json.dumps(self._parameters)

    def is_cancelled(self) -> bool:
        """Return whether the client has disconnected; set ``cancelled`` to simulate that."""
        if self.closed:
            raise RuntimeError("is_cancelled() was called after the final response")
        return self.cancelled

    def correlation_id(self) -> int | str:
        return self.sequence

    def replace_input(self, name: str, values: Any) -> None:
        """Replace an input, as Triton replaces its controls when it reschedules a request."""
        self._inputs = [tensor for tensor in self._inputs if tensor.name() != name]
        self._inputs.append(FakeTensor(name, as_array(values)))

    def flags(self) -> int:
        """Return the flags of the sequence: 1 is start, 2 is end."""
        return self._flags

    def set_release_flags(self, flags: int) -> None:
        """Release the request, to be rescheduled."""
        self.rescheduled = flags == FakeBackendUtils.TRITONSERVER_REQUEST_RELEASE_RESCHEDULE

    def request_id(self) -> str:
        return self._request_id

    def requested_output_names(self) -> list[str]:
        """Return the outputs that the client requests; an empty list means all of them."""
        return []

    def get_response_sender(self) -> FakeRequest:
        return self

    def send(self, response: FakeResponse | None = None, flags: int = 0) -> None:
        """Record a response; the final flag may be sent with a response or alone."""
        if self.closed:
            raise RuntimeError("a response was sent after the final one")
        if response is not None:
            self.responses.append(response)
        self.closed = flags == FakeBackendUtils.TRITONSERVER_RESPONSE_COMPLETE_FINAL

    @property
    def text(self) -> str:
        """The whole answer to the first prompt."""
        return "".join(response.texts[0] for response in self.responses if not response.error)

    @property
    def error(self) -> str | None:
        """The words of the error that was sent, None if there was none."""
        return None if self.failure is None else self.failure.words

    @property
    def failure(self) -> Failure | None:
        """The error that was sent, with its code and parameter."""
        errors = [response.error for response in self.responses if response.error]
        return read(errors[0].message()) if errors else None


class ByteTokenizer:
    """A tokenizer whose ids are the bytes of the text; 0 ends an answer."""

    eos_ids = frozenset({0})
    vocab_size = 256

    def encode(self, text: str, *, special: bool = True) -> list[int]:
        del special
        return list(text.encode())

    def encode_chat(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        return [byte for message in messages for byte in message["content"].encode()]

    def decode(self, ids: Sequence[int]) -> str:
        return bytes(i for i in ids if i).decode(errors="replace")


def make_parts(
    generator: Any,
    *,
    tokenizer: Tokenizer | None = None,
    formatter: Formatter | None = None,
    inputs: Sequence[str] = (),
    batched: bool = True,
    decoupled: bool = True,
    answers: str = TOKENS,
    outputs: Sequence[Tensor] = (),
    **defaults: Any,
) -> Parts:
    """Return parts to start a driver with; ``inputs`` are the generator's own inputs.

    A generator that answers with values has other ``answers`` than tokens, and the formatter then
    declares its ``outputs``.

    ``defaults`` are build options for requests that do not set them: max_tokens, stream, chat and
    echo.
    """
    return Parts(
        name="tested",
        tokenizer=tokenizer or ByteTokenizer(),
        generator=generator,
        formatter=formatter or TextFormatter({}, Path()),
        inputs=frozenset({*(tensor.name for tensor in _INPUTS), *inputs}),
        extras=frozenset({*inputs} - OPTIONS.keys() - ALIASES.keys()),
        batched=batched,
        decoupled=decoupled,
        defaults={"max_tokens": 8, "stream": False, "chat": False, "echo": False, **defaults},
        pb_utils=FakeBackendUtils(),
        answers=answers,
        outputs={tensor.name: tensor for tensor in outputs},
    )


def generation(
    prompt: Sequence[int],
    max_tokens: int,
    *,
    eos: frozenset[int] = frozenset(),
    decode: Callable[[Sequence[int]], str] | None = None,
    requested: bool = False,
    images: Any = None,
    scored: Sequence[int] = (),
    **params: Any,
) -> Generation:
    """Return a generation; ``requested`` means that its request itself names the length."""
    if requested:
        params["max_tokens"] = max_tokens
    decode = decode or ByteTokenizer().decode
    return Generation(
        prompt,
        Params(**params),
        max_tokens=max_tokens,
        eos_ids=eos,
        decode=decode,
        images=images,
        scored=scored,
    )
