"""The choice between several Tritons, and the exclusion of those that fail."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from llmserve.client import Completion, Computed, ModelInfo, Piece
from llmserve.errors import LLMServeError, ModelDiedError, RequestRejectedError, UnreachableError
from llmserve.plugin import Address
from llmserve.runtime.contract import CACHE_SALT
from llmserve.server import health
from llmserve_gateway import replicas
from llmserve_gateway.replicas import Replicas, _Request, blocks, session_hash
from llmserve_gateway.triton_metrics import join_pages

SYSTEM = {"role": "system", "content": "You answer questions from sailors. " * 12}


def make_replicas(count: int) -> Replicas:
    return Replicas([Address(f"127.0.0.1:{port}") for port in range(1, count + 1)])


def make_request(prompt: str = "", session: str = "", **options: Any) -> _Request:
    name = session_hash("m", session, options)
    return _Request("m", blocks("m", prompt, options), None, name)


def chat(*texts: str) -> _Request:
    messages = [{"role": "user", "content": text} for text in texts]
    return make_request(messages=[SYSTEM, *messages])


@given(
    st.integers(2, 5),
    st.lists(st.tuples(st.booleans(), st.integers(0, 9), st.integers(0, 99)), max_size=200),
)
def test_no_replica_exceeds_the_others_by_more_than_the_limit(
    count: int, events: list[tuple[bool, int, int]]
) -> None:
    group, in_flight = make_replicas(count), []
    for arrives, topic, number in events:
        if arrives:
            least = min(replica.running for replica in group.all)
            chosen = group.choose(make_request(f"{topic}" * 600 + str(number)))
            chosen.running += 1
            in_flight.append(chosen)
            assert chosen.running <= least + max(2, 1 + least / 4)
        elif in_flight:
            in_flight.pop(number % len(in_flight)).running -= 1


@given(st.integers(2, 5), st.text(max_size=2000))
def test_a_prompt_returns_to_the_replica_that_has_read_it(count: int, prompt: str) -> None:
    group, others = make_replicas(count), make_replicas(count)
    first = group.choose(make_request(prompt))
    assert group.choose(make_request(prompt)) is first
    assert others.choose(make_request(prompt)).url == first.url, "all gateways choose the same"


@given(
    st.integers(2, 5),
    st.lists(
        st.tuples(st.sampled_from(["", "a", "b", "c"]), st.text(max_size=600), st.integers(0, 9)),
        max_size=60,
    ),
)
def test_a_session_stays_where_it_was_answered_unless_that_is_busier(
    count: int, requests: list[tuple[str, str, int]]
) -> None:
    group = make_replicas(count)
    answered: dict[str, set[str]] = {}
    for session, prompt, number in requests:
        # How busy each is varies from request to request.
        for place, replica in enumerate(group.all):
            replica.running = (number * 7 + place * 3) % 5
        least = min(replica.running for replica in group.all)
        free = {replica.url for replica in group.all if replica.running < least + 2}
        chosen = group.choose(make_request(prompt, session)).url
        assert chosen in free
        if session:
            before = answered.setdefault(session, set())
            assert chosen in before or not before & free
            before.add(chosen)


@given(st.integers(2, 5), st.permutations([(s, p) for s in "abc" for p in "xyz"]))
def test_all_gateways_choose_the_same_for_a_session_in_whatever_order(
    count: int, words: list[tuple[str, str]]
) -> None:
    requests = [(session, f"{word} of {session}") for session, word in words]
    group, others = make_replicas(count), make_replicas(count)
    ours = {
        session: group.choose(make_request(prompt, session)).url for session, prompt in requests
    }
    for session, prompt in requests:
        assert group.choose(make_request(prompt, session)).url == ours[session]
    for session, url in ours.items():
        # One that has seen nothing yet, and is asked something else.
        assert make_replicas(count).choose(make_request("another", session)).url == url
        assert others.choose(make_request(session + "w" * 300, session)).url == url


def test_a_session_is_of_its_model_and_its_key() -> None:
    hashes = {
        session_hash(model, session, {CACHE_SALT: salt} if salt else {})
        for model in ("m", "n")
        for session in ("a", "b")
        for salt in ("", "one", "two")
    }
    assert len(hashes) == 12
    assert session_hash("m", "", {CACHE_SALT: "one"}) == b""


def test_a_session_is_asked_of_its_replica_and_its_name_goes_no_further() -> None:
    async def go() -> None:
        group = make_replicas(3)
        clients = [Scripted("a") for _ in group.all]
        for replica, client in zip(group.all, clients, strict=True):
            cast(Any, replica).client = client
        for number in range(4):
            await group.generate("m", f"{number}" * 300, session="one")
            assert [p.text async for p in group.stream("m", f"s{number}", session="one")] == ["a"]
        assert sorted(client.requests for client in clients) == [0, 0, 8]
        assert not [client.options for client in clients if "session" in client.options]
        await group.close()

    asyncio.run(go())


def test_a_replica_whose_answers_are_wrong_is_asked_if_there_is_no_other() -> None:
    group = make_replicas(2)
    one, other = group.all
    group.distrust({one.url: frozenset({"m"}), other.url: frozenset({"another"})})
    other.running = 9
    assert all(group.choose(make_request(str(number))) is other for number in range(9))
    group.distrust({one.url: frozenset({"m"}), other.url: frozenset({"m"})})
    assert group.choose(make_request()) is one
    group.distrust({other.url: frozenset({"m"})})
    assert group.choose(make_request()) is one


def test_a_conversation_stays_even_if_all_have_read_its_system_prompt() -> None:
    group = make_replicas(4)
    for replica in group.all:
        for other in group.all:
            other.running = 2 * (other is not replica)
        question = "the first question to " + replica.url + "?" * 300
        assert group.choose(chat(question)) is replica
    for replica in group.all:
        replica.running = 1
    for replica in group.all:
        question = "the first question to " + replica.url + "?" * 300
        assert group.choose(chat(question, "and what then?")) is replica
    group.all[2].running = 0
    assert group.choose(chat("a question from another user")) is group.all[2]


def test_an_excluded_replica_is_only_chosen_if_no_other_is_left() -> None:
    group = make_replicas(2)
    first = group.choose(make_request("x"))
    (second,) = set(group.all) - {first}
    first.excluded.add("m")
    assert group.choose(make_request("x")) is second
    assert group.choose(_Request("other", blocks("other", "", {}), None)) in group.all
    second.excluded.add("")
    assert group.choose(make_request("x")) in group.all


class Scripted:
    """A client that yields each text of its script as a piece, and raises each error."""

    def __init__(self, *script: str | LLMServeError) -> None:
        self.script = script
        self.requests = 0
        self.options: set[str] = set()

    async def model(self, name: str) -> ModelInfo:
        return ModelInfo(name, "unary", False, None, {}, {})

    async def compute(self, *_: Any, **__: Any) -> Computed:
        return Computed({}, (len((await self.generate()).text),))

    async def stream(self, *_: Any, **options: Any) -> AsyncGenerator[Piece, None]:
        self.requests += 1
        self.options |= options.keys()
        for item in self.script:
            if isinstance(item, LLMServeError):
                raise item
            yield Piece(item)

    async def generate(self, *_: Any, **options: Any) -> Completion:
        texts = [piece.text async for piece in self.stream(**options)]
        return Completion("".join(texts), "stop", 1, 1)

    async def close(self) -> None: ...


GONE = UnreachableError("the connection broke")
DEAD = ModelDiedError("the process that runs 'm' has died")
REFUSED = RequestRejectedError("the server refused the request: max_tokens must be above 0")


async def answer_of(*scripts: list[str | LLMServeError]) -> tuple[str, list[int], Replicas]:
    """Ask replicas with these scripts, in this order; return also how often each was asked."""
    group = make_replicas(len(scripts))
    clients = [Scripted(*script) for script in scripts]
    for number, (replica, client) in enumerate(zip(group.all, clients, strict=True)):
        replica.client, replica.running = client, number  # type: ignore[assignment]
    text = ""
    try:
        async for piece in group.stream("m", "x"):
            text += piece.text
    except LLMServeError as error:
        text += f"<{error.problem}>"
    assert [replica.running for replica in group.all] == list(range(len(scripts)))
    return text, [client.requests for client in clients], group


@pytest.mark.parametrize(
    ("first", "text", "counts"),
    [
        ([GONE], "b", [1, 1]),
        ([DEAD], "b", [1, 1]),
        (["a", GONE], f"a<{GONE.problem}>", [1, 0]),
        ([REFUSED], f"<{REFUSED.problem}>", [1, 0]),
    ],
)
def test_a_request_is_retried_before_its_first_piece_if_the_replica_failed(
    first: list[str | LLMServeError], text: str, counts: list[int]
) -> None:
    assert asyncio.run(answer_of(first, ["b"]))[:2] == (text, counts)


@given(st.lists(st.integers(0, 3), min_size=1, max_size=5))
def test_values_are_computed_where_least_is_running(running: list[int]) -> None:
    group = make_replicas(len(running))
    for replica, count in zip(group.all, running, strict=True):
        replica.running = count
    for _ in range(3):
        assert group.choose(_Request("m", (), None)).running == min(running)
    assert not group._readers


def test_values_that_a_replica_has_failed_to_compute_come_from_another() -> None:
    async def go() -> None:
        group = make_replicas(2)
        scripts: list[list[str | LLMServeError]] = [[GONE], ["abc"]]
        for replica, script in zip(group.all, scripts, strict=True):
            cast(Any, replica).client = Scripted(*script)
        computed = [await group.compute("m", ["text"]) for _ in range(3)]
        assert [values.input_tokens for values in computed] == [(3,)] * 3
        await group.close()

    asyncio.run(go())


def test_if_all_replicas_fail_the_error_is_raised() -> None:
    assert asyncio.run(answer_of([GONE], [GONE]))[:2] == (f"<{GONE.problem}>", [1, 1])


def test_a_failed_replica_serves_again_after_it_answers_a_canary(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    canaries = [Scripted(GONE), Scripted("it", " lives")]
    monkeypatch.setattr(health, "BACK_EVERY", 0.001)

    async def go() -> None:
        _, _, group = await answer_of([GONE], ["b"])
        connect: Callable[[str], Any] = lambda _, **_options: canaries.pop(0)  # noqa: E731
        monkeypatch.setattr(replicas, "connect_async", connect)
        failed = group.all[0]
        assert not failed.serves("m")
        assert not failed.serves("any other")
        while not failed.serves("m"):
            await asyncio.sleep(0.001)
        assert not canaries
        assert (await group.generate("m", "x")).text == "it lives"
        await group.close()

    asyncio.run(go())


def test_metrics_of_several_tritons_are_joined() -> None:
    page = (
        '# HELP n Count of {things}\n# TYPE n counter\nn{{model="a}} b",version="1"}} {things}\n'
        "# HELP m Memory\n# TYPE m gauge\nm 2.5e-3\n"
    )
    pages = {"one:1": page.format(things=1), "other:1": page.format(things=7)}
    n, m = text_string_to_metric_families(join_pages(pages))
    assert (n.name, m.name) == ("n", "m")
    labels = {"model": "a} b", "version": "1"}
    samples = [(sample.labels, sample.value) for sample in n.samples]
    assert samples == [({**labels, "replica": "one:1"}, 1), ({**labels, "replica": "other:1"}, 7)]
    assert [sample.value for sample in m.samples] == [0.0025, 0.0025]
