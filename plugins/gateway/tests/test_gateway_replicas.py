"""Which of several Tritons is asked, and what is made of one that fails."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from llmserve.client import Completion, Piece
from llmserve.errors import LLMServeError, RequestRejectedError, UnreachableError
from llmserve_gateway import replicas
from llmserve_gateway.replicas import Replicas, _Request, blocks
from llmserve_gateway.triton_metrics import joined

SYSTEM = {"role": "system", "content": "You answer questions of sailors. " * 12}


def some(count: int) -> Replicas:
    return Replicas([f"127.0.0.1:{port}" for port in range(1, count + 1)])


def asked(prompt: str = "", **options: Any) -> _Request:
    return _Request("m", blocks("m", prompt, options), None)


def chat(*texts: str) -> _Request:
    said = [{"role": "user", "content": text} for text in texts]
    return asked(messages=[SYSTEM, *said])


@given(
    st.integers(2, 5),
    st.lists(st.tuples(st.booleans(), st.integers(0, 9), st.integers(0, 99)), max_size=200),
)
def test_no_replica_is_ahead_by_more_than_the_bound(
    count: int, events: list[tuple[bool, int, int]]
) -> None:
    group, under_way = some(count), []
    for comes, topic, which in events:
        if comes:
            least = min(one.running for one in group.all)
            chosen = group.choose(asked(f"{topic}" * 600 + str(which)))
            chosen.running += 1
            under_way.append(chosen)
            assert chosen.running <= least + max(2, 1 + least / 4)
        elif under_way:
            under_way.pop(which % len(under_way)).running -= 1


@given(st.integers(2, 5), st.text(max_size=2000))
def test_a_prompt_comes_back_to_who_has_read_it(count: int, prompt: str) -> None:
    group, others = some(count), some(count)
    first = group.choose(asked(prompt))
    assert group.choose(asked(prompt)) is first
    assert others.choose(asked(prompt)).url == first.url, "another gateway says the same"


def test_a_conversation_stays_though_all_have_read_its_system_prompt() -> None:
    group = some(4)
    for one in group.all:
        for other in group.all:
            other.running = 2 * (other is not one)
        assert group.choose(chat("the first question of " + one.url + "?" * 300)) is one
    for one in group.all:
        one.running = 1
    for one in group.all:
        question = "the first question of " + one.url + "?" * 300
        assert group.choose(chat(question, "and what then?")) is one
    group.all[2].running = 0
    assert group.choose(chat("somebody else's question")) is group.all[2]


def test_who_is_out_is_asked_only_where_nobody_else_is_left() -> None:
    group = some(2)
    first = group.choose(asked("x"))
    (second,) = set(group.all) - {first}
    first.out.add("m")
    assert group.choose(asked("x")) is second
    assert group.choose(_Request("other", blocks("other", "", {}), None)) in group.all
    second.out.add("")
    assert group.choose(asked("x")) in group.all


class Scripted:
    """A client whose answers are a list: a text is a piece, an error is raised."""

    def __init__(self, *script: str | LLMServeError) -> None:
        self.script = script
        self.asked = 0

    async def stream(self, *_: Any, **__: Any) -> AsyncGenerator[Piece, None]:
        self.asked += 1
        for each in self.script:
            if isinstance(each, LLMServeError):
                raise each
            yield Piece(each)

    async def generate(self, *_: Any, **__: Any) -> Completion:
        return Completion("".join([piece.text async for piece in self.stream()]), "stop", 1, 1)

    async def close(self) -> None: ...


GONE = UnreachableError("the connection broke")
DEAD = RequestRejectedError("the process that runs 'm' has died")
REFUSED = RequestRejectedError("the server refused the request: max_tokens must be above 0")


async def answer_of(*scripts: list[str | LLMServeError]) -> tuple[str, list[int], Replicas]:
    """Ask replicas that play these scripts, in this order; say how often each was asked."""
    group = some(len(scripts))
    clients = [Scripted(*script) for script in scripts]
    for number, (one, client) in enumerate(zip(group.all, clients, strict=True)):
        one.client, one.running = client, number  # type: ignore[assignment]
    told = ""
    try:
        async for piece in group.stream("m", "x"):
            told += piece.text
    except LLMServeError as error:
        told += f"<{error.problem}>"
    assert [one.running for one in group.all] == list(range(len(scripts)))
    return told, [client.asked for client in clients], group


@pytest.mark.parametrize(
    ("first", "told", "counts"),
    [
        ([GONE], "b", [1, 1]),
        ([DEAD], "b", [1, 1]),
        (["a", GONE], f"a<{GONE.problem}>", [1, 0]),
        ([REFUSED], f"<{REFUSED.problem}>", [1, 0]),
    ],
)
def test_a_request_is_tried_elsewhere_before_its_first_piece_and_for_the_replicas_sake(
    first: list[str | LLMServeError], told: str, counts: list[int]
) -> None:
    assert asyncio.run(answer_of(first, ["b"]))[:2] == (told, counts)


def test_where_all_have_failed_the_error_is_told() -> None:
    assert asyncio.run(answer_of([GONE], [GONE]))[:2] == (f"<{GONE.problem}>", [1, 1])


def test_who_has_failed_is_asked_again_when_a_canary_is_answered(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    canaries = [Scripted(GONE), Scripted("it", " lives")]
    monkeypatch.setattr(replicas, "_AGAIN", 0.001)

    async def go() -> None:
        _, _, group = await answer_of([GONE], ["b"])
        made: Callable[[str], Any] = lambda _: canaries.pop(0)  # noqa: E731
        monkeypatch.setattr(replicas, "connect_async", made)
        one = group.all[0]
        assert not one.answers("m")
        assert not one.answers("any other")
        while not one.answers("m"):
            await asyncio.sleep(0.001)
        assert not canaries
        assert (await group.generate("m", "x")).text == "it lives"
        await group.close()

    asyncio.run(go())


def test_metrics_of_several_tritons_are_one_page() -> None:
    page = (
        '# HELP n Count of {things}\n# TYPE n counter\nn{{model="a}} b",version="1"}} {things}\n'
        "# HELP m Memory\n# TYPE m gauge\nm 2.5e-3\n"
    )
    pages = {"one:1": page.format(things=1), "other:1": page.format(things=7)}
    found = list(text_string_to_metric_families(joined(pages)))
    assert [each.name for each in found] == ["n", "m"]
    labels = {"model": "a} b", "version": "1"}
    told = [(sample.labels, sample.value) for sample in found[0].samples]
    assert told == [({**labels, "replica": "one:1"}, 1), ({**labels, "replica": "other:1"}, 7)]
    assert [sample.value for sample in found[1].samples] == [0.0025, 0.0025]
