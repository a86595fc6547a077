"""Tests of the models around the engine, each alone and without Triton."""

from __future__ import annotations

import json
import sys
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

from llmserve.contract.failures import read
from llmserve.runtime import (
    Answer,
    Params,
    Parts,
    Prompt,
    RequestError,
    SeenPrompt,
    TextFormatter,
)
from llmserve.testing import (
    ByteTokenizer,
    FakeBackendUtils,
    FakeRequest,
    FakeResponse,
    FakeTensor,
    make_parts,
)
from llmserve_trtllm.runtime.engine_request import (
    EngineLimits,
    RequestWriter,
    word_tensor,
    words_of,
)
from llmserve_trtllm.runtime.llmapi import LlmApi
from llmserve_trtllm.runtime.orchestrator import EngineModel, Orchestrator
from llmserve_trtllm.runtime.stages import Postprocessing, Preprocessing

_STAGES = json.loads(Path(__file__).with_name("stages.json").read_text())
LIMITS: dict[str, Any] = _STAGES["limits"]
SETTINGS: dict[str, Any] = _STAGES["settings"]
INPUTS = ("temperature", "top_k", "seed", "ignore_eos", "end_id", "bad_words", "min_tokens")


def parts(**changes: Any) -> Parts:
    engine = EngineLimits(LIMITS, Path())
    return replace(make_parts(engine, inputs=INPUTS, decoupled=False), **changes)


def answer_of(stage: Any, inputs: dict[str, Any], components: Parts | None = None) -> Any:
    """Start a stage, send it one request and return its response."""
    parameters = {name: inputs.pop(name) for name in tuple(inputs) if name.islower()}
    stage.start(components or parts())
    return stage.execute([FakeRequest(inputs, **parameters)])[0]


def preprocess(**inputs: Any) -> Any:
    return answer_of(Preprocessing(SETTINGS, Path()), {"QUERY": texts(["a"]), **inputs})


def tensors(response: Any) -> dict[str, Any]:
    assert response.error is None, response.error.message()
    return dict(response.tensors)


def texts(*rows: list[str]) -> Any:
    return np.array([[text.encode() for text in row] for row in rows], object)


def test_a_request_about_its_prompt_does_not_wait_for_the_engine_to_read_it() -> None:
    settings = {**SETTINGS, "makes": {**SETTINGS["makes"], "REQUEST": "TYPE_STRING"}}
    components = parts(inputs=frozenset({"text_input", "prompt_only"}))
    inputs = {"QUERY": texts(["a" * 100]), "prompt_only": True}
    outputs = tensors(answer_of(Preprocessing(settings, Path()), inputs, components))
    assert outputs["INPUT_ID"].tolist() == [[97]]
    answer = json.loads(json.loads(outputs["REQUEST"][0, 0])["answer"])
    about = {"text": "a" * 100, "context_length": 64, "longest_prompt": 64 * 512}
    assert answer == {"ids": [97] * 100, **about}


@pytest.mark.parametrize("value", [0.0, 0.5])
def test_an_option_that_a_version_cannot_run_is_refused_with_its_reason(value: float) -> None:
    settings = {**SETTINGS, "refused": {"presence_penalty": "leave out presence_penalty"}}
    inputs = {"QUERY": texts(["a"]), "PRESENCE_PENALTY": np.array([[value]], np.float32)}
    names = {**SETTINGS["names"], "PRESENCE_PENALTY": "presence_penalty"}
    stage = Preprocessing({**settings, "names": names}, Path())
    response = answer_of(stage, inputs, parts(inputs=frozenset({"text_input", "presence_penalty"})))
    if value:
        failure = read(response.error.message())
        assert (failure.code, failure.param) == ("unsupported_option", "presence_penalty")
        assert failure.words == "leave out presence_penalty"
    else:
        assert response.error is None


