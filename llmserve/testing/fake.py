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

import numpy as np
import numpy.typing as npt


class FakeTensor:
    """A named array."""

    def __init__(self, name: str, values: npt.NDArray[Any]) -> None:
        self._name = name
        self._values = values

    def name(self) -> str:
        """Return the tensor's name."""
        return self._name

    def as_numpy(self) -> npt.NDArray[Any]:
        """Return its values."""
        return self._values


class FakeError:
    """A ``TritonError``."""

    INTERNAL = 1
    INVALID_ARG = 2

    def __init__(self, message: str, code: int = INTERNAL) -> None:
        self._message = message
        self._code = code

    def message(self) -> str:
        """Return what it says."""
        return self._message

    def code(self) -> int:
        """Return its code."""
        return self._code


class FakeResponse:
    """An ``InferenceResponse``."""

    def __init__(
        self, output_tensors: Sequence[FakeTensor] = (), error: FakeError | None = None
    ) -> None:
        self.tensors = {tensor.name(): tensor.as_numpy() for tensor in output_tensors}
        self.error = error

    @property
    def texts(self) -> list[str]:
        """What ``text_output`` says, a text per row."""
        return [value.decode() for value in self.tensors["text_output"].reshape(-1)]


class FakeLogger:
    """Triton's log, kept."""

    def __init__(self) -> None:
        self.errors: list[str] = []

    def log_error(self, message: str) -> None:
        """Keep an error."""
        self.errors.append(message)


class FakeMetric:
    """A metric, with its value."""

    def __init__(self) -> None:
        self.value = 0.0

    def increment(self, amount: float) -> None:
        """Add to the value."""
        self.value += amount

    def set(self, value: float) -> None:
        """Set the value."""
        self.value = value


class FakeMetricFamily:
    """A family that keeps the last metric made of it."""

    COUNTER = 0
    GAUGE = 1

    def __init__(self, name: str, description: str, kind: int) -> None:
        self.name, self.description, self.kind = name, description, kind
        self.metric = FakeMetric()

    def Metric(self, labels: Mapping[str, str]) -> FakeMetric:
        """Make a metric."""
        del labels
        return self.metric


class FakeBackendUtils:
    """Stands for the module ``triton_python_backend_utils``."""

    TRITONSERVER_RESPONSE_COMPLETE_FINAL = 1
    TRITONSERVER_REQUEST_RELEASE_RESCHEDULE = 4
    Tensor = FakeTensor
    TritonError = FakeError
    InferenceResponse = FakeResponse
    MetricFamily = FakeMetricFamily

    def __init__(self) -> None:
        self.Logger = FakeLogger()


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
        self._inputs = [FakeTensor(name, _array(values)) for name, values in inputs.items()]
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
        self._inputs.append(FakeTensor(name, _array(values)))

    def flags(self) -> int:
        """Return the sequence's flags: 1 starts, 2 ends."""
        return self._flags

    def set_release_flags(self, flags: int) -> None:
        """Give the request back to be scheduled again."""
        self.rescheduled = flags == FakeBackendUtils.TRITONSERVER_REQUEST_RELEASE_RESCHEDULE

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


def _array(values: Any) -> npt.NDArray[Any]:
    if isinstance(values, np.ndarray):
        return values
    rows = [value.encode() if isinstance(value, str) else value for value in values]
    kind: Any = np.object_ if rows and isinstance(rows[0], bytes) else None
    return np.array(rows, dtype=kind).reshape(len(rows), 1)
