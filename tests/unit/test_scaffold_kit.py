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


def test_another_model_is_asked_from_inside() -> None:
    def doubled(asked: Any) -> FakeResponse:
        (tensor,) = asked.inputs()
        return FakeResponse([FakeTensor("OUT", 2 * tensor.as_numpy())])

    def counted(asked: Any) -> Iterator[FakeResponse]:
        for number in range(int(asked.inputs()[0].as_numpy()[0])):
            yield FakeResponse([FakeTensor("OUT", np.array([number]))])

    pb = FakeBackendUtils(models={"doubled": doubled, "counted": counted})

    def ask(model: str) -> Any:
        tensor = pb.Tensor("IN", np.array([3]))
        return pb.InferenceRequest(
            model_name=model, inputs=[tensor], requested_output_names=["OUT"], request_id="1"
        )

    def value(reply: Any) -> int:
        tensor = pb.get_output_tensor_by_name(reply, "OUT")
        assert tensor is not None
        return int(tensor.as_numpy()[0])

    assert value(ask("doubled").exec()) == value(asyncio.run(ask("doubled").async_exec())) == 6
    assert [value(reply) for reply in ask("counted").exec(decoupled=True)] == [0, 1, 2]
    gone = ask("gone").exec()
    assert gone.has_error()
    assert "'gone'" in gone.error().message()