@pytest.mark.parametrize(
    ("inputs", "end", "words"),
    [
        # A word in both of its forms, without a BOS; the model's second end id is also a word.
        ({"STOP_WORDS_DICT": texts(["x", ""])}, 0, [[120], [32, 120], [7]]),
        ({"ignore_eos": True}, -1, []),
        ({"end_id": 9}, 9, []),
    ],
)
def test_words_and_ends_are_written_in_the_backends_form(
    inputs: dict[str, Any], end: int, words: list[list[int]]
) -> None:
    outputs = tensors(preprocess(**inputs))
    assert outputs["OUT_END_ID"].tolist() == [[end]]
    assert words_of(outputs["STOP_WORDS_IDS"][0]) == words
    assert outputs["STOP_WORDS_IDS"].dtype == np.int32


def test_a_bias_is_a_number_for_every_id() -> None:
    words, weights = texts(["ab"]), np.array([[2.5]], np.float32)
    outputs = tensors(preprocess(EMBEDDING_BIAS_WORDS=words, EMBEDDING_BIAS_WEIGHTS=weights))
    assert outputs["EMBEDDING_BIAS"].shape == (1, 256)
    assert np.flatnonzero(outputs["EMBEDDING_BIAS"][0]).tolist() == [97, 98]
    assert tensors(preprocess())["EMBEDDING_BIAS"].shape == (1, 0)


def test_greedy_is_written_in_a_form_that_every_version_accepts() -> None:
    writer = RequestWriter(SETTINGS, parts())

    def values(**params: Any) -> tuple[Any, ...]:
        outputs = writer.write([Prompt("", [1], Params(**params))], [1], None, None)
        return tuple(
            outputs[f"OUT_{name}"][0][0] for name in ("TEMPERATURE", "TOP_K", "TOP_P", "SEED")
        )

    for greedy in ({}, {"temperature": 0.0}, {"top_k": 1, "temperature": 2.0}):
        assert values(**greedy)[:3] == (1.0, 1, 1.0)
    assert values(temperature=0.5, top_p=0.9, seed=3) == (0.5, 0, 0.9, 3)
    seeds = {values(temperature=1.0)[3] for _ in range(8)}
    assert len(seeds) == 8, "the engine's own seed is always the same"


@pytest.mark.parametrize("adapter", ["", "sql"])
def test_an_adapter_is_passed_on_if_the_model_takes_any(adapter: str) -> None:
    prompt = Prompt("", [1], Params(adapter=adapter or None))
    limits = EngineLimits({**LIMITS, "adapters_of": "mine"}, Path("models/part/1"))
    assert limits.home == Path("models/mine/1")
    outputs = RequestWriter(SETTINGS, parts(generator=limits)).write([prompt], [1], None, None)
    assert outputs["OUT_ADAPTER"] == [[adapter.encode()]]
    writer = RequestWriter(SETTINGS, parts())
    if adapter:
        with pytest.raises(RequestError, match="takes no adapters by name") as caught:
            writer.write([prompt], [1], None, None)
        assert (caught.value.code, caught.value.param) == ("unsupported_option", "adapter")
    else:
        assert writer.write([prompt], [1], None, None)["OUT_ADAPTER"] == [[b""]]


@pytest.mark.parametrize(
    ("params", "end", "words"),
    [({}, 0, [[7], [99]]), ({"end_id": 9}, 9, []), ({"ignore_eos": True}, -1, [])],
)
def test_an_answer_may_have_ends_of_its_own(
    params: dict[str, Any], end: int, words: list[list[int]]
) -> None:
    """Such as those of a gap, which is filled when the model begins another."""
    prompt = Prompt("", [1], Params(**params), ends=frozenset({99}))
    outputs = RequestWriter(SETTINGS, parts()).write([prompt], [1], None, None)
    assert outputs["OUT_END_ID"] == [[end]]
    assert words_of(outputs["STOP_WORDS_IDS"][0]) == words


def test_without_an_end_the_padding_is_a_real_id() -> None:
    writer = RequestWriter({**SETTINGS, "no_end": 2**32 - 1}, parts())
    outputs = writer.write([Prompt("", [1], Params(ignore_eos=True))], [1], None, None)
    assert (outputs["OUT_END_ID"], outputs["OUT_PAD_ID"]) == ([[2**32 - 1]], [[0]])


