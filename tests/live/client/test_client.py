"""The blocking client against a real Triton."""

from __future__ import annotations

import json
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import pytest

from llmserve import errors
from llmserve.client import Client, connect
from llmserve.server import Server

if TYPE_CHECKING:
    from tests.live.client.conftest import Failure, Journal

EXCHANGES = {
    "echo": "unary",
    "plain": "unary",
    "foreign": "unary",
    "words": "stream",
    "steps": "sequence",
}
LONG = "word " * 200


def test_what_the_server_has(client: Client) -> None:
    assert client.server_ready()
    assert client.model_ready("echo")
    assert not client.model_ready("nothing")
    assert client.models() == sorted(EXCHANGES)
    assert {name: client.model(name).exchange for name in EXCHANGES} == EXCHANGES


def test_options_reach_our_models_as_parameters(client: Client) -> None:
    options = {"max_tokens": 3, "temperature": 0.1, "ignore_eos": True, "seed": 2**64 - 1}
    answer = client.generate("echo", "wie schön", stop_words=["ü", "\0"], **options)
    assert (answer.finish_reason, answer.input_tokens, answer.output_tokens) == ("stop", 10, 10)
    seen = json.loads(answer.text)
    assert seen["text"] == "wie schön"
    assert seen["inputs"] == {}
    assert json.loads(seen["parameters"].pop("stop_words")) == ["ü", "\0"]
    assert seen["parameters"] == options | {"seed": str(2**64 - 1)}


def test_options_reach_other_models_as_inputs(client: Client) -> None:
    options: dict[str, Any] = {"max_tokens": 3, "ignore_eos": True, "seed": 7, "other": "x"}
    answers = client.generate("foreign", ["a", "b"], stop_words=["u", "v"], **options)
    for answer in answers:
        seen = json.loads(answer.text)
        assert seen["parameters"] == {"other": "x"}
        assert seen["inputs"] == {
            "max_tokens": "[[3], [3]]",
            "ignore_eos": "[[True], [True]]",
            "random_seed": "[[7], [7]]",
            "stop_words": "[[b'u', b'v'], [b'u', b'v']]",
        }


def test_requests_with_different_options_share_a_batch(client: Client) -> None:
    def ask(number: int) -> int:
        options = {"seed": number} if number % 2 else {"max_tokens": number}
        return int(json.loads(client.generate("echo", "p", **options).text)["together"])

    with ThreadPoolExecutor(8) as pool:
        assert max(pool.map(ask, range(8))) > 4


@pytest.mark.parametrize("model", ["echo", "plain", "words", "steps"])
def test_many_prompts_get_their_own_answers(client: Client, model: str) -> None:
    prompts = [f"prompt {number}" for number in range(20)]
    answers = client.generate(model, prompts)
    assert [answer.finish_reason for answer in answers] == ["stop"] * 20
    texts = [answer.text for answer in answers]
    if model in ("echo", "plain"):
        texts = [json.loads(text)["text"] for text in texts]
    spaced = {"steps": [prompt.replace(" ", "") for prompt in prompts]}
    assert texts == spaced.get(model, prompts)
    assert client.generate(model, []) == []


@pytest.mark.parametrize("model", ["words", "steps"])
def test_an_answer_comes_in_pieces(client: Client, model: str) -> None:
    pieces = list(client.stream(model, ["a b c", "x"]))
    rows = [[p.text for p in pieces if p.index == row] for row in (0, 1)]
    assert rows == [["a", "b", "c"], ["x"]]
    assert [p.index for p in pieces if p.finish_reason] == [1, 0]


def test_a_unary_model_streams_one_piece(client: Client) -> None:
    (piece,) = client.stream("echo", "p")
    assert json.loads(piece.text)["text"] == "p"


@pytest.mark.parametrize("model", ["words", "steps"])
def test_concurrent_streams_on_one_client_do_not_mix(client: Client, model: str) -> None:
    barrier = threading.Barrier(32)

    def ask(number: int) -> bool:
        words = [f"{number}-{step}" for step in range(20)]
        barrier.wait()
        return [piece.text for piece in client.stream(model, " ".join(words))] == words

    with ThreadPoolExecutor(32) as pool:
        assert all(pool.map(ask, range(32)))


def test_failures_are_one_line(client: Client, failure: Failure) -> None:
    with pytest.raises(errors.LLMServeError) as caught:
        client.generate(failure.model, **failure.call)
    assert type(caught.value) is failure.kind
    assert failure.words in str(caught.value)
    assert "\n" not in str(caught.value)
    assert "/srv" not in str(caught.value)


def test_an_error_inside_a_stream_comes_after_its_pieces(client: Client) -> None:
    pieces = client.stream("words", "one two refuse three")
    assert [next(pieces).text, next(pieces).text] == ["one", "two"]
    with pytest.raises(errors.RequestRejectedError, match="no such word"):
        next(pieces)


def test_a_deadline_covers_the_wait_between_pieces(client: Client, journal: Journal) -> None:
    begin = time.monotonic()
    with pytest.raises(errors.RequestTimeoutError):
        for _ in client.stream("words", f"late {LONG}", delay=0.2, timeout=0.5):
            pass
    assert 0.4 < time.monotonic() - begin < 2
    assert journal.shows_cancelled(f"late {LONG}")


def test_leaving_a_stream_early_reaches_the_server(client: Client, journal: Journal) -> None:
    for _ in client.stream("words", f"early {LONG}"):
        break
    assert journal.shows_cancelled(f"early {LONG}")


def test_a_sequence_is_ended_whatever_happens(url: str, journal: Journal) -> None:
    with connect(url) as client:
        for _ in client.stream("steps", LONG):
            break
        with suppress(errors.RequestRejectedError):
            client.generate("steps", "a refuse")
        with suppress(errors.RequestTimeoutError):
            client.generate("steps", LONG, delay=0.2, timeout=0.3)
        with suppress(ZeroDivisionError), client.sequence("steps") as steps:
            assert (steps.send("a b").text, steps.send().finish_reason) == ("a", "stop")
            raise ZeroDivisionError
        left_open = client.stream("steps", LONG)
        next(left_open)
    assert journal.shows_all_ended(5)


def test_closing_the_client_ends_what_is_under_way(url: str) -> None:
    client = connect(url)
    pieces = client.stream("words", LONG)
    next(pieces)
    client.close()
    with pytest.raises(errors.RequestCancelledError):
        list(pieces)
    with pytest.raises(errors.UsageError, match="closed"):
        client.generate("words", "a")


def test_a_server_that_dies_is_an_error_and_no_hang(another_server: Server) -> None:
    with connect(another_server.grpc_url) as client:
        pieces = client.stream("words", LONG, delay=0.1)
        next(pieces)
        threading.Timer(0.2, lambda: another_server.stop(grace=0)).start()
        with pytest.raises(errors.UnreachableError, match="broke"):
            list(pieces)
        another_server.wait(10)
        assert not client.server_ready()
        with pytest.raises(errors.UnreachableError, match="llmserve serve"):
            client.generate("words", "a")
