"""Conversations that are kept: what requests go on with, whose they are, and how large they get."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import openai
import pytest

from llmserve_gateway.errors import ApiError
from llmserve_gateway.keys import change_key, new_key
from llmserve_gateway.stored_conversations import PageQuery, StoredConversation, items_of
from llmserve_gateway.stored_responses import StoredResponse, StoreLimits, new_id

from .gateways import app_before, client_of
from .keeping import Keeping
from .test_gateway_background_responses import Model, Place, begun, ended, run, until

ASKED: Any = {"model": "m", "input": "Hi"}
FIRST: Any = {"type": "message", "role": "user", "content": "I am Ann."}


def texts(items: Any) -> list[tuple[str, str]]:
    return [(item.role, item.content[0].text) for item in items]


async def listed(client: openai.AsyncOpenAI, id: str, **query: Any) -> list[Any]:
    return [item async for item in client.conversations.items.list(id, order="asc", **query)]


def test_a_conversation_is_gone_on_with(kept: Keeping) -> None:
    async def work() -> None:
        async with Place(kept) as place:
            client = await place.client()
            place.model.gate.set()
            begun = await client.conversations.create(metadata={"of": "ann"}, items=[FIRST])
            assert begun.metadata == {"of": "ann"}
            first = await client.responses.create(**ASKED, conversation=begun.id)
            assert first.conversation
            assert first.conversation.id == begun.id
            second: Any = {"model": "m", "input": "And?", "conversation": {"id": begun.id}}
            streamed = [event.type async for event in await client.responses.create(
                **second, stream=True)]  # fmt: skip
            assert streamed[-1] == "response.completed"
            said = [("user", "I am Ann."), ("user", "Hi"), ("assistant", "to Hi"),
                    ("user", "And?"), ("assistant", "to it")]  # fmt: skip
            items = await listed(client, begun.id)
            assert texts(items) == said
            assert len({item.id for item in items}) == len(items)
            # What the model was asked last is all of it, but for its own answer.
            await client.responses.create(model="m", input="So?", conversation=begun.id)
            assert place.model.asked == ["Hi", "And?", "So?"]
            assert len(place.model.messages) == len(said) + 1

    run(work())


def test_a_conversation_is_read_changed_and_deleted(kept: Keeping) -> None:
    async def work() -> None:
        async with Place(kept) as place:
            client = await place.client()
            id = (await client.conversations.create()).id
            changed = await client.conversations.update(id, metadata={"a": "b"})
            assert (await client.conversations.retrieve(id)) == changed
            more: Any = [
                {"role": "user", "content": "How is Tokyo?"},
                {"role": "assistant", "content": "Let me see."},
                {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
                {"type": "function_call_output", "call_id": "c", "output": "Sunny."},
            ]
            added = await client.conversations.items.create(id, items=more)
            kinds = [item.type for item in added.data]
            assert kinds == ["message", "message", "function_call", "function_call_output"]
            assert [item.id for item in await listed(client, id, limit=1)] == [
                item.id for item in added.data
            ]
            newest: Any = await client.conversations.items.list(id, limit=2)
            assert (newest.first_id, newest.has_more) == (added.data[-1].id, True)
            one = str(added.data[0].id)
            found = await client.conversations.items.retrieve(one, conversation_id=id)
            assert found.type == "message"
            await client.conversations.items.delete(one, conversation_id=id)
            with pytest.raises(openai.NotFoundError):
                await client.conversations.items.retrieve(one, conversation_id=id)
            assert len(await listed(client, id)) == 3
            assert (await client.conversations.delete(id)).deleted
            for act in (client.conversations.retrieve, client.conversations.delete,
                        client.conversations.items.list):  # fmt: skip
                with pytest.raises(openai.NotFoundError):
                    await act(id)
            with pytest.raises(openai.NotFoundError):
                await client.responses.create(**ASKED, conversation=id)

    run(work())


def test_only_what_is_answered_is_added(kept: Keeping) -> None:
    async def work() -> None:
        async with Place(kept) as place:
            client = await place.client()
            id = (await client.conversations.create()).id
            waits = await begun(client, "one", conversation=id)
            await until(lambda: place.model.running == 1)
            await client.responses.cancel(waits.id)
            place.model.gate.set()
            await ended(client, (await begun(client, "break", conversation=id)).id)
            with pytest.raises(openai.APIStatusError):
                await client.responses.create(model="m", input="break", conversation=id)
            assert await listed(client, id) == []
            await ended(client, (await begun(client, "two", conversation=id)).id)
            assert texts(await listed(client, id)) == [("user", "two"), ("assistant", "to two")]
            # What is deleted meanwhile does not come back.
            place.model.gate.clear()
            last = await begun(client, "three", conversation=id)
            await until(lambda: place.model.running == 1)
            await client.conversations.delete(id)
            place.model.gate.set()
            assert (await ended(client, last.id)).status == "completed"
            with pytest.raises(openai.NotFoundError):
                await client.conversations.retrieve(id)

    run(work())


@pytest.mark.parametrize(
    ("body", "name"),
    [({"conversation": "conv_1", "previous_response_id": "resp_1"}, "conversation"),
     ({"conversation": "conv_1", "store": False}, "store"),
     ({"conversation": 7}, "conversation"), ({"conversation": {}}, "conversation")],
)  # fmt: skip
def test_what_contradicts_itself_is_refused(kept: Keeping, body: dict[str, Any], name: str) -> None:
    async def work() -> None:
        async with Place(kept) as place:
            client = await place.client()
            with pytest.raises(openai.BadRequestError) as caught:
                await client.responses.create(**{**ASKED, **body})
            assert caught.value.param == name

    run(work())


@pytest.mark.parametrize(
    "body",
    [{"items": "Hi"}, {"items": []}, {"items": [{"type": "item_reference", "id": "msg_1"}]},
     {"items": [{"role": "nobody", "content": "x"}]}, {"items": [{"type": "file_search_call"}]},
     {"metadata": {"a": 1}}, {"metadata": {"a": "x" * 513}}, {"metadata": {"x" * 65: "a"}},
     {"metadata": {str(number): "" for number in range(17)}}],
)  # fmt: skip
def test_what_cannot_be_kept_is_refused(kept: Keeping, body: Any) -> None:
    async def work() -> None:
        async with Place(kept) as place:
            client = await place.client()
            with pytest.raises(openai.BadRequestError):
                await client.conversations.create(**body)

    run(work())


def test_conversations_are_of_their_key_alone(kept: Keeping) -> None:
    async def work() -> None:
        file = kept.folder / "keys.json"
        mine, other = new_key(file, "mine"), new_key(file, "other")
        silent = new_key(file, "silent", stateless=True)
        async with Place(kept, keys=file) as place:
            app = await place.gateway()
            place.model.gate.set()
            client, stranger = client_of(app, mine), client_of(app, other)
            begun = await client.conversations.create(items=[FIRST])
            (item,) = await listed(client, begun.id)
            guessed = f"conv_{int(begun.id[5:], 16) + 1:048x}"
            for id in (begun.id, guessed, "conv_1", "'; DROP TABLE items; --"):
                calls: list[Any] = [
                    stranger.conversations.retrieve(id),
                    stranger.conversations.delete(id),
                    stranger.conversations.update(id, metadata={"a": "b"}),
                    stranger.conversations.items.list(id),
                    stranger.conversations.items.create(id, items=[FIRST]),
                    stranger.conversations.items.retrieve(item.id, conversation_id=id),
                    stranger.conversations.items.delete(item.id, conversation_id=id),
                    stranger.responses.create(**ASKED, conversation=id),
                ]
                for call in calls:
                    with pytest.raises(openai.NotFoundError):
                        await call
            # Nor is an item of one that of another.
            empty = await stranger.conversations.create()
            with pytest.raises(openai.NotFoundError):
                await stranger.conversations.items.delete(item.id, conversation_id=empty.id)
            assert texts(await listed(client, begun.id)) == [("user", "I am Ann.")]
            assert (await client.conversations.retrieve(begun.id)).metadata == {}
            with pytest.raises(openai.BadRequestError, match="keeps nothing"):
                await client_of(app, silent).conversations.create()
            # Nor of a key of which something was kept once.
            change_key(file, "mine", stateless=True)
            with pytest.raises(openai.BadRequestError, match="keeps nothing"):
                await client.conversations.items.create(begun.id, items=[FIRST])
            with pytest.raises(openai.BadRequestError, match="keeps nothing"):
                await client.conversations.update(begun.id, metadata={"a": "b"})
            await client.conversations.delete(begun.id)

    run(work())


def test_a_gateway_that_keeps_nothing_has_no_conversations() -> None:
    async def work() -> None:
        client = client_of(app_before(Model()), "none")
        with pytest.raises(openai.NotFoundError, match="--responses"):
            await client.conversations.create()
        with pytest.raises(openai.BadRequestError, match="conversation"):
            await client.responses.create(**ASKED, conversation="conv_1")

    run(work())


# The store


def conversation(owner: str = "a") -> StoredConversation:
    return StoredConversation(f"conv_{new_id()[5:]}", owner, 1, {})


def said(text: str) -> list[Any]:
    return items_of([{"role": "user", "content": text}])


def is_counted_rightly(kept: Keeping) -> bool:
    rows = kept.rows("""SELECT owner, size, (SELECT COALESCE(SUM(size), 0) FROM responses
        WHERE owner = sizes.owner) + (SELECT COALESCE(SUM(size), 0) FROM conversations
        WHERE owner = sizes.owner) FROM sizes""")
    ((orphans,),) = kept.rows(
        "SELECT COUNT(*) FROM items WHERE conversation NOT IN (SELECT id FROM conversations)"
    )
    return bool(rows) and all(size == sum_ for _, size, sum_ in rows) and not orphans


def test_a_flood_removes_the_oldest_of_its_key_alone(kept: Keeping) -> None:
    store = kept.open(StoreLimits(bytes_per_key=20_000))
    talks = store.conversations
    theirs = conversation("b")
    talks.add(theirs, said("theirs"))
    response = StoredResponse(new_id(), "a", [], {"status": "completed", "output": []})
    store.add(response)
    flood = [conversation() for _ in range(30)]
    for each in flood:
        talks.add(each, said("x" * 1000))
        # The first is used again and again.
        talks.append("a", flood[0].id, said("y"))
    left = [each for each in flood if talks.get("a", each.id)]
    assert left[0] == flood[0]
    assert left[1:] == flood[-len(left) + 1 :]
    assert store.get("a", response.id) is None
    assert talks.get("b", theirs.id) == theirs
    assert is_counted_rightly(kept)
    assert talks.remove("a", flood[0].id)
    assert is_counted_rightly(kept)
    store.close()


@pytest.mark.parametrize("limits", [StoreLimits(conversation=5_000), StoreLimits(turns=4)])
def test_a_conversation_has_an_end(kept: Keeping, limits: StoreLimits) -> None:
    store = kept.open(limits)
    long = conversation()
    store.conversations.add(long, said("x" * 1000))
    for _ in range(3):
        store.conversations.append("a", long.id, said("x" * 1000))
    with pytest.raises(ApiError) as caught:
        store.conversations.append("a", long.id, said("x" * 1000))
    assert caught.value.status == 413
    page = store.conversations.page("a", long.id, PageQuery(100, None, is_descending=False))
    assert page
    assert len(page.items) == 4
    assert is_counted_rightly(kept)
    store.close()


def test_what_is_too_old_is_gone(kept: Keeping, monkeypatch: pytest.MonkeyPatch) -> None:
    store = kept.open(StoreLimits(age=60))
    old, used, now = conversation(), conversation(), time.time()
    for each in (old, used):
        store.conversations.add(each, said("an old secret"))
    monkeypatch.setattr(time, "time", lambda: now + 59)
    store.conversations.append("a", used.id, said("again"))
    monkeypatch.setattr(time, "time", lambda: now + 61)
    assert store.conversations.get("a", old.id) is None
    assert not store.conversations.append("a", old.id, said("more"))
    assert store.conversations.items("a", used.id)
    store.conversations.add(conversation(), [])
    assert is_counted_rightly(kept)
    store.close()
    assert kept.rows("SELECT COUNT(*) FROM conversations") == [(2,)]


def test_several_clients_at_once_lose_nothing(kept: Keeping) -> None:
    async def work() -> None:
        async with Place(kept) as place:
            place.model.gate.set()
            one, two = await place.client(), await place.client()
            id = (await one.conversations.create()).id
            asked = [client.responses.create(model="m", input=f"{number}", conversation=id)
                     for number in range(5) for client in (one, two)]  # fmt: skip
            await asyncio.gather(*asked)
            items = texts(await listed(one, id))
            assert len(items) == 20
            # What was asked and what was answered are side by side.
            for (role, question), (_, answer) in zip(items[::2], items[1::2], strict=True):
                assert (role, answer) == ("user", f"to {question}")

    run(work())