REQUEST = {
    "prompt": "", "params": {}, "input_tokens": 2,
    "context": [97, 98], "max_tokens": 8, "end": [0],
}  # fmt: skip


def postprocess(ids: list[int], request: dict[str, Any] | None, **changes: Any) -> dict[str, Any]:
    inputs: dict[str, Any] = {
        "TOKENS_BATCH": np.array([[ids]], np.int32),
        "SEQUENCE_LENGTH": np.array([[len(ids)]], np.int32),
    }
    if request is not None:
        inputs["REQUEST"] = texts([json.dumps({**REQUEST, **request})])
    stage = Postprocessing({"engine_echoes": changes.pop("echoes", False)}, Path())
    return tensors(answer_of(stage, inputs, parts(**changes)))


@pytest.mark.parametrize(
    ("ids", "request_", "expected"),
    [
        (list(b"hello"), {}, (b"hello", b"stop", 5)),
        ([*b"hello", 0], {}, (b"hello", b"stop", 6)),
        (list(b"12345678"), {}, (b"12345678", b"length", 8)),
        (list(b"say STOP"), {"params": {"stop_words": ["STOP"]}}, (b"say ", b"stop", 8)),
        (list(b"ab"), {"prompt": "ab: "}, (b"ab: ab", b"stop", 2)),
        ([*"é".encode()], {}, ("é".encode(), b"stop", 2)),
        (list(b"x"), {"answer": '{"ids": [97, 98]}'}, (b'{"ids": [97, 98]}', b"stop", 0)),
    ],
)
def test_an_answer_has_its_finish_reason_and_token_counts(
    ids: list[int], request_: dict[str, Any], expected: tuple[bytes, bytes, int]
) -> None:
    outputs = postprocess(ids, request_)
    names = ("FINISH_REASON", "NUM_OUTPUT_TOKENS")
    assert (outputs["OUTPUT"][0], *(outputs[name][0, 0] for name in names)) == expected
    assert outputs["NUM_INPUT_TOKENS"][0, 0] == 2


def test_a_formatter_gets_the_whole_answer() -> None:
    texts_so_far: list[str] = []

    class RecordingFormatter(TextFormatter):
        def format(self, answers: Sequence[Answer]) -> dict[str, Any]:
            texts_so_far.extend(answer.so_far for answer in answers)
            return super().format(answers)

    postprocess(list(b"hello"), {}, formatter=RecordingFormatter({}, Path()))
    assert set(texts_so_far) == {"hello"}


def test_a_piece_keeps_its_leading_space() -> None:
    class StrippingTokenizer(ByteTokenizer):
        """Drops the space before a text's first word, as some tokenizers do."""

        def decode(self, ids: Any) -> str:
            return super().decode(ids).removeprefix(" ")

    assert postprocess(list(b" cat"), None, tokenizer=StrippingTokenizer())["OUTPUT"][0] == b" cat"


def engine_response(ids: bytes, **scores: Any) -> FakeResponse:
    outputs = {"output_ids": [[list(ids)]], "sequence_length": [[len(ids)]], **scores}
    return FakeResponse([FakeTensor(name, np.array(values)) for name, values in outputs.items()])


class Stream:
    """An engine's answer as Triton returns it from 25.05 on: it can be cancelled."""

    def __init__(self, responses: Any) -> None:
        self.responses, self.cancelled = responses, False

    def __iter__(self) -> Any:
        return self.responses

    def cancel(self) -> None:
        self.cancelled = True


