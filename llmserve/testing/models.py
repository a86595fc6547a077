"""Requests from one model to another of the same server, answered by functions of a test."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from llmserve.testing.values import FakeError, FakeResponse, FakeTensor

Answers = Callable[["FakeInferenceRequest"], "FakeResponse | Iterable[FakeResponse]"]
"""What another model does: one response, or several if it streams."""


class FakeReply:
    """A response as the model that asked sees it."""

    def __init__(self, response: FakeResponse) -> None:
        self._response = response

    def output_tensors(self) -> list[FakeTensor]:
        """Return the outputs."""
        return [FakeTensor(name, values) for name, values in self._response.tensors.items()]

    def has_error(self) -> bool:
        """Say whether it is an error."""
        return self._response.error is not None

    def error(self) -> FakeError | None:
        """Return the error, None if there is none."""
        return self._response.error


class FakeInferenceRequest:
    """An ``InferenceRequest``."""

    def __init__(
        self,
        models: Mapping[str, Answers],
        model_name: str,
        inputs: Sequence[FakeTensor],
        *,
        requested_output_names: Sequence[str] = (),
        **asked: Any,
    ) -> None:
        self._models = models
        self.name = model_name
        self.wanted = list(requested_output_names)
        self.asked = asked
        self._inputs = list(inputs)

    def inputs(self) -> list[FakeTensor]:
        """Return the inputs."""
        return self._inputs

    def exec(self, decoupled: bool = False) -> Any:
        """Ask the model: a reply, or an iterator of them if it is said to be decoupled."""
        replies = self._replies()
        return replies if decoupled else next(replies)

    async def async_exec(self, decoupled: bool = False) -> Any:
        """Ask the model from a coroutine."""
        return self.exec(decoupled)

    def _replies(self) -> Iterator[FakeReply]:
        answers = self._models.get(self.name)
        if answers is None:
            told = f"Failed for execute the inference request. Model '{self.name}' is not ready."
            yield FakeReply(FakeResponse(error=FakeError(told)))
            return
        given = answers(self)
        for response in [given] if isinstance(given, FakeResponse) else given:
            yield FakeReply(response)
