"""The models around the engine, each by itself and without Triton."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

from llmserve.runtime.params import Params
from llmserve.runtime.protocols import Answer, Parts
from llmserve.runtime.text_formatter import TextFormatter
from llmserve.testing import (
    ByteTokenizer,
    FakeBackendUtils,
    FakeRequest,
    FakeResponse,
    FakeTensor,
    make_parts,
)
from llmserve_trtllm.runtime.limits import EngineLimits
from llmserve_trtllm.runtime.llmapi import LlmApi
from llmserve_trtllm.runtime.orchestrator import Orchestrator
from llmserve_trtllm.runtime.postprocessing import Postprocessing
from llmserve_trtllm.runtime.preprocessing import Preprocessing
from llmserve_trtllm.runtime.sampling import SamplingValues, word_ids, word_tensor, words_of

LIMITS = {
    "max_seq_len": 64, "max_input_len": 32, "vocab_size": 256, "max_beam_width": 1,
    "eos_ids": [0, 7], "pad_id": None,
}  # fmt: skip
SAMPLING = {"end_id": "INT32", "pad_id": "INT32", "temperature": "FP32", "top_k": "INT32"}
READ = {
    "names": {"QUERY": "text_input", "REQUEST_OUTPUT_LEN": "max_tokens",
              "STOP_WORDS_DICT": "stop_words", "BAD_WORDS_DICT": "bad_words"},
    "kinds": {"REQUEST_OUTPUT_LEN": "INT32", "EMBEDDING_BIAS": "FP32", "REQUEST": "STRING"},
    "sampling": SAMPLING, "no_end": -1, "streams": False,
}  # fmt: skip
ASKED = ("temperature", "top_k", "seed", "ignore_eos", "end_id", "bad_words", "min_tokens")


def engine() -> EngineLimits:
    return EngineLimits(LIMITS, Path())


def parts(**changes: Any) -> Parts:
    return replace(make_parts(engine(), inputs=ASKED, decoupled=False), **changes)


def read(request: FakeRequest, **settings: Any) -> Any:
    stage = Preprocessing({**READ, **settings}, Path())
    stage.start(parts())
    return stage.execute([request])[0]


def tensors(response: Any) -> dict[str, Any]:
    assert response.error is None, response.error.message()
    return dict(response.tensors)


def texts(*rows: list[str]) -> Any:
    return np.array([[text.encode() for text in row] for row in rows], object)


def test_prompts_of_different_lengths_are_filled_up_behind() -> None:
    given = tensors(read(FakeRequest({"QUERY": texts(["ab"], ["abcd"])})))
    assert given["INPUT_ID"].tolist() == [[97, 98, 0, 0], [97, 98, 99, 100]]
    assert given["REQUEST_INPUT_LEN"].tolist() == [[2], [4]]
    assert given["REQUEST_OUTPUT_LEN"].tolist() == [[8], [8]]
    assert given["OUT_END_ID"].tolist() == [[0], [0]]


def test_words_are_encoded_as_the_backend_reads_them() -> None:
    request = FakeRequest({"QUERY": texts(["a"]), "STOP_WORDS_DICT": texts(["x", ""])})
    stops = tensors(read(request))["STOP_WORDS_IDS"]
    # In both of its forms, without a BOS; the model's other end is a word too.
    assert words_of(stops[0]) == [[120], [32, 120], [7]]
    assert stops.dtype == np.int32


def test_no_words_are_no_columns() -> None:
    assert word_tensor([[], []]).shape == (2, 2, 0)
    assert word_ids([], ByteTokenizer()) == []


def test_without_an_end_the_engine_gets_none() -> None:
    given = tensors(read(FakeRequest({"QUERY": texts(["a"])}, ignore_eos=True)))
    assert given["OUT_END_ID"].tolist() == [[-1]]
    assert words_of(given["STOP_WORDS_IDS"][0]) == []


def test_a_bias_is_a_number_for_every_id() -> None:
    words, weights = texts(["ab"]), np.array([[2.5]], np.float32)
    request = FakeRequest(
        {"QUERY": texts(["a"]), "EMBEDDING_BIAS_WORDS": words, "EMBEDDING_BIAS_WEIGHTS": weights}
    )
    bias = tensors(read(request))["EMBEDDING_BIAS"]
    assert bias.shape == (1, 256)
    assert np.flatnonzero(bias[0]).tolist() == [97, 98]
    assert tensors(read(FakeRequest({"QUERY": texts(["a"])})))["EMBEDDING_BIAS"].shape == (1, 0)


@pytest.mark.parametrize(
    ("inputs", "asked", "message"),
    [
        (
            {"QUERY": texts(["a" * 33])},
            {},
            "has 33 tokens and the engine takes 32 of its context of 64",
        ),
        ({"QUERY": texts([""])}, {}, "text_input is empty"),
        ({"QUERY": texts(["a"])}, {"max_tokens": 64}, "ask for at most 63"),
        ({"QUERY": texts(["a"])}, {"stream": True}, "decoupled=true"),
        ({"QUERY": texts(["a"])}, {"min_tokens": 5}, "has no min_tokens"),
    ],
)
def test_what_cannot_be_served_costs_the_engine_nothing(
    inputs: dict[str, Any], asked: dict[str, Any], message: str
) -> None:
    response = read(FakeRequest(inputs, **asked))
    assert message in response.error.message()


def test_greedy_is_said_in_a_way_that_every_version_takes() -> None:
    values_of = SamplingValues(
        {"temperature": "FP32", "top_k": "INT32", "top_p": "FP32", "seed": "UINT64"}
    )
    for params in (Params(), Params(temperature=0.0), Params(top_k=1, temperature=2.0)):
        values = values_of.values(params)
        assert (values["temperature"], values["top_k"], values["top_p"]) == (1.0, 1, 1.0)
    values = values_of.values(Params(temperature=0.5, top_p=0.9, seed=3))
    assert (values["temperature"], values["top_k"], values["seed"]) == (0.5, 0, 3)
    seeds = {values_of.values(Params(temperature=1.0))["seed"] for _ in range(8)}
    assert len(seeds) == 8, "the engine's own seed is always the same"


TOLD = {
    "prompt": "", "stop": [], "min_tokens": 0, "input_tokens": 2, "context": [97, 98],
    "max_tokens": 8, "end": [0],
}  # fmt: skip


def write(ids: list[int], *, told: dict[str, Any] | None, **settings: Any) -> dict[str, Any]:
    stage = Postprocessing({"engine_echoes": False, **settings}, Path())
    stage.start(parts())
    inputs: dict[str, Any] = {
        "TOKENS_BATCH": np.array([[ids]], np.int32),
        "SEQUENCE_LENGTH": np.array([[len(ids)]], np.int32),
    }
    if told is not None:
        inputs["REQUEST"] = texts([json.dumps(told)])
    return tensors(stage.execute([FakeRequest(inputs)])[0])


@pytest.mark.parametrize(
    ("ids", "told", "expected"),
    [
        (list(b"hello"), {}, (b"hello", b"stop", 5)),
        ([*b"hello", 0], {}, (b"hello", b"stop", 6)),
        (list(b"12345678"), {}, (b"12345678", b"length", 8)),
        (list(b"say STOP"), {"stop": ["STOP"]}, (b"say ", b"stop", 8)),
        (list(b"ab"), {"prompt": "ab: "}, (b"ab: ab", b"stop", 2)),
        ([*"é".encode()], {}, ("é".encode(), b"stop", 2)),
    ],
)
def test_an_answer_is_told_with_its_end_and_its_tokens(
    ids: list[int], told: dict[str, Any], expected: tuple[bytes, bytes, int]
) -> None:
    said = write(ids, told={**TOLD, **told})
    found = (said["OUTPUT"][0], said["FINISH_REASON"][0, 0], said["NUM_OUTPUT_TOKENS"][0, 0])
    assert found == expected
    assert said["NUM_INPUT_TOKENS"][0, 0] == 2


def test_a_formatter_is_told_the_whole_answer() -> None:
    stage = Postprocessing({"engine_echoes": False}, Path())
    told: list[str] = []

    class Listening(TextFormatter):
        def format(self, answers: Sequence[Answer]) -> dict[str, Any]:
            told.extend(answer.so_far for answer in answers)
            return super().format(answers)

    stage.start(parts(formatter=Listening({}, Path())))
    inputs = {"TOKENS_BATCH": np.array([[list(b"hello")]]), "REQUEST": texts([json.dumps(TOLD)])}
    stage.execute([FakeRequest(inputs)])
    assert set(told) == {"hello"}


def test_the_prompts_tokens_are_cut_off_where_the_engine_sends_them() -> None:
    said = write([97, 98, *b"hi", 0, 0, 0], told=TOLD, engine_echoes=True)
    assert said["OUTPUT"].shape == (1,)
    assert said["OUTPUT"][0] == b"hi"


def test_a_piece_keeps_its_leading_space() -> None:
    class Piecewise(ByteTokenizer):
        """Like those that drop the space before a text's first word."""

        def decode(self, ids: Any) -> str:
            return super().decode(ids).removeprefix(" ")

    stage = Postprocessing({"engine_echoes": False}, Path())
    stage.start(parts(tokenizer=Piecewise()))
    inputs = {
        "TOKENS_BATCH": np.array([[list(b" cat")]], np.int32),
        "SEQUENCE_LENGTH": np.array([[4]], np.int32),
    }
    assert tensors(stage.execute([FakeRequest(inputs)])[0])["OUTPUT"][0] == b" cat"


