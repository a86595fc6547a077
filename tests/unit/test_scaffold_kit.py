"""The kit's fakes: what a runtime class can do with them, and what they keep of it."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
import pytest

from llmserve.errors import RequestRejectedError, RequestTimeoutError
from llmserve.runtime.batch import BatchDriver
from llmserve.runtime.generation import Generation
from llmserve.runtime.protocols import Answer, Tokenizer, strings
from llmserve.testing import (
    ByteTokenizer,
    FakeBackendUtils,
    FakeRequest,
    FakeResponse,
    FakeTensor,
    RecipeConformance,
    make_parts,
)
from llmserve.testing.checks import Failures


class Echo:
    context_length: int | None = 100
    eos_ids: frozenset[int] = frozenset()

    def generate(self, generations: Sequence[Generation], tokenizer: Tokenizer) -> None:
        for generation in generations:
            for token in generation.prompt_ids * generation.max_tokens:
                generation.push(token)


class Upper(ByteTokenizer):
    def decode(self, ids: Sequence[int]) -> str:
        return super().decode(ids).upper()


class Short:
    def format(self, answers: Sequence[Answer]) -> dict[str, npt.NDArray[Any]]:
        return {"text_output": strings([answer.text[:2] for answer in answers])}


def answered(request: FakeRequest, **changes: Any) -> FakeRequest:
    driver = BatchDriver({}, Path())
    driver.start(make_parts(Echo(), **changes))
    driver.execute([request])
    return request


def test_every_part_can_be_ones_own() -> None:
    request = FakeRequest({"text_input": ["ab"]})
    answered(request, tokenizer=Upper(), formatter=Short(), max_tokens=6)
    assert request.responses[-1].texts == ["AB"]


def test_a_model_can_be_without_a_batch_dimension() -> None:
    request = answered(FakeRequest({"text_input": ["ab"]}), batched=False)
    assert request.responses[-1].tensors["text_output"].shape == (1,)


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


def test_what_is_told_is_kept() -> None:
    log = FakeBackendUtils().Logger
    log.log_error("e")
    log.log_warn("w")
    log.log_info("i")
    log.log_verbose("v")
    assert (log.errors, log.warnings, log.infos) == (["e"], ["w"], ["i", "v"])


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


def test_an_unknown_recipe_is_told_by_its_name() -> None:
    given: Mapping[str, Any] = {"a": 1}
    with pytest.raises(pytest.fail.Exception) as caught:
        Failures("nobody", given).expect("x" * 400, "y", promise="p", roles=["generator"])
    lines = str(caught.value).splitlines()
    assert lines[0] == "recipe 'nobody' with a=1 breaks a promise: p"
    assert lines[1].endswith("x… (400 characters)")
    assert lines[2] == "  got:      y"
    assert "no plugin is called 'nobody'" in lines[3]


def test_promises_that_are_kept_say_nothing() -> None:
    failures = Failures("nobody", {})
    failures.expect(1, 1, promise="p", roles=[])
    failures.expect_each(["a", "b"], [1, 2], [1, 2], promise="p", roles=[])
    with pytest.raises(pytest.fail.Exception, match=r"p \(prompt 'b'\)"):
        failures.expect_each(["a", "b"], [1, 2], [1, 3], promise="p", roles=[])
    with pytest.raises(pytest.fail.Exception, match="one each"):
        failures.expect_each(["a", "b"], [1, 2], [1], promise="p", roles=[])


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


def test_a_failure_says_which_components_to_look_at() -> None:
    with pytest.raises(pytest.fail.Exception) as caught:
        Failures("hf", {}).fail("a", "b", promise="p", roles=("generator", "formatter"))
    told = str(caught.value)
    assert "look at:  generator 'transformers', llmserve_hf." in told
    assert "look at:  formatter 'text', llmserve.runtime.text_formatter:TextFormatter" in told
