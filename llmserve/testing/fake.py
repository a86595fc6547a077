"""What Triton's Python backend gives a model, without Triton: for unit tests of runtime classes.

It keeps to what ``triton_python_backend_utils`` does as far as llmserve uses it, and records
what a model sends.

>>> request = FakeRequest({"text_input": ["Hello"]}, max_tokens=4)
>>> request.parameters()
'{"max_tokens": 4}'
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from llmserve.testing.models import Answers, FakeInferenceRequest
from llmserve.testing.told import FakeLogger, FakeMetricFamily
from llmserve.testing.values import (
    FakeError,
    FakeModelException,
    FakeResponse,
    FakeTensor,
    as_array,
)


class FakeBackendUtils:
    """Stands for the module ``triton_python_backend_utils``.

    ``models`` are those that can be asked from inside: a function of the request that returns a
    response, or several of a model that streams.

    >>> pb = FakeBackendUtils(models={"echo": lambda asked: FakeResponse(asked.inputs())})
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
        self, model_name: str, inputs: Sequence[FakeTensor], **asked: Any
    ) -> FakeInferenceRequest:
        """Make a request to another model of the server."""
        return FakeInferenceRequest(self.models, model_name, inputs, **asked)

    @staticmethod
    def get_input_tensor_by_name(request: Any, name: str) -> FakeTensor | None:
        """Return an input of a request, None if it has no such."""
        return next((tensor for tensor in request.inputs() if tensor.name() == name), None)

    @staticmethod
    def get_output_tensor_by_name(response: Any, name: str) -> FakeTensor | None:
        """Return an output of another model's response, None if it has no such."""
        return next((t for t in response.output_tensors() if t.name() == name), None)


class FakeRequest:
    """A request with inputs and parameters, which keeps the responses that it gets.

    Texts become BYTES. As in Triton, nothing may be sent after the final response.
    """

    def __init__(
        self,
        inputs: Mapping[str, Any],
        *,
        sequence: int | str = 0,
        flags: int = 0,
        **parameters: Any,
    ) -> None:
        self._inputs = [FakeTensor(name, as_array(values)) for name, values in inputs.items()]
        self._parameters = parameters
        self.sequence = sequence
        self._flags = flags
        self.responses: list[FakeResponse] = []
        self.closed = False
        self.cancelled = False
        self.rescheduled = False

    def inputs(self) -> list[FakeTensor]:
        """Return the input tensors."""
        return self._inputs

    def parameters(self) -> str:
        """Return the request parameters as JSON."""
        return json.dumps(self._parameters)

    def is_cancelled(self) -> bool:
        """Say whether the client has gone; set ``cancelled`` to let it go."""
        return self.cancelled

    def correlation_id(self) -> int | str:
        """Return the sequence's id."""
        return self.sequence

    def replace_input(self, name: str, values: Any) -> None:
        """Change an input, as Triton changes its controls when it schedules a request again."""
        self._inputs = [tensor for tensor in self._inputs if tensor.name() != name]
        self._inputs.append(FakeTensor(name, as_array(values)))

    def flags(self) -> int:
        """Return the sequence's flags: 1 starts, 2 ends."""
        return self._flags

    def set_release_flags(self, flags: int) -> None:
        """Give the request back to be scheduled again."""
        self.rescheduled = flags == FakeBackendUtils.TRITONSERVER_REQUEST_RELEASE_RESCHEDULE

    def request_id(self) -> str:
        """Return the id that the client gave, which is none."""
        return ""

    def requested_output_names(self) -> list[str]:
        """Return the outputs that the client asked for; none means all of them."""
        return []

    def get_response_sender(self) -> FakeRequest:
        """Return what responses are sent with."""
        return self

    def send(self, response: FakeResponse | None = None, flags: int = 0) -> None:
        """Keep a response; the final flag may come with one or alone."""
        if self.closed:
            raise RuntimeError("a response after the final one")
        if response is not None:
            self.responses.append(response)
        self.closed = flags == FakeBackendUtils.TRITONSERVER_RESPONSE_COMPLETE_FINAL

    @property
    def text(self) -> str:
        """Everything that was answered to the first prompt."""
        return "".join(response.texts[0] for response in self.responses if not response.error)

    @property
    def error(self) -> str | None:
        """What the error says that it got, if it got one."""
        errors = [response.error for response in self.responses if response.error]
        return errors[0].message() if errors else None