FRONT = {
    "sampling": SAMPLING, "no_end": -1, "streams": True, "engine_model": "tensorrt_llm",
    "inside": {"end_id": "end_id", "pad_id": "pad_id", "temperature": "temperature",
               "top_k": "runtime_top_k"},
    "engine_kinds": {"input_ids": "INT32", "input_lengths": "INT32", "request_output_len": "INT32",
                     "end_id": "INT32", "runtime_top_k": "INT32", "streaming": "BOOL",
                     "stop_words_list": "INT32", "stop": "BOOL", "output_ids": "INT32",
                     "sequence_length": "INT32"},
    "engine_echoes": False, "names": {"sampling_param_max_tokens": "max_tokens"},
    "direct": ["return_log_probs", "lora_task_id", "num_return_sequences"],
    "scores": ["cum_log_probs", "output_log_probs", "sequence_index"],
}  # fmt: skip


def reply(ids: bytes, **scores: Any) -> FakeResponse:
    tensors = {
        "output_ids": np.array([[list(ids)]], np.int32),
        "sequence_length": np.array([[len(ids)]], np.int32),
        **scores,
    }
    return FakeResponse([FakeTensor(name, values) for name, values in tensors.items()])


def ask(
    pieces: list[bytes | FakeResponse], inputs: dict[str, Any] | None = None, **asked: Any
) -> tuple[list[str], FakeRequest, list[Any]]:
    """Ask through the orchestrator; the engine answers with these bytes as tokens."""
    seen: list[Any] = []
    numbers: list[str] = []
    front = {key: asked.pop(key) for key in FRONT.keys() & asked.keys()}
    wanted: list[Any] = asked.pop("wanted", [])

    def answer(request: Any) -> list[FakeResponse]:
        seen.append({tensor.name(): tensor.as_numpy() for tensor in request.inputs()})
        numbers.append(request.asked["request_id"])
        wanted.append(request.wanted)
        if "stop" in seen[-1]:
            assert numbers[-1] in numbers[:-1]
            return []
        return [reply(piece) if isinstance(piece, bytes) else piece for piece in pieces]

    backend = FakeBackendUtils(models={"tensorrt_llm": answer})
    stage = Orchestrator({**FRONT, **front}, Path())
    stage.start(parts(pb_utils=backend, decoupled=True))
    request = FakeRequest({"text_input": texts(["ab"]), **(inputs or {})}, **asked)
    stage.execute([request])
    stage.finalize()
    assert request.closed
    said = [response.texts[0] for response in request.responses if response.error is None]
    return said, request, seen