class Exchange:
    """One request to the orchestrator, while the engine answers with these bytes as tokens."""

    def __init__(self, *pieces: bytes | FakeResponse, **options: Any) -> None:
        changes = {name: options.pop(name) for name in SETTINGS.keys() & options.keys()}
        arrays = [name for name, value in options.items() if hasattr(value, "shape")]
        inputs = {name: options.pop(name) for name in arrays}
        self.unread = [engine_response(p) if isinstance(p, bytes) else p for p in pieces]
        self.engine_requests: list[Any] = []
        utils = FakeBackendUtils(models={"tensorrt_llm": self._answer})
        stage = Orchestrator({**SETTINGS, "streams": True, **changes}, Path())
        stage.start(parts(pb_utils=utils, decoupled=True))
        self.request = FakeRequest({"text_input": texts(["ab"]), **inputs}, **options)
        stage.execute([self.request])
        assert self.request.closed
        self.text = "".join(r.texts[0] for r in self.request.responses if r.error is None)
        self.last = self.request.responses[-1]

    def _answer(self, request: Any) -> Iterator[FakeResponse]:
        self.engine_requests.append(request)
        while self.unread:
            yield self.unread.pop(0)

    @property
    def engine_inputs(self) -> dict[str, Any]:
        (request,) = self.engine_requests
        return {tensor.name(): tensor.as_numpy().tolist() for tensor in request.inputs()}


EURO = "€".encode()
STOPS = {"stream": True, "stop_words": '["STOP"]'}


@pytest.mark.parametrize(
    ("pieces", "options", "text"),
    [
        # A character in three pieces, a stop word in two, and a stop word followed by more text.
        ((b"a " + EURO[:1], EURO[1:2], EURO[2:] + b" b", b"\0"), {"stream": True}, "a € b"),
        ((b"say ST", b"OP"), STOPS, "say "),
        ((b"a STOP", b"more", b"and more"), STOPS, "a "),
        # The token that ends the answer may be missing, and the last response may be empty.
        ((b"hi",), {}, "hi"),
        ((b"hi", b""), {}, "hi"),
        # Only an unstreamed answer begins with the prompt: a stream of the real backend never
        # does, whatever exclude_input_in_output is.
        ((b"hi", b" all"), {"engine_echoes": True}, "hi all"),
        ((b"abhi all",), {"engine_echoes": True, "streams": False}, "hi all"),
    ],
)
def test_the_engines_pieces_join_to_the_answer(
    pieces: tuple[bytes, ...], options: dict[str, Any], text: str
) -> None:
    exchange = Exchange(*pieces, **options)
    assert exchange.text == text
    last = tensors(exchange.last)
    assert last["finish_reason"].tolist() == [[b"stop"]]
    assert last["num_input_tokens"].tolist() == [[2]]
    assert last["text_output"].ndim == 1, "as NVIDIA's clients read it"
    # After the end, the remaining responses are read: a request with ``stop`` would be a second
    # stream in this process, and that crashes Triton's stub.
    assert len(exchange.engine_requests) == 1
    assert not exchange.unread


def test_engine_requests_use_the_engines_names() -> None:
    max_tokens = np.array([[2]], np.int32)
    exchange = Exchange(b"hey", sampling_param_max_tokens=max_tokens, stop_words="no")
    assert exchange.text == "he"
    assert exchange.engine_inputs["request_output_len"] == [[2]]
    assert exchange.engine_inputs["input_ids"] == [[97, 98]]
    assert exchange.engine_inputs["runtime_top_k"] == [[1]]
    # The word in both of its forms, and the model's second end id.
    words = words_of(np.array(exchange.engine_inputs["stop_words_list"][0]))
    assert words == [list(b"no"), list(b" no"), [7]]


def test_an_unread_stream_is_cancelled_if_triton_supports_it() -> None:
    responses = [engine_response(b"a"), engine_response(b"b")]
    utils = FakeBackendUtils(models={"engine": lambda _: responses})
    stream = Stream(utils.InferenceRequest(model_name="engine", inputs=[]).exec(decoupled=True))
    engine = SimpleNamespace(exec=lambda decoupled: stream)
    pb_utils = SimpleNamespace(Tensor=FakeTensor, InferenceRequest=lambda **_: engine)
    model = EngineModel({**SETTINGS, "streams": True}, pb_utils)
    answers = model.answers({"input_ids": np.array([[1]])}, stream=True)
    assert next(answers)[0] == [97]
    answers.close()
    assert stream.cancelled
    assert not list(stream.responses)


