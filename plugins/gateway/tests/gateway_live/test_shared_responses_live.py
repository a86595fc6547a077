"""Two gateways that keep responses in one PostgreSQL, of which one is killed under load."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Any

import openai
import pytest

from llmserve.testing import LiveTriton
from llmserve_gateway.postgresql_database import VARIABLE

from .process import Gateway

pytestmark = pytest.mark.long

CLIENTS, TURNS = 12, 8
ASKED: dict[str, Any] = {"max_output_tokens": 6}


@dataclass
class Talk:
    """What one client was told, and of which requests it has no answer."""

    said: list[Any] = field(default_factory=list)
    begun: list[str] = field(default_factory=list)
    broken: int = 0


async def talk(
    through: list[openai.AsyncOpenAI],
    model: str,
    number: int,
    killed: asyncio.Event,
    told: list[str],
) -> Talk:
    """Have a conversation through gateways in turn; where one is gone, the other goes on."""
    found = Talk()
    for turn in range(TURNS):
        client = through[0 if killed.is_set() else (number + turn) % 2]
        fields = {"previous_response_id": found.said[-1].id} if found.said else {}
        fields |= {"model": model, "input": f"{number}: {turn}", **ASKED}
        try:
            found.said.append(await client.responses.create(**fields))
            told.append(found.said[-1].id)
            later = await client.responses.create(**fields, background=True)
            found.begun.append(later.id)
        except openai.APIConnectionError:
            assert killed.is_set()
            found.broken += 1
    return found


async def ended(client: openai.AsyncOpenAI, id: str) -> Any:
    while (found := await client.responses.retrieve(id)).status in ("queued", "in_progress"):
        await asyncio.sleep(0.1)
    return found


def test_of_what_clients_were_told_nothing_is_lost(
    triton: LiveTriton, model: str, postgresql: Any
) -> None:
    url = postgresql.new_database()
    gateways = [Gateway(triton, **{VARIABLE: url}) for _ in range(2)]

    async def go() -> None:
        through = [
            openai.AsyncOpenAI(base_url=each.url, api_key="none", max_retries=0)
            for each in gateways
        ]
        killed = asyncio.Event()
        told: list[str] = []
        talks = [
            asyncio.ensure_future(talk(through, model, number, killed, told))
            for number in range(CLIENTS)
        ]
        # In the midst of it.
        while len(told) < CLIENTS * TURNS // 4:
            await asyncio.sleep(0.01)
        assert not any(each.done() for each in talks)
        killed.set()
        gateways[1].process.kill()
        found = await asyncio.gather(*talks)
        said = [each for one in found for each in one.said]
        begun = [id for one in found for id in one.begun]
        assert said
        assert begun
        for each in said:
            kept = await through[0].responses.retrieve(each.id)
            assert kept.to_dict() == each.to_dict()
        for one in found:
            items = [item async for item in through[0].responses.input_items.list(one.said[-1].id)]
            assert len(items) == 1
            again = await through[0].responses.create(
                model=model, input="again", previous_response_id=one.said[-1].id, **ASKED
            )
            assert again.status in ("completed", "incomplete")
        # What the killed one was to answer has failed, if it was not answered.
        finals = [await asyncio.wait_for(ended(through[0], id), 60) for id in begun]
        for final in finals:
            was_ended = final.status in ("completed", "incomplete")
            assert was_ended or final.error.code == "interrupted", final

    try:
        asyncio.run(asyncio.wait_for(go(), 300))
        assert gateways[0].stop() == 0
    finally:
        for each in gateways:
            each.process.kill()
            each.process.wait()
