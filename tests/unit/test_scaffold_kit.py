"""The kit's fakes: what a runtime class can do with them, and what they keep of it."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest

from llmserve.errors import RequestRejectedError, RequestTimeoutError
from llmserve.testing import (
    FakeBackendUtils,
    FakeRequest,
    FakeResponse,
    FakeTensor,
    RecipeConformance,
)


def test_a_request_is_as_triton_hands_it_over() -> None:
    pb = FakeBackendUtils()
    request = FakeRequest({"text_input": ["ab", "é"]}, sequence=7, flags=1, max_tokens=4)
    tensor = pb.get_input_tensor_by_name(request, "text_input")
    assert tensor is not None
    assert tensor.as_numpy().tolist() == [[b"ab"], ["é".encode()]]
    assert pb.get_input_tensor_by_name(request, "other") is None
    assert request.correlation_id() == 7
    assert request.flags() & pb.TRITONSERVER_REQUEST_FLAG_SEQUENCE_START
    assert not request.flags() & pb.TRITONSERVER_REQUEST_FLAG_SEQUENCE_END
    assert (request.request_id(), request.requested_output_names()) == ("", [])


def doubled(asked: Any) -> FakeResponse:
    (tensor,) = asked.inputs()
    return FakeResponse([FakeTensor("OUT", 2 * tensor.as_numpy())])


def counted(asked: Any) -> Iterator[FakeResponse]:
    for number in range(int(asked.inputs()[0].as_numpy()[0])):
        yield FakeResponse([FakeTensor("OUT", np.array([number]))])


@pytest.fixture
def pb() -> FakeBackendUtils:
    return FakeBackendUtils(models={"doubled": doubled, "counted": counted})


def ask(pb: FakeBackendUtils, model: str) -> Any:
    tensor = pb.Tensor("IN", np.array([3]))
    return pb.InferenceRequest(
        model_name=model, inputs=[tensor], requested_output_names=["OUT"], request_id="1"
    )


def value(pb: FakeBackendUtils, reply: Any) -> int:
    tensor = pb.get_output_tensor_by_name(reply, "OUT")
    assert tensor is not None
    return int(tensor.as_numpy()[0])


def test_another_model_answers_from_inside(pb: FakeBackendUtils) -> None:
    reply = ask(pb, "doubled").exec()
    assert not reply.has_error()
    assert value(pb, reply) == 6
    assert pb.get_output_tensor_by_name(reply, "IN") is None


def test_another_model_streams_from_inside(pb: FakeBackendUtils) -> None:
    replies = ask(pb, "counted").exec(decoupled=True)
    assert [value(pb, reply) for reply in replies] == [0, 1, 2]


def test_another_model_is_asked_from_a_coroutine(pb: FakeBackendUtils) -> None:
    assert value(pb, asyncio.run(ask(pb, "doubled").async_exec())) == 6


def test_a_model_that_is_not_there_is_an_error(pb: FakeBackendUtils) -> None:
    reply = ask(pb, "gone").exec()
    assert reply.has_error()
    assert "'gone'" in reply.error().message()


@pytest.mark.parametrize(
    ("answer", "skips"),
    [
        (RequestTimeoutError("no answer within 5 s"), True),
        (RequestRejectedError("over the model's context of 64"), False),
    ],
)
def test_the_end_of_a_context_is_tested_where_there_is_one(answer: Exception, skips: bool) -> None:
    asked: list[dict[str, Any]] = []

    class Client:
        def generate(self, name: str, prompt: str, **options: Any) -> None:
            asked.append(options)
            raise answer

    class Suite(RecipeConformance):
        recipe = "acme"
        _unlimited: ClassVar[dict[str, bool]] = {}

    live: Any = SimpleNamespace(client=Client())
    for _ in range(2):
        with pytest.raises(pytest.skip.Exception) if skips else nullcontext():
            Suite()._needs_context(live, "acme-0")
    assert len(asked) == 1, "it takes seconds, so it is found out once"
    assert asked[0]["timeout"] < 10