def test_a_stream_is_freed_after_triton_has_released_it() -> None:
    """Before 24.12 Triton's thread frees a stream if it is the last owner, which crashes 3.12."""
    streams: list[weakref.ref[Any]] = []
    alive: list[list[bool]] = []

    def send(decoupled: bool) -> Any:
        del decoupled
        streams.append(
            weakref.ref(stream := Stream(utils.InferenceRequest("engine", []).exec(True)))
        )
        return stream

    class Request(FakeRequest):
        def is_cancelled(self) -> bool:
            alive.append([stream() is not None for stream in streams])
            return super().is_cancelled()

    utils = FakeBackendUtils(models={"engine": lambda _: engine_response(b"a")})
    pb_utils = SimpleNamespace(**{name: getattr(utils, name) for name in dir(utils)})
    pb_utils.InferenceRequest = lambda **_: SimpleNamespace(exec=send)
    stage = Orchestrator({**SETTINGS, "streams": True}, Path())
    stage.start(parts(pb_utils=pb_utils, decoupled=True))
    stage.execute([FakeRequest({"text_input": texts(["ab"])})])
    stage.execute([Request({"text_input": texts(["ab"])})])
    assert alive[0] == [True], "Triton answers this call after all earlier ones"
    assert [stream() is not None for stream in streams] == [False, True]
    stage.finalize()
    assert not any(stream() for stream in streams)


@pytest.mark.parametrize("streams", [False, True])
def test_a_request_without_a_batch_dimension_is_answered_without_one(streams: bool) -> None:
    """NVIDIA's end_to_end_test sends this to its own model for the LLM API."""
    utils = FakeBackendUtils(models={"tensorrt_llm": lambda _: engine_response(b"hi")})
    stage = Orchestrator({**SETTINGS, "streams": streams}, Path())
    components = parts(pb_utils=utils, decoupled=streams, batched=False)
    stage.start(replace(components, inputs=components.inputs | {"max_tokens"}))
    inputs = {"text_input": np.array([b"ab"], object), "max_tokens": np.array([2], np.int32)}
    stage.execute([request := FakeRequest(inputs)])
    (response,) = request.responses
    assert tensors(response)["text_output"].tolist() == [b"hi"]
    assert response.tensors["finish_reason"].tolist() == [b"length"]


def test_scores_are_sent_with_their_tokens() -> None:
    exchange = Exchange(
        engine_response(b"h", output_log_probs=[[[-0.5]]], cum_log_probs=[[-0.5]]),
        engine_response(b"ey", output_log_probs=[[[-0.25, -1.0]]], cum_log_probs=[[-1.75]]),
        return_log_probs=np.array([[True]]),
        lora_task_id=np.array([[7]], np.uint64),
    )
    assert tensors(exchange.last)["output_log_probs"].tolist() == [[[-0.5, -0.25, -1.0]]]
    assert exchange.last.tensors["cum_log_probs"].tolist() == [[-1.75]]
    assert exchange.engine_inputs["return_log_probs"] == [[True]]
    assert exchange.engine_inputs["lora_task_id"] == [[7]]


def test_scores_that_no_request_asks_for_are_not_requested() -> None:
    exchange = Exchange(engine_response(b"hi", batch_index=[[0]]), scores=["batch_index"])
    assert "batch_index" not in exchange.engine_requests[0].requested_outputs


def test_several_answers_need_the_ensemble() -> None:
    error = Exchange(b"hi", num_return_sequences=np.array([[2]], np.int32)).last.error
    assert error is not None
    assert "stream_through=ensemble" in error.message()


class Seeing(EngineLimits):
    """Reads nine tokens where a prompt has one with a mark."""

    def read_images(self, text: str, urls: Sequence[str]) -> SeenPrompt:
        assert (text, len(urls)) == ("<>what?", 1)
        return SeenPrompt([97] * 9, [97])


class Rendering(ByteTokenizer):
    def render_chat(self, messages: Sequence[Any]) -> str:
        parts = messages[0]["content"]
        return "".join(part.get("text", "<>") for part in parts)


