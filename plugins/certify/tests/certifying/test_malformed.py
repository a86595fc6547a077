"""What no server with OpenAI's API may send: it fails the check that asked, and ends none."""

from __future__ import annotations

import json
import math
import threading
from collections.abc import Iterator, Sequence
from copy import deepcopy
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmserve.client import Computed, ModelInfo
from llmserve_certify.checks import CHECKS
from llmserve_certify.examine import Examination, Verdict
from llmserve_certify.openai import OpenAIEndpoint
from llmserve_certify.openai_answers import read_answer
from llmserve_certify.run import run_check
from llmserve_certify.triton import TritonEndpoint

from .toy_server import ToyModel

LOGPROBS = {
    "tokens": [" the", " of"],
    "token_logprobs": [-0.5, -1.5],
    "top_logprobs": [{" the": -0.5, " to": -2.0}, {" of": -1.5}],
}
CHAT_LOGPROBS = {
    "content": [
        {
            "token": " the",
            "logprob": -0.5,
            "top_logprobs": [{"token": " the", "logprob": -0.5}],
        }
    ]
}
CHOICE = {"index": 0, "text": " the of", "finish_reason": "length", "logprobs": LOGPROBS}
DELTA = {"index": 0, "delta": {"content": " the"}, "logprobs": CHAT_LOGPROBS}
USAGE = {"prompt_tokens": 3, "completion_tokens": 2}
ANSWER = {"choices": [CHOICE], "usage": USAGE}
PARTS = (ANSWER, {"choices": [DELTA], "usage": None})
VECTORS = {"data": [{"index": 0, "embedding": [0.5, 0.25]}]}
NAMES = ("log-probabilities", "stream-joins", "usage", "finish-reason", "ignore-eos", "no-echo")
VALUES = ("values-are-the-models", "values-same-in-a-batch", "cut-is-told")


class Server(ThreadingHTTPServer):
    """Answers whatever it is told, and streams it as the first of two parts."""

    request_queue_size = 64
    answer: bytes = b""
    part: bytes = b""


class Handler(BaseHTTPRequestHandler):
    server: Server

    def log_message(self, *args: object) -> None:
        pass

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        data = self.server.answer
        if body.get("stream"):
            last = json.dumps(ANSWER).encode()
            data = b"data: %b\n\ndata: %b\n\ndata: [DONE]\n\n" % (self.server.part, last)
        self.send_response(200)
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with Server(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.02,))
        thread.start()
        yield server
        server.shutdown()
        thread.join()


class Toys:
    """The model of embeddings to compare with."""

    name, precision, limit = "toy", "float32", 8

    def describe(self) -> dict[str, str]:
        return {}

    def values(self, texts: Sequence[str]) -> list[Any]:
        return [np.array([0.5, 0.25], np.float32) for _ in texts]

    def mistakes(self, text: str) -> Iterator[tuple[str, Any]]:
        yield "it is doubled", np.array([1.0, 0.5], np.float32)

    def noise(self, precision: str, texts: Sequence[str]) -> float:
        return 1e-6


def verdicts(server: Server, *names: str, task: str = "generate") -> list[Verdict]:
    url = f"http://127.0.0.1:{server.server_address[1]}/v1"
    endpoint = OpenAIEndpoint(url, "toy", task=task)
    exam = Examination(endpoint, ToyModel(), "float32", prompts=("Hello", "A"), encoder=Toys())
    return [run_check(exam, check) for check in CHECKS if check.name in names]


@pytest.mark.parametrize(
    ("part", "words"),
    [
        (b"{", "it is no JSON"),
        (b"\xff", "it is no JSON"),
        (b"[" * 100_000, "it is nested too deep"),
        (b"[]", "it is [], not an object"),
        (b"{}", "it has no choices"),
        (b'{"choices": null}', "it has no choices"),
        (b'{"choices": [null]}', "its choice is null, not an object"),
        (b'{"choices": [{"index": 0}]}', "its choice has neither text nor delta"),
        (b'{"choices": [{"text": 5}]}', "text is 5, not a text"),
        (b'{"choices": [{"delta": "a"}]}', 'delta is "a", not an object'),
        (b'{"choices": [{"text": "a", "finish_reason": true}]}', "finish_reason is true"),
        (b'{"choices": [], "usage": {"prompt_tokens": "3"}}', 'prompt_tokens is "3", not a whole'),
    ],
)
def test_a_malformed_part_of_a_stream_is_the_servers_fault(
    server: Server, part: bytes, words: str
) -> None:
    server.answer, server.part = json.dumps(ANSWER).encode(), part
    (found,) = verdicts(server, "stream-joins")
    assert found.state == "failed"
    assert f"a part of the stream is not of OpenAI's API: {words}" in found.words
    assert found.got is not None
    assert found.got.startswith(part[:100].decode(errors="replace"))
    assert found.curl.startswith("curl -sN")


