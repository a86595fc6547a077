"""Log-probabilities: correct values, only on request, for every piece and on the wire."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from tritonclient.grpc import service_pb2

from llmserve.client.messages import pack_texts, read_response
from llmserve.client.results import Completion, Logprob, Piece, gather
from llmserve.repository import config as modelconfig
from llmserve.runtime import contract
from llmserve.runtime.answer import logprobs, next_tokens
from llmserve.runtime.answer.generation import Generation
from llmserve.runtime.errors import RequestError
from llmserve.runtime.protocols import Tokenizer
from llmserve.testing import FakeRequest, fake
from tests.support import drive

INPUTS = tuple(tensor.name for tensor in (*contract.SAMPLING, *contract.LOGPROBS))
LOGITS = np.log(np.arange(1.0, 129.0)).astype(np.float32)
SUM = float(np.arange(1.0, 129.0).sum())


class Alphabet:
    """A generator that answers a, b, c … although the last token has the highest score."""

    context_length: int | None = 100
    eos_ids: frozenset[int] = frozenset()

    def generate(self, generations: list[Generation], tokenizer: Tokenizer) -> None:
        for generation in generations:
            while not generation.done:
                token = ord("a") + len(generation.token_ids)
                generation.push(token, LOGITS if generation.wants_logits else None)


def answer(prompts: list[str], **parameters: Any) -> FakeRequest:
    request = FakeRequest({"text_input": prompts}, **parameters)
    drive(Alphabet(), request, inputs=INPUTS)
    return request


def test_log_probabilities_are_computed_on_request_only() -> None:
    (response,) = answer(["x"]).responses
    assert not {"logprobs", "output_log_probs", "cum_log_probs"} & set(response.tensors)


@pytest.mark.parametrize("parameters", [{"logprobs": 0}, {"return_log_probs": True}])
def test_the_chosen_tokens_log_probabilities(parameters: dict[str, Any]) -> None:
    (response,) = answer(["x"], max_tokens=3, **parameters).responses
    expected = [np.log((token + 1) / SUM) for token in b"abc"]
    assert response.tensors["output_log_probs"].shape == (1, 1, 3)
    assert response.tensors["output_log_probs"].reshape(-1) == pytest.approx(expected, abs=1e-6)
    assert response.tensors["cum_log_probs"].reshape(-1) == pytest.approx([sum(expected)])
    entries = json.loads(response.tensors["logprobs"].reshape(-1)[0])
    assert [entry["token"] for entry in entries] == ["a", "b", "c"]
    assert [entry["id"] for entry in entries] == list(b"abc")
    assert [entry["logprob"] for entry in entries] == pytest.approx(expected, abs=1e-6)
    assert not any("top" in entry for entry in entries)


def test_pieces_have_their_own_log_probabilities_and_running_sums() -> None:
    pieces = answer(["x"], max_tokens=4, stream=True, logprobs=0).responses
    assert len(pieces) == 4
    lists = [json.loads(piece.tensors["logprobs"].reshape(-1)[0]) for piece in pieces]
    assert [[entry["token"] for entry in entries] for entries in lists] == [[c] for c in "abcd"]
    sums = [float(piece.tensors["cum_log_probs"].reshape(-1)[0]) for piece in pieces]
    values = [entry["logprob"] for entries in lists for entry in entries]
    assert sums == pytest.approx(np.cumsum(values), abs=1e-5)


@pytest.mark.parametrize("count", [-1, 21, "many", 1.5])
def test_an_invalid_count_is_refused(count: Any) -> None:
    assert "logprobs" in (answer(["x"], logprobs=count).error or "")


def test_named_texts_have_their_log_probabilities_in_their_order() -> None:
    (response,) = answer(["x"], max_tokens=1, logprobs=0, logprobs_of=["z", "a", "b"]).responses
    (entry,) = json.loads(response.tensors["logprobs"].reshape(-1)[0])
    assert [top["token"] for top in entry["top"]] == ["z", "a", "b"]
    expected = [np.log((token + 1) / SUM) for token in b"zab"]
    assert [top["logprob"] for top in entry["top"]] == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize(
    ("texts", "words"),
    [
        (["a", "bc"], "'bc' is not a token of its own"),
        (["a", "a"], "'a' is not a token of its own"),
    ],
)
def test_a_text_that_is_no_token_is_refused(texts: list[str], words: str) -> None:
    request = answer(["x"], max_tokens=1, logprobs=0, logprobs_of=texts)
    assert request.failure
    assert (request.failure.code, request.failure.param) == ("unsupported_option", "logprobs_of")
    assert words in request.failure.words
    assert "needs logprobs" in (answer(["x"], logprobs_of=["a"]).error or "")


class Joins:
    """A tokenizer of letters that has a token for a space and the letter after it, and for "ab"."""

    eos_ids: frozenset[int] = frozenset()
    _PIECES = (" ", "a", "b", " a", " b", "ab", "<|end|>")

    def encode(self, text: str, *, special: bool = True) -> list[int]:
        ids = []
        while text:
            piece = max((p for p in self._PIECES[:6] if text.startswith(p)), key=len)
            ids.append(self._PIECES.index(piece))
            text = text[len(piece) :]
        return ids

    def encode_chat(self, messages: Any) -> list[int]:
        raise NotImplementedError

    def decode(self, ids: Any) -> str:
        return "".join(self._PIECES[each] for each in ids if each < 6)


def test_a_text_is_the_token_that_it_is_after_the_prompt() -> None:
    tokens_after = next_tokens.tokens_after
    assert tokens_after([2], [" a", "b"], Joins()) == (3, 2)
    # What ends with a special token joins nothing.
    assert tokens_after([1, 6], ["a", "b"], Joins()) == (1, 2)
    # After an a, a b would be no token of its own.
    for ids, text in (([1], "b"), ([0], "a")):
        with pytest.raises(RequestError, match="not a token of its own"):
            tokens_after(ids, [text], Joins())


def test_a_text_that_a_tokenizer_drops_is_no_token() -> None:
    class Drops(Joins):
        def encode(self, text: str, *, special: bool = True) -> list[int]:
            return super().encode(text.replace("\u200b", ""))

    for ids in ([1], [6]):
        with pytest.raises(RequestError, match="not a token of its own"):
            next_tokens.tokens_after(ids, ["\u200b"], Drops())


def test_a_token_without_a_score_is_impossible() -> None:
    found = logprobs.logprob_of(LOGITS, 1, 3, [5, 4000])
    assert [top.token for top in found.top] == [5, 4000]
    assert found.top[1].value == -np.inf


def test_an_impossible_token_can_be_written_as_json() -> None:
    impossible = logprobs.logprob_of(np.array([0.0, -np.inf]), 1, 2)
    (entry,) = json.loads(logprobs.to_json([impossible], {0: "a", 1: "b"}))
    assert (entry["logprob"], entry["top"][0]["logprob"]) == (-9999, 0)


def test_the_client_joins_pieces() -> None:
    first, second = Logprob(5, " a", -0.5, (Logprob(6, " b", -0.25),)), Logprob(7, "c", -1.0)
    pieces = [Piece(" a", logprobs=(first,)), Piece("", logprobs=(second,), finish_reason="stop")]
    assert gather(pieces, 1) == [Completion(" a", "stop", logprobs=(first, second))]
    assert gather([Piece("x")], 1)[0].logprobs is None
    assert Piece("", logprobs=(second,)).is_news


def response_of(text: str) -> Any:
    message = service_pb2.ModelInferResponse(model_name="m")
    for name, value in (("text_output", "hi"), ("logprobs", text)):
        message.outputs.add(name=name, datatype="BYTES", shape=[1, 1])
        message.raw_output_contents.append(pack_texts([value]))
    return message


def test_the_client_reads_what_the_formatter_writes() -> None:
    written = logprobs.Logprob(5, -0.5, (logprobs.Logprob(6, -0.25),))
    (piece,) = read_response(response_of(logprobs.to_json([written], {5: " a", 6: "ü"})), 1)
    assert piece.logprobs == (Logprob(5, " a", -0.5, (Logprob(6, "ü", -0.25),)),)
    assert not piece.extra


@pytest.mark.parametrize("text", ["{", '[{"5": {"rank": 1}}]', "[3]", '[{"id": null}]'])
def test_logprobs_in_the_format_of_other_models_are_left_as_text(text: str) -> None:
    (piece,) = read_response(response_of(text), 1)
    assert piece.logprobs is None
    assert piece.extra == {"logprobs": text}


@pytest.mark.parametrize(("size", "dims"), [(8, [-1, -1]), (0, [-1, -1])])
def test_the_outputs_are_declared_as_tensorrt_llm_declares_them(size: int, dims: list[int]) -> None:
    config = modelconfig.new_config("m", backend="python", max_batch_size=size)
    modelconfig.add_outputs(config, contract.LOGPROBS_OUTPUTS)
    declared = {output.name: list(output.dims) for output in config.output}
    assert declared["output_log_probs"] == dims
    assert declared["cum_log_probs"] == ([1] if size else [-1])


def test_an_engine_that_keeps_its_logits_passes_what_it_has_computed_of_them() -> None:
    def asked() -> Generation:
        return fake.generation([5, 6, 7], 4, logprobs=2, prompt_logprobs=2)

    ours, theirs = asked(), asked()
    for token in (6, 7):
        ours.push_prompt(LOGITS)
        theirs.push_prompt(logprob=logprobs.logprob_of(LOGITS, token, 2))
    for token in (97, 98):
        ours.push(token, LOGITS)
        theirs.push(token, logprob=logprobs.logprob_of(LOGITS, token, 2))
    assert theirs.logprobs == ours.logprobs
    assert theirs.prompt_logprobs[1:] == ours.prompt_logprobs[1:]
    assert theirs.total_logprob == ours.total_logprob
    with pytest.raises(TypeError):
        asked().push_prompt()
    free = fake.generation([5], 4)
    free.push(97, logprob=logprobs.Logprob(97, -1.0))
    assert free.logprobs == [], "nobody asked for them"