SHOWN = [{"type": "image"}, {"type": "text", "text": "what?"}]
SHOWING: dict[str, Any] = {
    **SETTINGS,
    "makes": {**SETTINGS["makes"], "OUT_IMAGE_URL": "TYPE_STRING", "REQUEST": "TYPE_STRING"},
    "engine_names": {**SETTINGS["engine_names"], "OUT_IMAGE_URL": "image_url"},
    "names": {"MESSAGES": "messages", "IMAGE_URL": "image_url"},
}


def showing(**changes: Any) -> Parts:
    known = frozenset({"messages", "image_url", "prompt_only"})
    return parts(generator=Seeing(LIMITS, Path()), tokenizer=Rendering(), inputs=known, **changes)


@pytest.mark.parametrize("about", [{}, {"prompt_only": True}])
def test_preprocessing_counts_what_the_model_reads_and_passes_marks_and_images_on(
    about: dict[str, bool],
) -> None:
    messages = json.dumps([{"role": "user", "content": SHOWN}])
    inputs = {"MESSAGES": texts([messages]), "IMAGE_URL": texts(["data:1"]), **about}
    outputs = tensors(answer_of(Preprocessing(SHOWING, Path()), inputs, showing()))
    assert outputs["INPUT_ID"].tolist() == [[97]]
    assert outputs["OUT_IMAGE_URL"].tolist() == [[b"data:1"]]
    assert json.loads(outputs["REQUEST"][0, 0])["input_tokens"] == 9


def test_a_prompt_without_images_is_sent_whole_with_none() -> None:
    text = json.dumps([{"role": "user", "content": "abc"}])
    inputs = {"MESSAGES": texts([text]), "prompt_only": True}
    outputs = tensors(answer_of(Preprocessing(SHOWING, Path()), inputs, showing()))
    assert outputs["OUT_IMAGE_URL"].tolist() == [[b""]]
    assert outputs["INPUT_ID"].shape[1] > 1


def test_the_orchestrator_does_the_same() -> None:
    sent: list[Any] = []

    def answer(request: Any) -> Iterator[FakeResponse]:
        sent.append({tensor.name(): tensor.as_numpy().tolist() for tensor in request.inputs()})
        yield engine_response(b"hi")

    stage = Orchestrator({**SHOWING, "streams": True}, Path())
    stage.start(showing(pb_utils=FakeBackendUtils(models={"tensorrt_llm": answer}), decoupled=True))
    messages = json.dumps([{"role": "user", "content": SHOWN}])
    request = FakeRequest({"messages": texts([messages]), "image_url": texts(["data:1"])})
    stage.execute([request])
    ((inputs,), last) = sent, tensors(request.responses[-1])
    assert (inputs["input_ids"], inputs["input_lengths"]) == ([[97]], [[1]])
    assert inputs["image_url"] == [[b"data:1"]]
    assert last["num_input_tokens"].tolist() == [[9]]


class Result:
    """A result of ``LLM.generate_async``: each output contains all tokens so far."""

    def __init__(self, tokens: list[int]) -> None:
        self.tokens, self.aborted = tokens, False

    def __iter__(self) -> Any:
        return (self._output(end) for end in range(1, len(self.tokens) + 1))

    def result(self) -> Any:
        return self._output(len(self.tokens))

    def abort(self) -> None:
        self.aborted = True

    def _output(self, end: int) -> Any:
        return SimpleNamespace(outputs=[SimpleNamespace(token_ids=self.tokens[:end])])