def test_a_character_in_two_pieces_is_put_together() -> None:
    euro = "€".encode()
    said, request, _ = ask([b"a " + euro[:1], euro[1:2], euro[2:] + b" b", b"\0"], stream=True)
    assert "".join(said) == "a € b"
    last = tensors(request.responses[-1])
    assert last["finish_reason"][0, 0] == b"stop"
    assert last["num_input_tokens"][0, 0] == 2


def test_a_stop_word_over_two_pieces_never_shows() -> None:
    said, _, seen = ask([b"say ST", b"OP", b" more"], stream=True, stop_words='["STOP"]')
    assert "".join(said) == "say "
    assert words_of(seen[0]["stop_words_list"][0])[0] == list(b"STOP")
    assert seen[1]["stop"].all(), "the engine is told that nobody waits any more"


def test_a_last_piece_without_a_token_ends_the_answer() -> None:
    said, request, _ = ask([b"hi", b""], stream=True)
    assert "".join(said) == "hi"
    assert request.error is None


def test_an_engine_that_ends_without_a_word_has_ended() -> None:
    said, request, seen = ask([b"hi"])
    assert said == ["hi"]
    assert tensors(request.responses[-1])["finish_reason"][0, 0] == b"stop"
    assert seen[0]["input_ids"].tolist() == [[97, 98]]
    assert seen[0]["runtime_top_k"].tolist() == [[1]]
    assert "stop_words_list" in seen[0], "the second end of the model"


