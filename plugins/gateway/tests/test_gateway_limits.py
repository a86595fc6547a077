"""What one client may take from others, and what a key's limits and models cover."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx2 as httpx
import pytest

from llmserve.client import Completion, ModelInfo
from llmserve.errors import ModelNotReadyError
from llmserve.plugin import Address
from llmserve.server import ModelReport, ReplicaReport, State
from llmserve_gateway.admission import Limits
from llmserve_gateway.gateway import Settings
from llmserve_gateway.keys import new_key

from .gateways import NO_TRITON, TEXT, URL, Triton, app_before

GIANT = "giant " * 650_000  # 3.9 MB
LONGEST = 512 * 512


class Models(Triton):
    """Two models, `a` and `b`, which refuse giants; both report what they take unless `old`."""

    def __init__(self, *, old: bool = False) -> None:
        super().__init__()
        self.old = old
        self.read: list[int] = []
        self.waits = 0.0

    async def models(self) -> list[str]:
        return ["a", "b"]

    async def model(self, name: str, *, refresh: bool = False) -> ModelInfo:
        if name not in ("a", "b"):
            raise ModelNotReadyError(f"the server does not have {name!r}")
        return await super().model(name, refresh=refresh)

    async def generate(self, name: str, prompt: str, **options: Any) -> Completion:
        if options.get("prompt_only"):
            limit = {} if self.old else {"longest_prompt": LONGEST}
            report = {"ids": [1, 2], "text": prompt, "context_length": 512, **limit}
            if prompt or "messages" in options or "input_ids" in options:
                self.read.append(len(prompt))
                await asyncio.sleep(self.waits)
            return Completion(json.dumps(report))
        self.read.append(len(prompt))
        await asyncio.sleep(0.3 if len(prompt) > LONGEST else 0.001)
        return Completion("x", "stop", 2, 40)


@asynccontextmanager
async def serving(triton: Models, settings: Settings) -> AsyncIterator[httpx.AsyncClient]:
    app = app_before(triton, settings)
    gateway = app.state.gateway
    for name in ("a", "b"):
        gateway.catalog.record_answer(name)
    transport = httpx.ASGITransport(app=app)
    async with httpx.AsyncClient(transport=transport, base_url="http://gateway") as client:
        yield client


@pytest.mark.parametrize("old", [False, True], ids=["reported", "not reported"])
def test_giants_for_one_model_leave_room_for_the_others(old: bool) -> None:
    triton = Models(old=old)
    body = json.dumps({"model": "a", "prompt": GIANT}).encode()

    async def go() -> tuple[list[int], set[int]]:
        small: list[int] = []
        giants: set[int] = set()
        async with serving(triton, Settings(NO_TRITON)) as client:

            async def giant() -> None:
                while len(small) < 25:
                    giants.add((await client.post("/v1/completions", content=body)).status_code)
                    await asyncio.sleep(0)

            loops = [asyncio.ensure_future(giant()) for _ in range(3)]
            for _ in range(25):
                await asyncio.sleep(0.005)
                answer = await client.post("/v1/completions", json={**TEXT, "model": "b"})
                small.append(answer.status_code)
            await asyncio.gather(*loops)
        return small, giants

    small, giants = asyncio.run(go())
    assert small == [200] * 25
    if not old:
        assert giants == {400}
        assert max(triton.read) <= LONGEST, "the model never saw them"


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        ("/v1/completions", {"prompt": GIANT}, "prompt"),
        ("/v1/completions", {"prompt": ["Hi", GIANT]}, "prompt"),
        ("/v1/completions", {"prompt": [1] * 20_000}, "prompt"),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": GIANT}]}, "messages"),
        ("/tokenize", {"prompt": GIANT}, "prompt"),
        ("/detokenize", {"tokens": [1] * 20_000}, "prompt"),
    ],
)
def test_a_prompt_that_cannot_fit_is_refused_by_name(
    path: str, fields: dict[str, Any], param: str
) -> None:
    triton = Models()

    async def go() -> Any:
        async with serving(triton, Settings(NO_TRITON)) as client:
            return await client.post(path, json={"model": "a", **fields})

    answer = asyncio.run(go())
    error = answer.json()["error"]
    assert (answer.status_code, error["code"]) == (400, "context_length_exceeded")
    assert "maximum context length is 512 tokens" in error["message"]
    assert error["param"] == param
    assert triton.read == []


def test_a_slow_model_is_asked_once_for_what_it_takes() -> None:
    class Slow(Models):
        asked = 0

        async def generate(self, name: str, prompt: str, **options: Any) -> Completion:
            self.asked += 1
            await asyncio.sleep(0.05)
            return await super().generate(name, prompt, **options)

    triton = Slow()
    body = json.dumps({"model": "a", "prompt": GIANT}).encode()

    async def go() -> list[int]:
        async with serving(triton, Settings(NO_TRITON)) as client:
            left = asyncio.ensure_future(client.post("/v1/completions", content=body))
            others = [client.post("/v1/completions", content=body) for _ in range(3)]
            waiting = asyncio.gather(*others)
            while not triton.asked:
                await asyncio.sleep(0.001)
            left.cancel()
            return [answer.status_code for answer in await waiting]

    assert asyncio.run(go()) == [400] * 3
    assert triton.asked == 1


def test_a_prompt_that_may_fit_is_left_to_the_model() -> None:
    triton = Models()

    async def go() -> int:
        async with serving(triton, Settings(NO_TRITON)) as client:
            body = {"model": "a", "prompt": GIANT[:LONGEST]}
            return (await client.post("/v1/completions", json=body)).status_code

    assert (asyncio.run(go()), triton.read) == (200, [LONGEST])


def test_names_of_no_model_share_one_limit() -> None:
    class Slow(Models):
        async def model(self, name: str, *, refresh: bool = False) -> ModelInfo:
            await asyncio.sleep(0.3)
            return await super().model(name, refresh=refresh)

    async def go() -> list[int]:
        async with serving(Slow(), Settings(NO_TRITON)) as client:
            bodies = [{"model": f"no{number}", "prompt": GIANT} for number in range(4)]
            asked = [client.post("/v1/completions", json=body) for body in bodies]
            return sorted(answer.status_code for answer in await asyncio.gather(*asked))

    assert asyncio.run(go()) == [404, 429, 429, 429]


INSPECTIONS = [
    ("/tokenize", {"prompt": "Hi"}),
    ("/detokenize", {"tokens": [1]}),
    ("/v1/messages/count_tokens", {"messages": [{"role": "user", "content": "Hi"}]}),
]


@pytest.mark.parametrize(("path", "fields"), INSPECTIONS)
def test_the_limits_of_a_key_cover_what_counts_tokens(
    tmp_path: Path, path: str, fields: dict[str, Any]
) -> None:
    key = new_key(tmp_path / "keys", "me", requests_per_minute=5)

    async def go() -> list[int]:
        settings = Settings(NO_TRITON, keys=tmp_path / "keys")
        async with serving(Models(), settings) as client:
            headers = {"x-api-key": key}
            body = {"model": "a", **fields}
            return [
                (await client.post(path, json=body, headers=headers)).status_code for _ in range(8)
            ]

    assert asyncio.run(go()) == [200] * 5 + [429] * 3


@pytest.mark.parametrize(
    "fields",
    [{"n": 4}, {"n": 4, "best_of": 4}, {"prompt": ["Hi"] * 4}, {"n": 2, "prompt": ["Hi", "Ho"]}],
)
def test_several_answers_are_several_requests_of_a_key(
    tmp_path: Path, fields: dict[str, Any]
) -> None:
    key = new_key(tmp_path / "keys", "me", requests_per_minute=10)

    async def go() -> list[int]:
        settings = Settings(NO_TRITON, keys=tmp_path / "keys")
        async with serving(Models(), settings) as client:
            headers = {"x-api-key": key}
            bodies = [
                {**TEXT, "model": "a", **more} for more in (fields, fields, fields, {}, {}, {})
            ]
            post = client.post
            asked = [await post("/v1/completions", json=b, headers=headers) for b in bodies]
            return [answer.status_code for answer in asked]

    assert asyncio.run(go()) == [200, 200, 429, 200, 200, 429]


@pytest.mark.parametrize("model", ["a", "b"])
@pytest.mark.parametrize("limited", [False, True])
def test_no_key_takes_the_slots_of_the_others(tmp_path: Path, limited: bool, model: str) -> None:
    rate = {"requests_per_minute": 60} if limited else {}
    attacker, other = (new_key(tmp_path / "keys", name, **rate) for name in ("one", "other"))

    class Slow(Models):
        async def generate(self, name: str, prompt: str, **options: Any) -> Completion:
            await asyncio.sleep(0.5 if prompt == "slow" else 0)
            return await super().generate(name, prompt, **options)

    async def go() -> tuple[list[int], list[int]]:
        settings = Settings(NO_TRITON, keys=tmp_path / "keys")
        statuses: list[int] = []
        async with serving(Slow(), settings) as client:

            async def attack() -> None:
                body = {"model": "a", "prompt": "slow", "n": 128}
                for _ in range(20):
                    headers = {"x-api-key": attacker}
                    answer = await client.post("/v1/completions", json=body, headers=headers)
                    statuses.append(answer.status_code)
                    await asyncio.sleep(0.02)

            attacks = [asyncio.ensure_future(attack()) for _ in range(5)]
            await asyncio.sleep(0.1)
            seen = []
            for _ in range(20):
                answer = await client.post(
                    "/v1/completions", json={**TEXT, "model": model}, headers={"x-api-key": other}
                )
                seen.append(answer.status_code)
                await asyncio.sleep(0.01)
            for each in attacks:
                each.cancel()
            await asyncio.gather(*attacks, return_exceptions=True)
        return seen, statuses

    seen, statuses = asyncio.run(go())
    assert 429 in statuses, "there was an attack"
    assert seen == [200] * 20


@pytest.mark.parametrize(("path", "fields"), INSPECTIONS)
def test_what_counts_tokens_waits_for_a_slot(path: str, fields: dict[str, Any]) -> None:
    triton = Models()
    triton.waits = 0.2

    async def go() -> list[int]:
        async with serving(triton, Settings(NO_TRITON, Limits(1, 1))) as client:
            body = {"model": "a", **fields}
            asked = [client.post(path, json=body) for _ in range(4)]
            return sorted(answer.status_code for answer in await asyncio.gather(*asked))

    assert asyncio.run(go()) == [200, 200, 429, 429]


@pytest.mark.parametrize("stream", [False, True])
def test_tokens_per_minute_are_those_of_answers_too(tmp_path: Path, stream: bool) -> None:
    key = new_key(tmp_path / "keys", "me", tokens_per_minute=50)

    async def go() -> list[int]:
        settings = Settings(NO_TRITON, keys=tmp_path / "keys")
        triton = Models()
        async with serving(triton, settings) as client:
            headers = {"x-api-key": key}
            body = {**TEXT, "model": "a", "stream": stream}
            post = client.post
            asked = [await post("/v1/completions", json=body, headers=headers) for _ in range(60)]
            return [answer.status_code for answer in asked]

    statuses = asyncio.run(go())
    # A prompt counts 1 and a whole answer 40; the fake's stream reports 1.
    allowed = statuses.index(429)
    assert allowed == (25 if stream else 2)
    assert set(statuses[allowed:]) == {429}


def test_a_prompt_that_cannot_fit_takes_nothing_from_its_key(tmp_path: Path) -> None:
    key = new_key(tmp_path / "keys", "me", tokens_per_minute=50)

    async def go() -> list[int]:
        async with serving(Models(), Settings(NO_TRITON, keys=tmp_path / "keys")) as client:
            bodies = [{"model": "a", "prompt": prompt} for prompt in (GIANT, "Hi")]
            headers = {"x-api-key": key}
            asked = [await client.post("/v1/completions", json=b, headers=headers) for b in bodies]
            return [answer.status_code for answer in asked]

    assert asyncio.run(go()) == [400, 200]


def test_a_key_for_some_models_sees_no_others(tmp_path: Path) -> None:
    some = new_key(tmp_path / "keys", "some", models=["a"])
    every = new_key(tmp_path / "keys", "every")
    prometheus = new_key(tmp_path / "keys", "prometheus", models=["none"], all_metrics=True)

    async def go() -> dict[tuple[str, str], Any]:
        tritons = (Address(URL, metrics="http://127.0.0.1:9"),)
        settings = Settings(tritons, keys=tmp_path / "keys")
        answers = {}
        async with serving(Seen(), settings) as client:
            for name in ("a", "b"):
                body = {**TEXT, "model": name}
                headers = {"x-api-key": every}
                await client.post("/v1/completions", json=body, headers=headers)
            for who, key in (
                ("some", some),
                ("every", every),
                ("prometheus", prometheus),
                ("nobody", ""),
            ):
                for path in ("/metrics", "/metrics/triton", "/readyz", *named):
                    answers[who, path] = await client.get(path, headers={"x-api-key": key})
        return answers

    class Seen(Models):
        all: tuple[Any, ...] = ()

    named = ("/readyz/a", "/readyz/b", "/readyz/c")
    answers = asyncio.run(go())
    for who, model, visible in (
        ("some", "a", True), ("some", "b", False), ("every", "a", True), ("every", "b", True),
    ):  # fmt: skip
        assert (f'model_name="{model}"' in answers[who, "/metrics"].text) is visible
        assert (model in answers[who, "/readyz"].json()["models"]) is visible
    assert answers["prometheus", "/metrics"].text.count('model_name="b"') > 0
    assert answers["prometheus", "/metrics/triton"].status_code == 503, "Triton is not there"
    assert answers["nobody", "/metrics"].status_code == 401
    for path in ("/readyz", *named):
        assert answers["nobody", path].status_code == 200
        assert answers["nobody", path].json() == {"ready": True}
    assert [answers["every", path].status_code for path in named] == [200, 200, 404]
    assert answers["some", "/readyz/a"].json() == {"ready": True}
    # Whether there is another model is not said.
    for path in ("/readyz/b", "/readyz/c"):
        assert answers["some", path].json() == answers["some", "/readyz"].json()
    assert answers["some", "/metrics/triton"].status_code == 403
    assert answers["every", "/metrics/triton"].status_code == 503


_DIED = ModelReport("a", State.RESTARTING, "its process has died", code="model_died")


@pytest.mark.parametrize(
    ("report", "status", "while_empty"),
    [
        (None, 404, "backend_unavailable"),
        (ModelReport("a", State.READY), 503, "backend_unavailable"),
        (ModelReport("a", State.UNLOADED), 404, "backend_unavailable"),
        (_DIED, 503, "model_died"),
    ],
    ids=["unknown", "ready", "unloaded", "died"],
)
def test_a_model_that_is_gone_for_a_moment_is_no_404(
    report: ModelReport | None, status: int, while_empty: str
) -> None:
    """`serve` may still call one ready that its Triton, which is ending, has unloaded."""
    whole = ReplicaReport(State.READY, models=(report,) if report else ())

    class Ending(Models):
        loaded: tuple[str, ...] = ("a", "b")

        async def models(self) -> list[str]:
            return list(self.loaded)

        async def model(self, name: str, *, refresh: bool = False) -> ModelInfo:
            if name not in self.loaded:
                raise ModelNotReadyError(f"the server does not have {name!r}")
            return await super().model(name, refresh=refresh)

    async def go() -> list[Any]:
        triton = Ending()
        settings = Settings(NO_TRITON, supervisor=lambda: whole)
        async with serving(triton, settings) as client:
            answers = []
            for loaded in (("a", "b"), (), ("b",)):
                triton.loaded = loaded
                for name in ("a", "never"):
                    body = {**TEXT, "model": name}
                    answers.append(await client.post("/v1/completions", json=body))
        return answers

    answers = asyncio.run(go())
    # Triton lists no model when it has ended; if it lists others, this one may be unloaded.
    # Who asks one that `serve` knows to be dead does not wait for its answer.
    first = 503 if report is _DIED else 200
    assert [answer.status_code for answer in answers] == [first, 404, 503, 404, status, 404]
    assert answers[2].headers["retry-after"] == ("5" if while_empty == "model_died" else "2")
    assert answers[2].json()["error"]["code"] == while_empty


def test_unknown_fields_are_logged_in_bounded_form(caplog: pytest.LogCaptureFixture) -> None:
    async def go() -> None:
        async with serving(Models(), Settings(NO_TRITON)) as client:
            for start in range(0, 180_000, 90_000):
                unknown = {f"unknown{number}": 1 for number in range(start, start + 90_000)}
                body = {**TEXT, "model": "a", **unknown}
                assert (await client.post("/v1/completions", json=body)).status_code == 200

    asyncio.run(go())
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) == 2
    assert "'unknown0', 'unknown1'" in lines[0]
    assert lines[0].endswith("and 89980 more")
    assert max(map(len, lines)) < 1000
