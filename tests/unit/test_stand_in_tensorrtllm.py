"""The stand-in for TensorRT-LLM's backend, with a script in place of a model."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from llmserve.runtime.errors import RequestError
from llmserve.runtime.generation import Generation
from llmserve.server.backends.tensorrtllm import backend
from llmserve.server.backends.tensorrtllm.backend import StandIn
from llmserve.server.backends.tensorrtllm.plain import Progress
from llmserve.server.backends.tensorrtllm.reading import read_rows
from llmserve.server.backends.tensorrtllm.settings import Settings
from llmserve.server.backends.tensorrtllm.tokens import IdTokenizer, Tokens
from llmserve.testing import FakeBackendUtils, FakeRequest

CONFIG: dict[str, Any] = {
    "max_batch_size": 4,
    "model_transaction_policy": {"decoupled": True},
    "output": [
        {"name": "output_ids", "data_type": "TYPE_INT32", "dims": ["-1", "-1"]},
        {"name": "sequence_length", "data_type": "TYPE_INT32", "dims": ["-1"]},
        {"name": "cum_log_probs", "data_type": "TYPE_FP32", "dims": ["-1"]},
    ],
    "parameters": {
        "gpt_model_type": {"string_value": "inflight_fused_batching"},
        "exclude_input_in_output": {"string_value": "true"},
        "llmserve.stand_in": {"string_value": '{"demo": true}'},
    },
}


def settings(**changes: Any) -> Settings:
    parameters = {**CONFIG["parameters"], **changes.pop("parameters", {})}
    return Settings.read("engine", {**CONFIG, "parameters": parameters, **changes})


def test_its_configuration_is_the_backends() -> None:
    found = settings(parameters={"max_tokens_in_paged_kv_cache": {"string_value": "4096"}})
    assert (found.static, found.decoupled, found.excludes_input) == (False, True, True)
    assert found.cache_tokens == 4096
    assert settings(parameters={"gpt_model_type": {"string_value": "V1"}}).static


def test_a_model_made_by_hand_is_told_what_the_stand_in_lacks() -> None:
    with pytest.raises(RuntimeError, match="does not know which model the engine was built from"):
        Settings.read("engine", {**CONFIG, "parameters": {}})


def given(ids: list[int], length: int = 4, **more: Any) -> dict[str, Any]:
    return {
        "input_ids": np.array([ids], np.int32),
        "input_lengths": np.array([[len(ids)]], np.int32),
        "request_output_len": np.array([[length]], np.int32),
        **{name: np.array(value) for name, value in more.items()},
    }


def rows(**more: Any) -> list[Tokens]:
    return read_rows(given([1, 2, 3], **more), 16, lambda: False)


def test_wishes_are_read_from_the_backends_tensors() -> None:
    row = rows(
        end_id=[[9]], temperature=[[0.5]], runtime_top_k=[[0]], runtime_top_p=[[0.75]],
        random_seed=np.array([[7]], np.uint64), min_length=[[2]],
        bad_words_list=[[[5, 6, 7], [2, 3, -1]]],
    )[0]  # fmt: skip
    assert row.prompt_ids == [1, 2, 3]
    assert (row.params.temperature, row.params.top_p, row.params.seed) == (0.5, 0.75, 7)
    assert (row.params.min_tokens, row.eos_ids) == (2, frozenset({9}))
    assert [IdTokenizer().encode(word) for word in row.params.bad_words] == [[5, 6], [7]]


@pytest.mark.parametrize("more", [{}, {"runtime_top_k": [[1]], "temperature": [[1.0]]}])
def test_the_likeliest_token_is_the_answer_without_wishes(more: dict[str, Any]) -> None:
    assert rows(**more)[0].params.heat == 0


@pytest.mark.parametrize("end", [-1, 2**32 - 1])
def test_an_end_that_no_token_has_is_none(end: int) -> None:
    assert rows(end_id=[[end]])[0].eos_ids == frozenset()


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"lora_task_id": [[1]]}, "has no lora_task_id"),
        ({"embedding_bias": [[0.5]]}, "has no embedding_bias"),
        ({"beam_width": [[2]]}, "no beam_width but 1"),
        ({"return_log_probs": [[True]]}, "no return_log_probs but false"),
        ({"length": 14}, "over the engine's 16"),
        ({"length": 0}, "request_output_len 0"),
    ],
)
def test_what_it_cannot_do_is_refused(more: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        rows(**more)


def test_the_token_that_ends_an_answer_is_kept_and_a_stop_word_is_told() -> None:
    ended = rows(end_id=[[9]])[0]
    for token in (5, 9):
        ended.push(token)
    assert (ended.finish_reason, ended.take_ids(), ended.take_ids()) == ("stop", [5], [])
    stopped = rows(stop_words_list=[[[6, 7], [2, -1]]])[0]
    for token in (5, 6, 7):
        stopped.push(token)
    assert (stopped.finish_reason, stopped.take_ids()) == ("stop", [5, 6, 7])


class Counting:
    """Answers every prompt with 10, 11, 12 …; it waits for each step to be allowed."""

    def __init__(self) -> None:
        self.steps = threading.Semaphore(0)
        self.live: list[Generation] = []

    @property
    def busy(self) -> bool:
        return bool(self.live)

    def admit(self, generation: Generation) -> None:
        self.live.append(generation)

    def drop(self, generation: Generation) -> None:
        self.live = [one for one in self.live if one is not generation]

    def step(self) -> Progress:
        self.steps.acquire()
        for generation in list(self.live):
            generation.push(10 + len(generation.token_ids))
        self.live = [one for one in self.live if not one.done]
        return Progress()


@pytest.fixture
def counting(monkeypatch: pytest.MonkeyPatch) -> Iterator[Counting]:
    stepper = Counting()
    monkeypatch.setattr(backend, "make_stepper", lambda _: (stepper, 16, "a script"))
    yield stepper
    stepper.steps.release(1000)


class Request(FakeRequest):
    def __init__(self, length: int, name: str = "", **more: Any) -> None:
        super().__init__(given([1, 2], length, **more))
        self.name = name

    def request_id(self) -> str:
        return self.name

    @property
    def ids(self) -> list[int]:
        return [i for r in self.responses for i in r.tensors["output_ids"].reshape(-1).tolist()]


def until(condition: Any) -> None:
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_in_flight_a_request_joins_between_two_steps(counting: Counting) -> None:
    stand_in = StandIn(settings(), pb := FakeBackendUtils())
    long, short = Request(4, streaming=[[True]]), Request(1)
    stand_in.execute([long])
    counting.steps.release()
    until(lambda: long.ids == [10])
    stand_in.execute([short])
    counting.steps.release(2)
    until(lambda: short.closed)
    assert short.ids == [10]
    assert not long.closed
    counting.steps.release(8)
    until(lambda: long.closed)
    assert long.ids == [10, 11, 12, 13]
    stand_in.finalize()
    assert any("stand-in for TensorRT-LLM" in line for line in pb.Logger.warnings)


def static() -> StandIn:
    return StandIn(
        settings(parameters={"gpt_model_type": {"string_value": "V1"}}), FakeBackendUtils()
    )


def test_a_static_batch_runs_to_its_end_before_the_next(counting: Counting) -> None:
    stand_in = static()
    batch, late = [Request(3), Request(1)], Request(1)
    stand_in.execute(batch)
    counting.steps.release(2)
    until(lambda: batch[1].closed)
    stand_in.execute([late])
    until(lambda: not counting.steps.acquire(blocking=False))
    # A place is free, and it has to wait all the same.
    assert len(counting.live) == 1
    counting.steps.release()
    until(lambda: batch[0].closed)
    assert not late.closed
    counting.steps.release()
    until(lambda: late.closed)
    assert [request.ids for request in (*batch, late)] == [[10, 11, 12], [10], [10]]
    stand_in.finalize()


def test_what_has_come_meanwhile_is_the_next_static_batch(counting: Counting) -> None:
    """Triton may hand requests over one by one: it is the backend that makes batches of them."""
    stand_in = static()
    first, others = Request(2), [Request(2) for _ in range(5)]
    stand_in.execute([first])
    until(lambda: counting.live)
    for other in others:
        stand_in.execute([other])
    counting.steps.release(2)
    # As many as fit, which are four.
    until(lambda: len(counting.live) == 4)
    counting.steps.release(2)
    until(lambda: all(other.closed for other in others[:4]))
    until(lambda: len(counting.live) == 1)
    counting.steps.release(2)
    until(lambda: others[4].closed)
    stand_in.finalize()


def test_a_request_that_says_stop_ends_the_one_that_has_its_id(counting: Counting) -> None:
    stand_in = StandIn(settings(), FakeBackendUtils())
    long = Request(8, "mine", streaming=[[True]])
    stand_in.execute([long])
    counting.steps.release()
    until(lambda: long.ids == [10])
    stopping = Request(1, "mine", stop=[[True]])
    stand_in.execute([stopping])
    assert stopping.closed
    counting.steps.release()
    until(lambda: long.closed)
    assert len(long.ids) < 4
    stand_in.finalize()


def test_the_prompt_and_what_nobody_asked_for_are_there_as_the_backend_has_them(
    counting: Counting,
) -> None:
    stand_in = StandIn(settings(), FakeBackendUtils())
    request = Request(2, exclude_input_in_output=[[False]])
    stand_in.execute([request])
    counting.steps.release(4)
    until(lambda: request.closed)
    tensors = request.responses[0].tensors
    assert tensors["output_ids"].tolist() == [[[1, 2, 10, 11]]]
    assert tensors["sequence_length"].tolist() == [[4]]
    assert tensors["cum_log_probs"].shape == (1, 1)
    stand_in.finalize()


def test_without_a_plugins_engine_the_plain_loop_makes_what_generate_makes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    from llmserve.demo import demo_model_path
    from llmserve.server.backends.tensorrtllm.stepper import make_stepper

    monkeypatch.setenv("LLMSERVE_PLUGINS", "none-of-them")
    stepper, context, what = make_stepper(settings())
    assert (context, what) == (512, "one sequence after another")
    model = AutoModelForCausalLM.from_pretrained(demo_model_path())
    prompts = [[70, 80, 90], [400, 5], [33]]
    sequences = [
        read_rows(given(ids, 12, end_id=[[0]]), context, lambda: False)[0] for ids in prompts
    ]
    for sequence in sequences:
        stepper.admit(sequence)
    while stepper.busy:
        assert not stepper.step().failed
    for ids, sequence in zip(prompts, sequences, strict=True):
        made = model.generate(torch.tensor([ids]), max_new_tokens=12, do_sample=False)
        assert sequence.token_ids == made[0, len(ids) :].tolist()