def test_text_has_one_dimension_as_nvidias_clients_read_it() -> None:
    _, request, _ = ask([b"hi"])
    assert request.responses[-1].tensors["text_output"].tolist() == [b"hi"]
    assert request.responses[-1].tensors["finish_reason"].shape == (1, 1)


@pytest.mark.parametrize(("streams", "first"), [(True, b"hi"), (False, b"abhi")])
def test_only_an_answer_in_one_piece_begins_with_the_prompt(streams: bool, first: bytes) -> None:
    """A stream of the real backend never does, whatever exclude_input_in_output says."""
    said, _, _ = ask([first, b" there"] if streams else [first + b" there"],
                     engine_echoes=True, streams=streams)  # fmt: skip
    assert "".join(said) == "hi there"


def test_scores_go_out_with_the_tokens_that_they_are_of() -> None:
    scores = [np.array([[[-0.5]]], np.float32), np.array([[[-0.25, -1.0]]], np.float32)]
    pieces: list[bytes | FakeResponse] = [
        reply(b"h", output_log_probs=scores[0], cum_log_probs=np.array([[-0.5]], np.float32)),
        reply(b"ey", output_log_probs=scores[1], cum_log_probs=np.array([[-1.75]], np.float32)),
    ]
    inputs = {
        "return_log_probs": np.array([[True]]), "lora_task_id": np.array([[7]], np.uint64),
    }  # fmt: skip
    known: Any = FRONT["engine_kinds"]
    kinds = {**known, "return_log_probs": "BOOL", "lora_task_id": "UINT64"}
    _, request, seen = ask(pieces, inputs, engine_kinds=kinds)
    last = tensors(request.responses[-1])
    assert last["output_log_probs"].tolist() == [[[-0.5, -0.25, -1.0]]]
    assert last["cum_log_probs"].tolist() == [[-1.75]]
    assert seen[0]["return_log_probs"].tolist() == [[True]]
    assert seen[0]["lora_task_id"].tolist() == [[7]]


@pytest.mark.parametrize(("scores", "asked"), [
    (["batch_index"], True), (["batch_index", "sequence_index"], False),
])  # fmt: skip
def test_before_0_14_scores_come_without_being_asked_for(scores: list[str], asked: bool) -> None:
    """What clients of these versions read in every response; later ones send nothing."""
    index = reply(b"hi", batch_index=np.array([[0]], np.int32))
    wanted: list[Any] = []
    _, request, _ = ask([index], scores=scores, wanted=wanted)
    assert ("batch_index" in wanted[0]) == asked
    assert request.responses[-1].tensors["batch_index"].tolist() == [[0]]


def test_several_answers_need_the_ensemble() -> None:
    _, request, _ = ask([b"hi"], {"num_return_sequences": np.array([[2]], np.int32)})
    error = request.responses[-1].error
    assert error is not None
    assert "stream_through=ensemble" in error.message()


def test_nvidias_names_for_the_llm_api_mean_the_same() -> None:
    said, _, seen = ask([b"hey"], {"sampling_param_max_tokens": np.array([[2]], np.int32)})
    assert said == ["he"]
    assert seen[0]["request_output_len"].tolist() == [[2]]