@pytest.mark.parametrize(
    ("logprobs", "words"),
    [
        ([], "logprobs is [], not an object"),
        ("many", 'logprobs is "many", not an object'),
        ({"content": [{"token": "a", "logprob": None}]}, "the log-probability of 'a' is null"),
        ({"content": [{"logprob": -1.0}]}, "a token of logprobs is null, not a text"),
        ({"content": [{"token": "a", "logprob": 10**400}]}, "a number is too large"),
        ({"content": ["a"]}, 'an entry of logprobs is "a"'),
        ({**LOGPROBS, "token_logprobs": [-0.5, None]}, "the log-probability of ' of' is null"),
        ({**LOGPROBS, "token_logprobs": [-1.5]}, "logprobs has 2 tokens, 1 token_logprobs"),
        ({**LOGPROBS, "top_logprobs": [{" the": None}, None]}, "the log-probability of ' the' is"),
    ],
)
def test_malformed_log_probabilities_are_the_servers_fault(
    server: Server, logprobs: Any, words: str
) -> None:
    server.answer = json.dumps({"choices": [{**CHOICE, "logprobs": logprobs}]}).encode()
    (found,) = verdicts(server, "log-probabilities")
    assert found.state == "failed"
    assert words in found.words
    assert found.got
    assert found.curl


def test_what_the_api_leaves_open_is_read(server: Server) -> None:
    first = {"choices": [{"index": 0, "delta": {"role": "assistant", "content": None}}]}
    last = {"choices": [{"index": 0, "finish_reason": "length"}], "usage": None}
    # As Azure's filter sends it, behind the text that it is about.
    filtered = {"index": 0, "finish_reason": None, "content_filter_offsets": {"check_offset": 0}}
    parts: list[Any] = [first, last, {"choices": []}, {"usage": USAGE}, {"choices": [filtered]}]
    for part in (*parts, {"choices": None, "usage": USAGE}):
        server.answer, server.part = json.dumps(ANSWER).encode(), json.dumps(part).encode()
        (found,) = verdicts(server, "stream-joins")
        assert found.state == "passed"


def test_the_first_token_of_a_prompt_that_is_repeated_has_no_log_probability() -> None:
    logprobs = {**LOGPROBS, "token_logprobs": [None, -1.5], "top_logprobs": [None, {" of": -1.5}]}
    answer = read_answer(json.dumps({"choices": [{**CHOICE, "logprobs": logprobs}]}).encode())
    first, second = answer.logprobs or ()
    assert math.isnan(first.logprob)
    assert second.logprob == -1.5


def test_values_for_other_texts_than_were_asked_are_the_servers_fault(server: Server) -> None:
    server.answer = b'{"data": []}'
    for found in verdicts(server, *VALUES, task="embed"):
        assert (found.state, found.got) == ("failed", "0 values")
        assert "1 texts have 0 values" in found.words


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.sampled_from([10**400, "\ud83d", "\ufffd", " the", -0.5])
    | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["text", "token", "logprob", "content", "a"]), inner)
    ),
    max_leaves=5,
)


def places(content: Any) -> Iterator[tuple[Any, ...]]:
    """Yield where a value stands, of each value in a JSON."""
    yield ()
    parts = dict(enumerate(content)) if isinstance(content, list) else content
    for name, inner in parts.items() if isinstance(parts, dict) else ():
        yield from ((name, *place) for place in places(inner))


@st.composite
def changed(draw: st.DrawFn, content: Any) -> Any:
    """Draw a JSON with another value, or none, in place of one of its values."""
    *way, last = draw(st.sampled_from([("whole", *place) for place in places(content)]))
    whole = {"whole": deepcopy(content)}
    found: Any = whole
    for name in way:
        found = found[name]
    if draw(st.booleans()) and way:
        del found[last]
    else:
        found[last] = draw(JSON)
    return whole["whole"]


@settings(max_examples=40, deadline=None)
@given(answer=changed(ANSWER), part=st.one_of(*map(changed, PARTS)))
def test_no_answer_ends_a_check_by_an_error(server: Server, answer: Any, part: Any) -> None:
    server.answer, server.part = json.dumps(answer).encode(), json.dumps(part).encode()
    for verdict in verdicts(server, *NAMES):
        assert verdict.state != "unfinished", verdict.words


@settings(max_examples=25, deadline=None)
@given(answer=changed(VECTORS))
def test_no_values_end_a_check_by_an_error(server: Server, answer: Any) -> None:
    server.answer = json.dumps(answer).encode()
    for verdict in verdicts(server, *VALUES, task="embed"):
        assert verdict.state != "unfinished", verdict.words


@pytest.mark.parametrize(
    "outputs",
    [
        {},
        {"embedding": np.zeros(2, np.float32)},
        {"embedding": np.array([["a", "b"]], np.object_)},
        {"score": np.array([["a"]], np.object_)},
        {"label": np.array([["a", "b"]], np.object_)},
        {"label": np.array([["a"]], np.object_), "probability": np.zeros((2, 1), np.float32)},
        {"label": np.array([["a", "b"]], np.object_), "probability": np.zeros((1, 1), np.float32)},
    ],
)
def test_outputs_of_another_shape_are_the_fault_of_a_triton(outputs: dict[str, Any]) -> None:
    class Client:
        def model(self, name: str) -> ModelInfo:
            return ModelInfo(name, "unary", True, None, {}, {}, task="embed")

        def compute(self, name: str, texts: object, **options: object) -> Computed:
            return Computed(outputs)

    exam = Examination(TritonEndpoint(Client(), "m"), encoder=Toys())  # type: ignore[arg-type]
    (check,) = (check for check in CHECKS if check.name == "values-are-the-models")
    found = run_check(exam, check)
    assert found.state == "failed"
    assert "the outputs are not those of a model with values" in found.words
    assert found.curl
