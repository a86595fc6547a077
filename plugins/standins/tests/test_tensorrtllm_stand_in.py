"""Tests of the stand-in for TensorRT-LLM's backend, with a scripted model."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from llmserve.runtime import RequestError
from llmserve.testing import FakeBackendUtils, FakeRequest
from llmserve_standins.tensorrtllm import model as backend
from llmserve_standins.tensorrtllm.model import TritonPythonModel
from llmserve_standins.tensorrtllm.request import IdTokenizer, PendingRequest, TokenSequence
from llmserve_standins.tensorrtllm.settings import Settings

CONFIG: dict[str, Any] = {
    "max_batch_size": 4,
    "model_transaction_policy": {"decoupled": True},
    "output": [
        {"name": "output_ids", "data_type": "TYPE_INT32", "dims": ["-1", "-1"]},
        {"name": "sequence_length", "data_type": "TYPE_INT32", "dims": ["-1"]},
        {"name": "cum_log_probs", "data_type": "TYPE_FP32", "dims": ["-1"]},
        {"name": "batch_index", "data_type": "TYPE_INT32", "dims": ["1"]},
        {"name": "sequence_index", "data_type": "TYPE_INT32", "dims": ["1"]},
        {"name": "num_input_tokens", "data_type": "TYPE_INT32", "dims": ["1"]},
    ],
    "parameters": {
        "gpt_model_type": {"string_value": "inflight_fused_batching"},
        "gpt_model_path": {"string_value": "/engine"},
        "exclude_input_in_output": {"string_value": "true"},
        "llmserve.stand_in": {"string_value": '{"demo": true}'},
    },
}


def settings(**changes: Any) -> Settings:
    parameters = {**CONFIG["parameters"], **changes.pop("parameters", {})}
    return Settings("engine", {**CONFIG, "parameters": parameters, **changes})


def test_the_backends_configuration_is_read() -> None:
    default = settings()
    assert (default.static, default.decoupled, default.excludes_input) == (False, True, True)
    assert settings(parameters={"gpt_model_type": {"string_value": "V1"}}).static


def started(configured: Settings, pb: FakeBackendUtils | None = None) -> TritonPythonModel:
    stand_in = TritonPythonModel()
    stand_in.start(configured, pb or FakeBackendUtils())
    return stand_in


def tensors(*names: str) -> list[dict[str, Any]]:
    return [{"name": name, "data_type": "TYPE_INT32", "dims": ["1"]} for name in names]


def test_a_handmade_model_is_refused_with_the_missing_parameter() -> None:
    with pytest.raises(RuntimeError, match="does not know which model the engine was built from"):
        settings(parameters={"llmserve.stand_in": {"string_value": ""}})


@pytest.mark.parametrize(
    ("missing", "inputs"),
    [
        ("gpt_model_type", ()),
        ("gpt_model_path", ()),
        ("tokenizer_dir", ("guided_decoding_guide",)),
        ("xgrammar_tokenizer_info_path", ("guided_decoding_guide",)),
        ("guided_decoding_backend", ("guided_decoding_guide",)),
    ],
)
def test_parameters_that_the_real_backend_reads_without_a_default_are_required(
    missing: str, inputs: tuple[str, ...]
) -> None:
    names = ("tokenizer_dir", "xgrammar_tokenizer_info_path", "guided_decoding_backend")
    parameters = {**CONFIG["parameters"], **{name: {"string_value": ""} for name in names}}
    config = {**CONFIG, "parameters": parameters, "input": tensors(*inputs)}
    Settings("engine", config)
    del parameters[missing]
    with pytest.raises(RuntimeError, match=f"Cannot find parameter with name: {missing}"):
        Settings("engine", config)


def test_values_that_the_real_backend_does_not_support_are_refused() -> None:
    with pytest.raises(RuntimeError, match="cannot be 'V2': choose one of"):
        settings(parameters={"gpt_model_type": {"string_value": "V2"}})
    v1 = {"gpt_model_type": {"string_value": "V1"}}
    with pytest.raises(RuntimeError, match="do not run static batches"):
        settings(parameters=v1, input=tensors("seed"))


def inputs_of(ids: list[int], length: int = 4, **extra: Any) -> dict[str, Any]:
    return {
        "input_ids": np.array([ids], np.int32),
        "input_lengths": np.array([[len(ids)]], np.int32),
        "request_output_len": np.array([[length]], np.int32),
        **{name: np.array(value) for name, value in extra.items()},
    }


def rows(**extra: Any) -> list[TokenSequence]:
    return sequences(inputs_of([1, 2, 3], **extra), 16)


def sequences(tensors: dict[str, Any], context: int) -> list[TokenSequence]:
    request = PendingRequest(FakeRequest(tensors), settings(), FakeBackendUtils())
    request.read(context)
    return request.rows


def test_options_are_read_from_the_backends_tensors() -> None:
    row = rows(
        end_id=[[9]], temperature=[[0.5]], runtime_top_k=[[0]], runtime_top_p=[[0.75]],
        random_seed=np.array([[7]], np.uint64), min_length=[[2]],
        bad_words_list=[[[5, 6, 7], [2, 3, -1]]],
    )[0]  # fmt: skip
    assert row.prompt_ids == [1, 2, 3]
    assert (
        row.generation.params.temperature,
        row.generation.params.top_p,
        row.generation.params.seed,
    ) == (0.5, 0.75, 7)
    assert (row.generation.params.min_tokens, row.generation.eos_ids) == (2, frozenset({9}))
    assert [IdTokenizer().encode(word) for word in row.generation.params.bad_words] == [[5, 6], [7]]


@pytest.mark.parametrize("extra", [{}, {"runtime_top_k": [[1]], "temperature": [[1.0]]}])
def test_decoding_is_greedy_by_default(extra: dict[str, Any]) -> None:
    assert rows(**extra)[0].generation.params.effective_temperature == 0


@pytest.mark.parametrize("end", [-1, 2**32 - 1])
def test_an_end_id_that_no_token_has_means_no_end(end: int) -> None:
    assert rows(end_id=[[end]])[0].generation.eos_ids == frozenset()


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ({"lora_task_id": [[1]]}, "does not support lora_task_id"),
        ({"embedding_bias": [[0.5]]}, "does not support embedding_bias"),
        ({"beam_width": [[2]]}, "only beam_width 1"),
        ({"return_log_probs": [[True]]}, "only return_log_probs false"),
        ({"length": 14}, "the engine's context of 16"),
        ({"length": 0}, "request_output_len 0"),
    ],
)
def test_unsupported_requests_are_refused(extra: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        rows(**extra)


def test_the_token_that_ends_an_answer_is_withheld_and_a_stop_word_is_sent() -> None:
    ended = rows(end_id=[[9]])[0]
    for token in (5, 9):
        ended.generation.push(token)
    assert (ended.generation.finish_reason, ended.take_ids(), ended.take_ids()) == ("stop", [5], [])
    stopped = rows(stop_words_list=[[[6, 7], [2, -1]]])[0]
    for token in (5, 6, 7):
        stopped.generation.push(token)
    assert (stopped.generation.finish_reason, stopped.take_ids()) == ("stop", [5, 6, 7])


class CountingModel:
    """Answers every prompt with 10, 11, 12 …; the test must release each token."""

    def __init__(self) -> None:
        self.tokens = threading.Semaphore(0)
        self.generated = 0

    def next_logits(self, model: Any, row: TokenSequence) -> Any:
        del model
        self.tokens.acquire()
        self.generated += 1
        logits = np.zeros(64, np.float32)
        logits[10 + len(row.generation.token_ids)] = 1
        return logits


@pytest.fixture
def counting(monkeypatch: pytest.MonkeyPatch) -> Iterator[CountingModel]:
    model = CountingModel()
    monkeypatch.setattr(backend, "load_model", lambda _: None)
    monkeypatch.setattr(backend, "context_length", lambda _: 16)
    monkeypatch.setattr(backend, "next_logits", model.next_logits)
    yield model
    model.tokens.release(1000)


class Request(FakeRequest):
    def __init__(self, length: int, request_id: str = "", **extra: Any) -> None:
        super().__init__(inputs_of([1, 2], length, **extra))
        self.id = request_id

    def request_id(self) -> str:
        return self.id

    @property
    def ids(self) -> list[int]:
        return [i for r in self.responses for i in r.tensors["output_ids"].reshape(-1).tolist()]


def refusal(request: Request) -> str:
    error = request.responses[0].error
    assert error is not None
    return str(error.message())


def wait_until(condition: Any) -> None:
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_in_flight_a_request_joins_between_two_steps(counting: CountingModel) -> None:
    stand_in = started(settings(), pb := FakeBackendUtils())
    long, short = Request(4, streaming=[[True]]), Request(1)
    stand_in.execute([long])
    counting.tokens.release()
    wait_until(lambda: long.ids == [10])
    stand_in.execute([short])
    counting.tokens.release(3)
    wait_until(lambda: short.closed)
    assert short.ids == [10]
    assert not long.closed
    counting.tokens.release(8)
    wait_until(lambda: long.closed)
    assert long.ids == [10, 11, 12, 13]
    stand_in.finalize()
    assert any("stand-in for TensorRT-LLM" in line for line in pb.Logger.warnings)


def test_an_error_in_a_step_fails_its_request_and_not_the_thread(
    counting: CountingModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    stand_in = started(settings())
    with monkeypatch.context() as patched:
        patched.setattr(TokenSequence, "take_ids", lambda _: 1 // 0)
        failed = Request(1)
        stand_in.execute([failed])
        counting.tokens.release()
        wait_until(lambda: failed.closed)
    assert "ZeroDivisionError" in refusal(failed)
    stand_in.execute([request := Request(1)])
    counting.tokens.release()
    wait_until(lambda: request.closed)
    assert request.ids == [10]
    stand_in.finalize()


def static() -> TritonPythonModel:
    v1 = {"gpt_model_type": {"string_value": "V1"}}
    return started(settings(parameters=v1))


def test_a_static_batch_runs_to_its_end_before_the_next(counting: CountingModel) -> None:
    """Triton may pass requests one by one: the backend combines them into batches."""
    stand_in = static()
    batch, late = [Request(3), Request(1)], [Request(1) for _ in range(5)]
    stand_in.execute(batch)
    counting.tokens.release(2)
    wait_until(lambda: batch[1].closed)
    for request in late:
        stand_in.execute([request])
    counting.tokens.release()
    # There is room for them, but they must wait for the batch.
    wait_until(lambda: counting.generated == 3)
    assert not any(request.closed for request in (batch[0], *late))
    counting.tokens.release()
    wait_until(lambda: batch[0].closed)
    # Four requests fit into the next batch.
    counting.tokens.release(4)
    wait_until(lambda: sum(request.closed for request in late) == 4)
    counting.tokens.release()
    wait_until(lambda: late[4].closed)
    assert [request.ids for request in (*batch, late[0])] == [[10, 11, 12], [10], [10]]
    stand_in.finalize()


@pytest.mark.parametrize("decoupled", [True, False])
def test_a_request_with_stop_ends_the_request_with_its_id(
    counting: CountingModel, decoupled: bool
) -> None:
    """It gets a single empty response, so an engine that does not stream supports it as well."""
    policy = {"decoupled": decoupled}
    stand_in = started(settings(model_transaction_policy=policy))
    long = Request(8, "mine")
    stand_in.execute([long])
    counting.tokens.release()
    stopping, without_id = Request(1, "mine", stop=[[True]]), Request(1, stop=[[True]])
    stand_in.execute([stopping, without_id])
    assert stopping.closed
    assert [(r.error, r.tensors) for r in stopping.responses] == [(None, {})]
    assert "request ID is not provided" in refusal(without_id)
    counting.tokens.release(2)
    wait_until(lambda: long.closed)
    assert len(long.ids) < 4
    stand_in.finalize()


def test_only_requested_outputs_are_sent(counting: CountingModel) -> None:
    stand_in = started(settings())
    plain = Request(2, exclude_input_in_output=[[False]])
    counted = Request(2, return_num_input_tokens=[[True]])
    counting.tokens.release(8)
    for request in (plain, counted):
        stand_in.execute([request])
        wait_until(lambda request=request: request.closed)
    assert plain.responses[0].tensors.keys() == {"output_ids", "sequence_length"}
    assert plain.ids == [1, 2, 10, 11]
    assert counted.responses[0].tensors["num_input_tokens"].tolist() == [[2]]
    stand_in.finalize()


def test_before_0_14_every_score_is_0(counting: CountingModel) -> None:
    outputs = [output for output in CONFIG["output"] if output["name"] != "sequence_index"]
    stand_in = started(settings(output=outputs))
    request = Request(1)
    counting.tokens.release(4)
    stand_in.execute([request])
    wait_until(lambda: request.closed)
    assert request.responses[0].tensors["cum_log_probs"].tolist() == [[0.0]]
    stand_in.finalize()


def test_a_stream_never_has_the_prompt(counting: CountingModel) -> None:
    excludes = {"exclude_input_in_output": {"string_value": "false"}}
    stand_in = started(settings(parameters=excludes))
    stream, whole = Request(2, streaming=[[True]]), Request(2)
    counting.tokens.release(8)
    stand_in.execute([stream, whole])
    wait_until(lambda: stream.closed and whole.closed)
    assert stream.ids == [10, 11]
    assert whole.ids == [1, 2, 10, 11]
    stand_in.finalize()


def test_an_engine_that_does_not_stream_refuses_streams(counting: CountingModel) -> None:
    policy = {"decoupled": False}
    stand_in = started(settings(model_transaction_policy=policy))
    request = Request(2, streaming=[[True]])
    stand_in.execute([request])
    assert "only supported where the model is decoupled" in refusal(request)
    stand_in.finalize()


def test_0_5_0_accepts_no_request_id_twice_at_once(counting: CountingModel) -> None:
    outputs = [output for output in CONFIG["output"] if output["name"] == "output_ids"]
    stand_in = started(settings(output=outputs))
    first, same, word = Request(1, "7"), Request(1, "7"), Request(1, "seven")
    stand_in.execute([first])
    stand_in.execute([same, word])
    assert "requestId 7 is already in progress" in refusal(same)
    assert "must be uint64_t. Got seven" in refusal(word)
    counting.tokens.release(4)
    wait_until(lambda: first.closed)
    again = Request(1, "7")
    stand_in.execute([again])
    wait_until(lambda: again.closed)
    assert again.responses[0].error is None
    stand_in.finalize()


def old_settings() -> Settings:
    """Return the settings of an engine of 0.5.0, which returns no lengths."""
    return settings(output=[CONFIG["output"][0]])


def test_0_5_0_runs_no_request_with_both_penalties(counting: CountingModel) -> None:
    stand_in = started(old_settings())
    penalties: dict[str, Any] = {"presence_penalty": [[0.5]], "repetition_penalty": [[1.0]]}
    fine, both = Request(1, presence_penalty=[[0.5]]), Request(1, **penalties)
    stand_in.execute([fine, both])
    assert "presence_penalty and repetition_penalty which are mutually exclusive" in refusal(both)
    counting.tokens.release()
    wait_until(lambda: fine.closed)
    stand_in.finalize()


def test_0_5_0_pads_a_whole_answer_and_no_piece_of_a_stream(counting: CountingModel) -> None:
    stand_in = started(old_settings())
    ends: dict[str, Any] = {"end_id": [[11]]}
    stand_in.execute(
        [stream := Request(4, streaming=[[True]], **ends), whole := Request(4, **ends)]
    )
    counting.tokens.release(100)
    wait_until(lambda: stream.closed and whole.closed)
    assert [i for i in stream.ids if i != 11] == [10]
    assert len(stream.ids) < 3
    assert whole.ids == [10, 11, 11, 11, 11, 11]
    stand_in.finalize()


def test_a_row_that_has_ended_makes_room_for_another(counting: CountingModel) -> None:
    """A batch has places for rows, not for requests."""
    stand_in = started(settings(max_batch_size=2))
    two: dict[str, Any] = {"input_ids": [[1, 2], [1, 2]], "input_lengths": [[2], [2]]}
    pair, single = Request(4, **two, request_output_len=[[4], [1]]), Request(1)
    stand_in.execute([pair, single])
    counting.tokens.release(2)
    wait_until(lambda: counting.generated == 2)
    counting.tokens.release(2)
    wait_until(lambda: single.closed)
    assert not pair.closed
    counting.tokens.release(100)
    wait_until(lambda: pair.closed)
    stand_in.finalize()


def test_it_generates_the_same_tokens_as_generate() -> None:
    import torch

    model = backend.load_model(settings())
    for ids in ([70, 80, 90], [400, 5], [33]):
        row = sequences(inputs_of(ids, 12, end_id=[[0]]), 512)[0]
        while not row.done:
            row.generation.push(row.sampler.choose(backend.next_logits(model, row)))
        expected = model.generate(torch.tensor([ids]), max_new_tokens=12, do_sample=False)
        assert row.generation.token_ids == expected[0, len(ids) :].tolist()