@pytest.fixture
def llm(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Install a fake tensorrt_llm that records its arguments."""
    recorded = SimpleNamespace(result=Result([5, 6, 7, 8]), calls=[], options={})

    class Llm:
        def __init__(self, **options: Any) -> None:
            recorded.options = options

        def generate_async(self, ids: Any, sampling: Any, **kwargs: Any) -> Any:
            recorded.calls.append((sampling, kwargs))
            return recorded.result

        def shutdown(self) -> None:
            pass

    module, api = ModuleType("tensorrt_llm"), ModuleType("tensorrt_llm.llmapi")
    module.LLM, module.SamplingParams = Llm, SimpleNamespace  # type: ignore[attr-defined]
    api.GuidedDecodingParams = SimpleNamespace  # type: ignore[attr-defined]
    api.KvCacheConfig = api.SchedulerConfig = dict  # type: ignore[attr-defined]
    api.CapacitySchedulerPolicy = SimpleNamespace(MAX_UTILIZATION=1)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "tensorrt_llm", module)
    monkeypatch.setitem(sys.modules, "tensorrt_llm.llmapi", api)
    return recorded


def ask_llm(
    streams: bool = False, guided: str = "", sampler: str = "", **extra: Any
) -> list[list[int]]:
    """Send one request to ``LlmApi`` and return the ids of its responses."""
    settings = {
        "streams": streams, "stand_in": False, "scheduler": "MAX_UTILIZATION", "path": "model",
        "max_batch_size": 4, "dtype": "auto", "tensor_parallel": 1,
        "pipeline_parallel": 1, "kv_cache": {"enable_block_reuse": False},
        "guided_decoding_backend": guided, "sampler_type": sampler,
    }  # fmt: skip
    stage = LlmApi(settings, Path())
    stage.start(parts())
    lists = {"input_ids": [[1, 2]], "input_lengths": [[2]], "request_output_len": [[8]]}
    inputs = {name: np.array(values, np.int32) for name, values in lists.items()}
    request = FakeRequest({**inputs, "streaming": np.array([[streams]]), **extra})
    stage.execute([request])
    stage.finalize()
    assert request.closed
    return [r.tensors["output_ids"].reshape(-1).tolist() for r in request.responses]


def test_bad_words_reach_the_llm_api(llm: Any) -> None:
    ask_llm(bad_words_list=word_tensor([[[9], [3, 4]]]))
    ((sampling, _),) = llm.calls
    assert sampling.bad_token_ids == [9]
    # A word of several tokens, as its _get_bad_words reads it.
    assert sampling.bad is not None
    assert sampling._bad_word_ids == [[3, 4]]
    assert llm.options["kv_cache_config"] == {"enable_block_reuse": False}


@pytest.mark.parametrize("sampler", ["", "TRTLLMSampler"])
def test_the_llm_api_gets_the_sampler_that_honours_its_options(llm: Any, sampler: str) -> None:
    penalty = np.array([[1.5]], np.float32)
    ask_llm(sampler=sampler, repetition_penalty=penalty, seed=np.array([[7]], np.uint64))
    assert llm.options.get("sampler_type", "") == sampler
    assert (llm.calls[0][0].repetition_penalty, llm.calls[0][0].seed) == (1.5, 7)


def test_a_guide_reaches_the_llm_api(llm: Any) -> None:
    guide = {"guided_decoding_guide_type": texts(["regex"]), "guided_decoding_guide": texts(["a+"])}
    ask_llm(guided="xgrammar", **guide)
    assert llm.calls[0][0].guided_decoding == SimpleNamespace(regex="a+")
    assert llm.options["guided_decoding_backend"] == "xgrammar"
    assert not llm.options["skip_tokenizer_init"]
    # With a tokenizer, SamplingParams would overwrite such words.
    with pytest.raises(KeyError):
        ask_llm(guided="xgrammar", bad_words_list=word_tensor([[[3, 4]]]))
    assert len(llm.calls) == 1


@pytest.mark.parametrize(
    ("streams", "pieces"), [(False, [[5, 6, 7, 8]]), (True, [[5], [6], [7], [8], []])]
)
def test_the_llm_api_answers_in_the_engines_tensors(
    llm: Any, streams: bool, pieces: list[list[int]]
) -> None:
    assert ask_llm(streams) == pieces
    ((sampling, kwargs),) = llm.calls
    assert kwargs == {"streaming": streams}
    assert (sampling.top_k, sampling.temperature, sampling.max_tokens) == (1, None, 8)


def test_the_llm_api_stops_at_a_stop_word(llm: Any) -> None:
    pieces = ask_llm(True, stop_words_list=word_tensor([[[6, 7]]]))
    assert [token for piece in pieces for token in piece] == [5, 6, 7]
    assert llm.result.aborted
