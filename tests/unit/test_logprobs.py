"""Log-probabilities: right numbers, for who asks, piece by piece and on the wire."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from tritonclient.grpc import service_pb2

from llmserve.client.messages import pack_texts, read_response
from llmserve.client.results import Completion, Logprob, Piece, gather
from llmserve.repository import config as modelconfig
from llmserve.runtime import contract, logprobs
from llmserve.runtime.generation import Generation
from llmserve.runtime.protocols import Tokenizer
from llmserve.testing import FakeRequest
from tests.support import drive

INPUTS = tuple(tensor.name for tensor in (*contract.SAMPLING, *contract.LOGPROBS))
LOGITS = np.log(np.arange(1.0, 129.0)).astype(np.float32)
SUM = float(np.arange(1.0, 129.0).sum())


class Alphabet:
    """A generator that says a, b, c … and holds the last token of all the likeliest."""

    context_length: int | None = 100
    eos_ids: frozenset[int] = frozenset()

    def generate(self, generations: list[Generation], tokenizer: Tokenizer) -> None:
        for generation in generations:
            while not generation.done:
                token = ord("a") + len(generation.token_ids)
                generation.push(token, LOGITS if generation.wants_logits else None)


def answered(prompts: list[str], **asked: Any) -> FakeRequest:
    request = FakeRequest({"text_input": prompts}, **asked)
    drive(Alphabet(), request, inputs=INPUTS)
    return request


def test_nobody_pays_for_what_nobody_asked() -> None:
    (response,) = answered(["x"]).responses
    assert not {"logprobs", "output_log_probs", "cum_log_probs"} & set(response.tensors)


@pytest.mark.parametrize("asked", [{"logprobs": 0}, {"return_log_probs": True}])
def test_the_chosen_tokens_log_probabilities(asked: dict[str, Any]) -> None:
    (response,) = answered(["x"], max_tokens=3, **asked).responses
    expected = [np.log((token + 1) / SUM) for token in b"abc"]
    assert response.tensors["output_log_probs"].shape == (1, 1, 3)
    assert response.tensors["output_log_probs"].reshape(-1) == pytest.approx(expected, abs=1e-6)
    assert response.tensors["cum_log_probs"].reshape(-1) == pytest.approx([sum(expected)])
    told = json.loads(response.tensors["logprobs"].reshape(-1)[0])
    assert [entry["token"] for entry in told] == ["a", "b", "c"]
    assert [entry["id"] for entry in told] == list(b"abc")
    assert [entry["logprob"] for entry in told] == pytest.approx(expected, abs=1e-6)
    assert not any("top" in entry for entry in told)


def test_pieces_have_their_own_and_sum_up() -> None:
    pieces = answered(["x"], max_tokens=4, stream=True, logprobs=0).responses
    assert len(pieces) == 4
    told = [json.loads(piece.tensors["logprobs"].reshape(-1)[0]) for piece in pieces]
    assert [[entry["token"] for entry in piece] for piece in told] == [["a"], ["b"], ["c"], ["d"]]
    sums = [float(piece.tensors["cum_log_probs"].reshape(-1)[0]) for piece in pieces]
    each = [entry["logprob"] for piece in told for entry in piece]
    assert sums == pytest.approx(np.cumsum(each), abs=1e-5)


@pytest.mark.parametrize("count", [-1, 21, "many", 1.5])
def test_a_number_that_cannot_be_meant_is_refused(count: Any) -> None:
    assert "logprobs" in (answered(["x"], logprobs=count).error or "")


def test_what_was_impossible_can_be_written_down() -> None:
    found = logprobs.logprob_of(np.array([0.0, -np.inf]), 1, 2)
    (entry,) = json.loads(logprobs.to_json([found], {0: "a", 1: "b"}))
    assert (entry["logprob"], entry["top"][0]["logprob"]) == (-9999, 0)


def test_the_client_puts_pieces_together() -> None:
    one, two = Logprob(5, " a", -0.5, (Logprob(6, " b", -0.25),)), Logprob(7, "c", -1.0)
    pieces = [Piece(" a", logprobs=(one,)), Piece("", logprobs=(two,), finish_reason="stop")]
    assert gather(pieces, 1) == [Completion(" a", "stop", logprobs=(one, two))]
    assert gather([Piece("x")], 1)[0].logprobs is None
    assert Piece("", logprobs=(two,)).is_news


def response_of(text: str) -> Any:
    message = service_pb2.ModelInferResponse(model_name="m")
    for name, value in (("text_output", "hi"), ("logprobs", text)):
        message.outputs.add(name=name, datatype="BYTES", shape=[1, 1])
        message.raw_output_contents.append(pack_texts([value]))
    return message


def test_the_client_reads_what_the_formatter_writes() -> None:
    made = logprobs.Logprob(5, -0.5, (logprobs.Logprob(6, -0.25),))
    (piece,) = read_response(response_of(logprobs.to_json([made], {5: " a", 6: "ü"})), 1)
    assert piece.logprobs == (Logprob(5, " a", -0.5, (Logprob(6, "ü", -0.25),)),)
    assert not piece.extra


@pytest.mark.parametrize("text", ["{", '[{"5": {"rank": 1}}]', "[3]", '[{"id": null}]'])
def test_what_other_models_call_so_is_left_as_it_is(text: str) -> None:
    (piece,) = read_response(response_of(text), 1)
    assert piece.logprobs is None
    assert piece.extra == {"logprobs": text}


@pytest.mark.parametrize(("size", "dims"), [(8, [-1, -1]), (0, [-1, -1])])
def test_the_outputs_are_declared_as_tensorrt_llm_declares_them(size: int, dims: list[int]) -> None:
    config = modelconfig.new_config("m", backend="python", max_batch_size=size)
    modelconfig.add_outputs(config, contract.LOGPROBS_OUTPUTS)
    found = {output.name: list(output.dims) for output in config.output}
    assert found["output_log_probs"] == dims
    assert found["cum_log_probs"] == ([1] if size else [-1])
