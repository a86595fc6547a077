"""Adapters of models: by which names they are asked, who may, and where they are counted."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

import httpx2 as httpx
import pytest

from llmserve.client import Completion, ModelInfo, Piece
from llmserve.errors import ModelNotReadyError, RequestRejectedError, UsageError
from llmserve_gateway.gateway import Settings
from llmserve_gateway.keys import new_key
from llmserve_gateway.model_names import read_aliases

from .gateways import NO_TRITON, app_before


class Triton:
    """Has models with adapters, as a Triton whose models llmserve has built."""

    all: tuple[Any, ...] = ()

    def __init__(self, adapters: Mapping[str, list[str]]) -> None:
        self.adapters = adapters
        self.asked: list[tuple[str, str]] = []
        """The models and adapters that were asked for an answer."""
        self.listed = 0

    async def models(self) -> list[str]:
        return [*self.adapters]

    async def model(self, name: str, *, refresh: bool = False) -> ModelInfo:
        if name not in self.adapters:
            raise ModelNotReadyError(f"there is no model {name!r}")
        tensors: Any = dict.fromkeys(("text_input", "adapter", "prompt_only", "text_output"))
        return ModelInfo(name, "unary", True, None, tensors, tensors, "0.1")

    async def generate(self, name: str, prompt: str, **options: Any) -> Completion:
        known = self.adapters[name]
        if options.get("prompt_only"):
            self.listed += 1
            said = {"ids": [1], "text": prompt, "context_length": 64, "adapters": list(known)}
            return Completion(json.dumps(said), "stop", 1, 0)
        adapter = options.get("adapter", "")
        if adapter and adapter not in known:
            raise RequestRejectedError(
                f"{name} has no adapter {adapter!r}", code="adapter_not_found", param="adapter"
            )
        self.asked.append((name, adapter))
        return Completion("x", "stop", 2, 3)

    async def stream(self, name: str, prompt: str, **options: Any) -> AsyncIterator[Piece]:
        answer = await self.generate(name, prompt, **options)
        yield Piece("x", input_tokens=answer.input_tokens, output_tokens=answer.output_tokens)
        yield Piece("", finish_reason="stop")


class Asked:
    """A gateway in front of such a Triton, and what it answers."""

    def __init__(self, triton: Triton, settings: Settings | None = None, key: str = "") -> None:
        app = app_before(triton, settings)
        headers = {"authorization": f"Bearer {key}"} if key else {}
        self._client = httpx.AsyncClient(
            transport=httpx.ASGITransport(app=app), base_url="http://gateway", headers=headers
        )

    async def complete(self, model: str, **fields: Any) -> Any:
        body = {"model": model, "prompt": "Hi", **fields}
        return await self._client.post("/v1/completions", json=body)

    async def post(self, path: str, **fields: Any) -> Any:
        return await self._client.post(path, json=fields)

    async def get(self, path: str) -> Any:
        return await self._client.get(path)

    async def ids(self) -> list[str]:
        return [model["id"] for model in (await self.get("/v1/models")).json()["data"]]


def test_an_adapters_own_name_is_a_model_in_every_api() -> None:
    triton = Triton({"mine": ["sql", "chat"], "other": []})

    async def go() -> None:
        asked = Asked(triton)
        answer = (await asked.complete("sql")).json()
        assert answer["model"] == "sql"
        messages = [{"role": "user", "content": "Hi"}]
        for path, fields in (
            ("/v1/chat/completions", {"messages": messages}),
            ("/v1/responses", {"input": "Hi"}),
            ("/v1/messages", {"messages": messages, "max_tokens": 4}),
        ):
            answer = await asked.post(path, model="chat", **fields)
            assert (answer.status_code, answer.json()["model"]) == (200, "chat"), answer.text
        for path, fields in (
            ("/tokenize", {"prompt": "Hi"}),
            ("/v1/messages/count_tokens", {"messages": messages}),
        ):
            for name in ("sql", "mine:sql"):
                assert (await asked.post(path, model=name, **fields)).status_code == 200
            assert (await asked.post(path, model="mine:no", **fields)).status_code == 404
        assert await asked.ids() == ["mine", "mine:sql", "mine:chat", "other", "sql", "chat"]
        one = (await asked.get("/v1/models/sql")).json()
        assert (one["id"], one["parent"]) == ("sql", "mine")

    asyncio.run(go())
    assert triton.asked == [("mine", "sql"), *[("mine", "chat")] * 3]


def test_a_model_is_asked_by_the_name_that_another_server_gave_it(tmp_path: Path) -> None:
    triton = Triton({"mine": ["sql"], "other": []})
    aliases = {"Org/Mine-7B": "mine", "mine:7b": "mine", "gone": "away"}

    async def go() -> None:
        asked = Asked(
            triton, Settings(NO_TRITON, local=True, allowed_hosts=("*",), aliases=aliases)
        )
        messages = [{"role": "user", "content": "Hi"}]
        for name in ("Org/Mine-7B", "mine:7b"):
            for path, fields in (
                ("/v1/completions", {"prompt": "Hi"}),
                ("/v1/chat/completions", {"messages": messages}),
            ):
                answer = await asked.post(path, model=name, **fields)
                assert answer.status_code == 200, (path, name, answer.text)
                assert answer.json()["model"] == name
            assert (await asked.post("/tokenize", model=name, prompt="Hi")).status_code == 200
            one = (await asked.get(f"/v1/models/{name}")).json()
            assert one["id"] == name
        answer = await asked.complete("mine:7b:sql")
        assert (answer.status_code, answer.json()["model"]) == (200, "mine:7b:sql")
        assert (await asked.complete("mine:sql")).status_code == 200
        missing = await asked.complete("gone")
        assert (missing.status_code, "away" in missing.text) == (404, True), missing.text
        assert await asked.ids() == ["mine", "mine:sql", "other", "sql", "Org/Mine-7B", "mine:7b"]

    asyncio.run(go())
    assert triton.asked == [*[("mine", "")] * 4, *[("mine", "sql")] * 2]
    # A key is for models, whatever they are called.
    keys = tmp_path / "keys"
    secret = new_key(keys, "team", models=("other",))

    async def go_with_key() -> None:
        settings = Settings(NO_TRITON, keys=keys, aliases=aliases)
        asked = Asked(triton, settings, secret)
        refused = await asked.complete("Org/Mine-7B")
        assert refused.status_code == 403
        assert "mine" not in refused.text, "which model it is, is not told"
        assert await asked.ids() == ["other"]

    asyncio.run(go_with_key())


def test_names_that_lead_nowhere_are_refused() -> None:
    assert read_aliases(["a/b=c", "d=e=f"]) == {"a/b": "c", "d=e": "f"}
    for words in (["a"], ["=a"], ["a="], ["a=b", "a=c"]):
        with pytest.raises(UsageError, match="--alias"):
            read_aliases(words)


def test_a_name_that_is_not_clear_is_not_guessed() -> None:
    triton = Triton({"mine": ["sql", "other"], "other": ["sql"]})

    async def go() -> None:
        asked = Asked(triton)
        refused = await asked.complete("sql")
        assert refused.status_code == 400
        assert "name one of mine:sql, other:sql" in refused.json()["error"]["message"]
        assert refused.json()["error"]["code"] == "ambiguous_model"
        assert (await asked.complete("other")).status_code == 200
        assert await asked.ids() == ["mine", "mine:sql", "mine:other", "other", "other:sql"]
        assert (await asked.complete("nothing")).status_code == 404
        assert (await asked.get("/v1/models/sql")).status_code == 400

    asyncio.run(go())
    assert triton.asked == [("other", "")], "the model of that name, not the adapter"


def test_a_key_may_use_the_own_names_of_its_adapters_alone(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    base, one = new_key(keys, "a", models=["mine"]), new_key(keys, "b", models=["other:sql"])
    nobody = new_key(keys, "c", models=["third"])
    triton = Triton({"mine": ["sql", "chat"], "other": ["sql"], "third": []})

    async def go() -> None:
        settings = Settings(NO_TRITON, keys=keys)
        asked = Asked(triton, settings, base)
        assert (await asked.complete("sql")).status_code == 200
        assert await asked.ids() == ["mine", "mine:sql", "mine:chat", "sql", "chat"]
        asked = Asked(triton, settings, one)
        assert (await asked.complete("sql")).status_code == 200
        assert (await asked.complete("chat")).status_code == 403
        assert await asked.ids() == ["other:sql", "sql"]
        asked = Asked(triton, settings, nobody)
        for name in ("sql", "chat"):
            refused = await asked.complete(name)
            assert refused.status_code == 403
            assert "mine" not in refused.text, "whose adapter it is, is not told"

    asyncio.run(go())
    assert triton.asked == [("mine", "sql"), ("other", "sql")]


def test_adapters_come_and_go_and_a_known_one_is_not_looked_up_for_each_request(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    triton = Triton({"mine": ["sql"]})

    async def go() -> None:
        asked = Asked(triton)
        assert (await asked.complete("late")).status_code == 404
        triton.adapters = {"mine": ["sql", "late"]}
        assert (await asked.complete("late")).status_code == 200
        before = triton.listed
        for _ in range(5):
            assert (await asked.complete("late")).status_code == 200
        assert triton.listed == before
        triton.adapters = {"mine": ["sql"]}
        gone = await asked.complete("late")
        assert (gone.status_code, gone.json()["error"]["param"]) == (404, "model")
        monkeypatch.setattr("llmserve_gateway.model_names._FRESH", 0)
        await asked.complete("late")
        await asyncio.sleep(0.05)
        assert await asked.ids() == ["mine", "mine:sql", "sql"]

    asyncio.run(go())


def test_a_name_that_no_adapter_can_have_costs_its_model_nothing() -> None:
    triton = Triton({"mine": ["sql"]})

    async def go() -> None:
        asked = Asked(triton)
        for name in ("owner/name", "x" * 65, "mine:", ":", "ä"):
            assert (await asked.complete(name)).status_code == 404

    asyncio.run(go())
    assert not triton.listed


def test_what_adapters_answer_is_counted_apart_and_other_words_are_not(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    keys = tmp_path / "keys"
    everything, one = new_key(keys, "a"), new_key(keys, "b", models=["mine:chat"])
    triton = Triton({"mine": ["sql", "chat"]})

    async def go() -> tuple[str, str]:
        app = app_before(triton, Settings(NO_TRITON, keys=keys))
        transport = httpx.ASGITransport(app=app)
        async with httpx.AsyncClient(transport=transport, base_url="http://gateway") as client:

            async def page(key: str) -> str:
                headers = {"authorization": f"Bearer {key}"}
                return str((await client.get("/metrics", headers=headers)).text)

            for model, stream in (
                ("mine", False), ("mine:sql", False), ("sql", True), ("mine:chat", False),
                ("mine:word", False), ("mine:word", True),
            ):  # fmt: skip
                await client.post(
                    "/v1/completions", json={"model": model, "prompt": "Hi", "stream": stream},
                    headers={"authorization": f"Bearer {everything}"},
                )  # fmt: skip
            return await page(everything), await page(one)

    page, own = asyncio.run(go())
    lines = page.splitlines()
    for line in (
        'vllm:prompt_tokens_total{model_name="mine"} 2.0',
        'vllm:prompt_tokens_total{adapter="sql",model_name="mine"} 4.0',
        'vllm:generation_tokens_total{adapter="sql",model_name="mine"} 6.0',
        'llmserve_requests_total{model_name="mine",outcome="refused"} 2.0',
        'llmserve_requests_total{adapter="sql",model_name="mine",outcome="stop"} 2.0',
    ):
        assert line in lines, page
    assert "word" not in page
    assert 'adapter=""' not in page
    assert 'adapter="chat"' in own
    assert "sql" not in own, "a key for one adapter sees what that has answered"
    logged = [json.loads(line) for line in capsys.readouterr().err.splitlines() if line[0] == "{"]
    assert [(line["model"], line.get("adapter")) for line in logged] == [
        ("mine", None), ("mine", "sql"), ("mine", "sql"), ("mine", "chat"), ("mine", None),
        ("mine", None),
    ]  # fmt: skip