class Result:
    """What ``LLM.generate_async`` returns: every token so far, again and again."""

    def __init__(self, tokens: list[int]) -> None:
        self.tokens = tokens
        self.aborted = False

    def __iter__(self) -> Any:
        for end in range(1, len(self.tokens) + 1):
            yield self._output(self.tokens[:end])

    def result(self) -> Any:
        return self._output(self.tokens)

    def abort(self) -> None:
        self.aborted = True

    @staticmethod
    def _output(tokens: list[int]) -> Any:
        return SimpleNamespace(outputs=[SimpleNamespace(token_ids=list(tokens))])


@pytest.fixture
def llm(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Lend a tensorrt_llm that keeps what it is told, with SamplingParams as NVIDIA's has it."""
    made = SimpleNamespace(results=[Result([5, 6, 7])], asked=[], given={})

    class Llm:
        def __init__(self, **given: Any) -> None:
            made.given = given

        def generate_async(self, ids: Any, sampling: Any, **more: Any) -> Any:
            made.asked.append((ids, sampling, more))
            return made.results[len(made.asked) - 1]

        def shutdown(self) -> None:
            pass

    module = ModuleType("tensorrt_llm")
    module.LLM, module.SamplingParams = Llm, SimpleNamespace  # type: ignore[attr-defined]
    api = ModuleType("tensorrt_llm.llmapi")
    api.KvCacheConfig = api.SchedulerConfig = dict  # type: ignore[attr-defined]
    api.CapacitySchedulerPolicy = SimpleNamespace(MAX_UTILIZATION=1)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "tensorrt_llm", module)
    monkeypatch.setitem(sys.modules, "tensorrt_llm.llmapi", api)
    return made


def ask_llm(streams: bool = False, **more: Any) -> FakeRequest:
    settings = {
        "streams": streams, "stand_in": False, "scheduler": "MAX_UTILIZATION", "path": "model",
        "max_batch_size": 4, "dtype": "auto", "tensor_parallel_size": 1,
        "pipeline_parallel_size": 1, "kv_cache": {"enable_block_reuse": False},
    }  # fmt: skip
    stage = LlmApi(settings, Path())
    stage.start(parts())
    inputs = {
        "input_ids": np.array([[1, 2]], np.int32), "input_lengths": np.array([[2]], np.int32),
        "request_output_len": np.array([[8]], np.int32), **more,
    }  # fmt: skip
    request = FakeRequest(inputs)
    stage.execute([request])
    deadline = time.monotonic() + 10
    while not request.closed:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    stage.finalize()
    return request


def test_bad_words_reach_the_llm_api(llm: Any) -> None:
    ask_llm(bad_words_list=word_tensor([[[9], [3, 4]]]))
    sampling = llm.asked[0][1]
    assert sampling.bad_token_ids == [9]
    # A word of several tokens, as its _get_bad_words reads it.
    assert sampling.bad is not None
    assert sampling._bad_word_ids == [[3, 4]]
    assert llm.given["kv_cache_config"] == {"enable_block_reuse": False}


def test_the_llm_api_answers_in_the_engines_tensors(llm: Any) -> None:
    whole = ask_llm()
    assert whole.responses[0].tensors["output_ids"].tolist() == [[[5, 6, 7]]]
    llm.asked.clear()
    stream = ask_llm(streams=True, streaming=np.array([[True]]))
    ids = [r.tensors["output_ids"].reshape(-1).tolist() for r in stream.responses]
    assert ids == [[5], [6], [7], []]
    assert llm.asked[0][2] == {"streaming": True}
    sampling = llm.asked[0][1]
    assert (sampling.top_k, sampling.temperature, sampling.max_tokens) == (1, None, 8)


def test_the_llm_api_stops_at_a_stop_word(llm: Any) -> None:
    llm.results = [Result([5, 6, 7, 8])]
    stream = ask_llm(
        streams=True, streaming=np.array([[True]]), stop_words_list=word_tensor([[[6, 7]]])
    )
    ids = [i for r in stream.responses for i in r.tensors["output_ids"].reshape(-1).tolist()]
    assert ids == [5, 6, 7]
    assert llm.results[0].aborted
