"""The inspector: what it shows, to whom, and what is left of it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx2 as httpx
import pytest

from llmserve.client import Completion, ModelInfo
from llmserve_gateway import inspector
from llmserve_gateway.gateway import Settings
from llmserve_gateway.inspector import Inspected, Inspector
from llmserve_gateway.keys import new_key

from .gateways import NO_TRITON, Triton, app_before

CHAT: Any = {"model": "m", "messages": [{"role": "user", "content": "my secret"}]}


class Model(Triton):
    """A model of llmserve, which says how it reads a prompt."""

    async def model(self, name: str, *, refresh: bool = False) -> ModelInfo:
        info = await super().model(name, refresh=refresh)
        tensors: Any = {**info.inputs, "messages": None}
        return replace(info, inputs=tensors, outputs=tensors, made_by_llmserve="0.1")

    async def generate(self, name: str, prompt: str, **options: Any) -> Completion:
        if options.get("prompt_only"):
            said = (options.get("messages") or [{"content": prompt}])[-1]["content"]
            report = {"ids": [1, 2, 3], "text": f"<user>{said}</user>", "context_length": 99}
            return Completion(json.dumps(report), "stop", 1, 1)
        return Completion("x", "stop", 2, 1, extra={"num_cached_tokens": 1})

    async def close(self) -> None:
        pass


class Door:
    """A gateway, and requests to it as from this machine."""

    def __init__(self, **settings: Any) -> None:
        fields = {"inspect": True, "local": True, **settings}
        self.app = app_before(Model(), Settings(NO_TRITON, **fields))
        transport = httpx.ASGITransport(app=self.app)
        self.client = httpx.AsyncClient(transport=transport, base_url="http://localhost")

    async def ask(self, key: str = "", path: str = "/v1/chat/completions", **body: Any) -> Any:
        return await self.client.post(path, json={**CHAT, **body}, headers=_headers(key))

    async def look(self, key: str = "") -> Any:
        return await self.client.get("/inspect", headers=_headers(key))

    async def found(self, key: str = "") -> list[Any]:
        """Return what is shown, when all prompts are known."""
        while True:
            found: list[Any] = (await self.look(key)).json()["requests"]
            if all(each["prompt"] is not None or each["error"] for each in found):
                return found
            await asyncio.sleep(0.01)


def _headers(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"} if key else {}


@asynccontextmanager
async def door(**settings: Any) -> AsyncIterator[Door]:
    one = Door(**settings)
    yield one
    await one.app.state.gateway.close()


def run(work: Awaitable[None]) -> None:
    async def go() -> None:
        await asyncio.wait_for(work, 60)

    asyncio.run(go())


def test_it_shows_what_the_model_has_read() -> None:
    async def work() -> None:
        async with door() as one:
            assert await one.found() == []
            await one.ask(user="me", unknown=1, temperature=0.5, max_tokens=3)
            (found,) = await one.found()
            assert found["prompt"] == "<user>my secret</user>"
            assert (found["prompt_tokens"], found["input_tokens"]) == (3, 2)
            assert (found["output_tokens"], found["cached_tokens"]) == (1, 1)
            assert found["ignored"] == ["unknown", "user"]
            assert json.loads(found["options"])["temperature"] == 0.5
            assert json.loads(found["body"])["messages"] == CHAT["messages"]
            assert (found["path"], found["model"]) == ("/v1/chat/completions", "m")
            for name in ("queue_ms", "first_ms", "total_ms"):
                assert found[name] >= 0
            # What is refused is shown with the reason.
            await one.ask(temperature="hot")
            refused, _ = await one.found()
            assert (refused["status"], refused["prompt"]) == (400, None)
            assert "temperature" in refused["error"]

    run(work())


def test_nothing_is_noted_before_or_after_somebody_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    async def work() -> None:
        async with door() as one:
            await one.ask()
            assert await one.found() == []
            await one.ask()
            assert len(await one.found()) == 1
            monkeypatch.setattr(inspector, "_LOOKS_EVERY", 0.0)
            await one.look()
            await asyncio.sleep(0.05)
            kept = one.app.state.gateway.inspector
            assert not kept.is_open
            assert not kept._found
            await one.ask()
            assert await one.found() == []

    run(work())


def test_it_is_off_unless_it_is_wanted() -> None:
    async def work() -> None:
        async with door(inspect=False) as one:
            answer = await one.look()
            assert answer.status_code == 404
            assert "--inspect" in answer.text

    run(work())


def test_others_see_nothing_and_have_nothing_noted(tmp_path: Path) -> None:
    async def work() -> None:
        file = tmp_path / "keys.json"
        user, operator = new_key(file, "user"), new_key(file, "operator", operator=True)
        others = new_key(file, "others", operator=True, models=["other"])
        async with door(keys=file) as one:
            for key, status in (("", 401), ("wrong", 401), (user, 403)):
                answer = await one.look(key)
                assert answer.status_code == status
                assert "secret" not in answer.text
            assert not one.app.state.gateway.inspector.is_open
            # Nor does a look of one that may see it show anything to them.
            await one.look(operator)
            await one.ask(user)
            (found,) = await one.found(operator)
            assert found["key"] == "user"
            assert user not in json.dumps(found)
            assert await one.found(others) == []
            for key in ("", user):
                assert "secret" not in (await one.look(key)).text
        # Without keys, an open address is no reason to show it.
        async with door(local=False) as one:
            assert (await one.look()).status_code == 403

    run(work())


def test_what_is_shown_is_bounded() -> None:
    async def work() -> None:
        async with door() as one:
            await one.look()
            image = f"data:image/png;base64,{'A' * 100_000}"
            for number in range(60):
                await one.ask(user=image, metadata={"n": f"{number}" + "x" * 100_000})
            # Of those that wait too long it is not known how they are read.
            found = (await one.look()).json()["requests"]
            assert len(found) == 50
            assert "AAAA" not in json.dumps(found)
            assert all(len(each["body"]) < 20_000 for each in found)

    run(work())


def test_a_flood_of_large_ones_drops_the_oldest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inspector, "_MOST_BYTES", 50_000)

    async def work() -> None:
        async def read(*_: Any) -> Any:
            raise AssertionError

        one = Inspector(read)
        one.look()
        for number in range(20):
            noted = Inspected("/")
            noted.body = {"prompt": f"{number}" + "x" * 5_000}
            one.add(noted, {"id": str(number)})
        ids = [each["id"] for each in one.look()]
        assert ids == [str(number) for number in range(19, 19 - len(ids), -1)]
        assert 5 < len(ids) < 12
        one.close()
        assert one.look() == []
        one.close()

    run(work())
