"""Answers to users that the gateway hands to `serve`, to be judged by their models."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

import httpx2 as httpx
import pytest

from llmserve.client import Completion, Logprob, ModelInfo, Piece
from llmserve.errors import RequestRejectedError
from llmserve.plugin import Address
from llmserve.server import MOST_TOKENS, LiveAnswer, ServerReport, State
from llmserve.testing.serving import listening
from llmserve_gateway.gateway import Settings
from llmserve_gateway.releases.release import Plan
from llmserve_gateway.replicas import Replicas

from . import gateways

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
HELLO = {"model": "m", "messages": [{"role": "user", "content": "a secret"}]}


class Scored(gateways.Triton):
    """Answers with two tokens, and their log-probabilities if it is asked for them."""

    def __init__(self, *left_out: str, count: int = 2, prompt: int = 5) -> None:
        super().__init__()
        inputs = (
            "text_input",
            "logprobs",
            "prompt_logprobs",
            "prompt_only",
            "json_schema",
            "tools",
        )
        self.inputs = {name for name in inputs if name not in left_out}
        self.count, self.prompt = count, prompt

    async def model(self, name: str, *, refresh: bool = False) -> ModelInfo:
        inputs: Any = dict.fromkeys(self.inputs)
        return ModelInfo(name, "stream", True, None, inputs, {"text_output": None}, "0.1")  # type: ignore[dict-item]

    async def generate(self, name: str, prompt: str = "", **options: Any) -> Completion:
        self.requests.append({"prompt": prompt, **options})
        if on_replica := options.get("on_replica"):
            on_replica(gateways.URL)
        number = options.get("logprobs")
        top = (Logprob(4, "x", -0.25),) if number else ()
        tokens = (Logprob(4, "x", -0.25, top), Logprob(9, "y", -1.5, top)) * (self.count // 2)
        said = tokens if number is not None else None
        return Completion("xy", "stop", self.prompt, self.count, logprobs=said)

    async def stream(self, name: str, prompt: str = "", **options: Any) -> AsyncIterator[Piece]:
        whole = await self.generate(name, prompt, **options)
        first, second = (whole.logprobs[:1], whole.logprobs[1:]) if whole.logprobs else (None, None)
        yield Piece("xy", input_tokens=5, output_tokens=1, logprobs=first)
        yield Piece("", output_tokens=2, logprobs=second)
        yield Piece("", finish_reason="stop", input_tokens=5, output_tokens=2)


def asked(
    socket: Path, triton: Any, path: str = CHAT, share: float = 1.0, times: int = 1, **fields: Any
) -> tuple[list[LiveAnswer], Any]:
    """Ask a gateway, and return what its `serve` was given, and the last response."""
    given: list[LiveAnswer] = []
    settings = fields.pop("settings", {})

    async def take(request: Mapping[str, Any]) -> ServerReport:
        if request["do"] == "judge":
            given.append(LiveAnswer.from_json(request["answer"]))
        return ServerReport(State.READY)

    async def go() -> Any:
        app = gateways.app_before(
            triton,
            Settings(gateways.NO_TRITON, supervisor=socket, certify_share=share, local=True,
                     **settings),
        )  # fmt: skip
        transport = httpx.ASGITransport(app=app)
        client = httpx.AsyncClient(transport=transport, base_url="http://localhost")
        async with listening(socket, take), client:
            for _ in range(times):
                response = await client.post(path, json={**HELLO, **fields})
                await app.state.gateway.live_answers.close()
        return response

    return given, asyncio.run(go())


@pytest.fixture
def socket(tmp_path: Path) -> Path:
    return tmp_path / "sock"


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_is_handed_over_and_its_user_sees_nothing_of_its_scores(
    socket: Path, stream: bool, capfd: pytest.CaptureFixture[str]
) -> None:
    (answer,), response = asked(socket, Scored(), stream=stream)
    assert answer.asked == {"messages": HELLO["messages"]}
    assert (answer.model, answer.ids, answer.logprobs) == ("m", (4, 9), (-0.25, -1.5))
    assert answer.likeliest == (True, False)
    assert (answer.input_tokens, answer.url) == (5, gateways.URL)
    assert 0 <= answer.age < 5
    (_, plain) = asked(socket, Scored(), share=0.0, stream=stream)
    assert masked(response) == masked(plain)
    assert "secret" not in "".join(capfd.readouterr())


def masked(response: httpx.Response) -> list[Any]:
    """Return what was answered, without what differs from one answer to the next."""
    assert response.status_code == 200
    lines = [line.removeprefix("data: ") for line in response.text.splitlines() if "{" in line]
    return [{**json.loads(line), "id": "", "created": 0} for line in lines]


def test_who_asks_for_scores_has_as_many_as_without_it(socket: Path) -> None:
    triton = Scored()
    given, response = asked(socket, triton, logprobs=True, top_logprobs=3)
    assert triton.requests[-1]["logprobs"] == 3
    assert len(given) == 1
    assert len(response.json()["choices"][0]["logprobs"]["content"]) == 2


@pytest.mark.parametrize("prompt", ["a secret", [7, 8, 9]])
def test_a_prompt_is_handed_over_as_the_model_got_it(socket: Path, prompt: str | list[int]) -> None:
    (answer,), _ = asked(socket, Scored(), TEXT, prompt=prompt, messages=None)
    assert answer.asked == (
        {"prompt": prompt} if isinstance(prompt, str) else {"input_ids": prompt}
    )


def test_an_answer_of_an_adapter_is_handed_over_with_its_name(socket: Path) -> None:
    triton = Scored()
    triton.inputs.add("adapter")
    (answer,), response = asked(socket, triton, TEXT, prompt="a", messages=None, model="m:sql")
    assert response.status_code == 200
    assert (answer.model, answer.adapter) == ("m", "sql")
    assert answer.asked == {"prompt": "a", "adapter": "sql"}
    assert triton.requests[-1]["adapter"] == "sql"


@pytest.mark.parametrize(
    ("triton", "fields"),
    [
        (Scored("prompt_logprobs"), {}),
        (Scored("logprobs"), {}),
        (Scored("prompt_only"), {}),
        (Scored(count=MOST_TOKENS), {}),
        (Scored(prompt=MOST_TOKENS), {}),
        (gateways.Triton(), {}),
        (Scored(), {"n": 2}),
        (Scored(), {"response_format": {"type": "json_schema", "json_schema": {"schema": {}}}}),
        (Scored(), {"messages": [{"role": "user", "content": "a" * 4 * MOST_TOKENS}]}),
        (Scored(), {"settings": {"releases": (Plan("shadow", "m", "new", 1.0),)}}),
    ],
)
def test_what_cannot_be_judged_or_would_take_long_is_not_handed_over(
    socket: Path, triton: Any, fields: dict[str, Any]
) -> None:
    given, response = asked(socket, triton, **fields)
    assert response.status_code == 200
    assert given == []


def test_a_share_is_drawn_and_none_without_being_asked_for(socket: Path) -> None:
    given, _ = asked(socket, Scored(), share=0.3, times=100)
    # The chance that fewer or more are drawn is below one in a hundred thousand.
    assert 10 < len(given) < 52
    triton = Scored()
    given, _ = asked(socket, triton, share=0.0, times=20)
    assert given == []
    assert not any("logprobs" in request for request in triton.requests)


class Full(Scored):
    """Has no room for the first request."""

    async def close(self) -> None:
        pass

    async def generate(self, name: str, prompt: str = "", **options: Any) -> Completion:
        answer = await super().generate(name, prompt, **options)
        if len(self.scored) == 1:
            raise RequestRejectedError("full", code="queue_full")
        return answer

    @property
    def scored(self) -> list[Any]:
        return [each["logprobs"] for each in self.requests if "logprobs" in each]


def test_who_is_asked_again_in_the_background_sees_no_scores(socket: Path, tmp_path: Path) -> None:
    async def take(request: Mapping[str, Any]) -> ServerReport:
        return ServerReport(State.READY)

    async def go() -> Any:
        settings = Settings(
            gateways.NO_TRITON, supervisor=socket, certify_share=1.0, local=True,
            responses=tmp_path / "kept",
        )  # fmt: skip
        triton = Full()
        app = gateways.app_before(triton, settings)
        transport = httpx.ASGITransport(app=app)
        client = httpx.AsyncClient(transport=transport, base_url="http://localhost")
        async with listening(socket, take), client, app.router.lifespan_context(app):
            body = {"model": "m", "input": "Hi", "background": True}
            found = (await client.post("/v1/responses", json=body)).json()
            while found["status"] in ("queued", "in_progress"):
                await asyncio.sleep(0.02)
                found = (await client.get(f"/v1/responses/{found['id']}")).json()
        assert triton.scored == [1, 1]
        return found

    found = asyncio.run(go())
    assert found["status"] == "completed"
    ((part,),) = [item["content"] for item in found["output"]]
    assert not part["logprobs"]


def test_a_request_says_which_replica_has_answered_it() -> None:
    async def go() -> list[str]:
        replicas = Replicas([Address("127.0.0.1:1"), Address("127.0.0.1:2")])
        sent: list[str] = []
        for replica in replicas.all:
            replica.client = gateways.Triton()  # type: ignore[assignment]
        await replicas.generate("m", "Hi", on_replica=sent.append)
        async for _ in replicas.stream("m", "Hi", on_replica=sent.append):
            pass
        return sent

    sent = asyncio.run(go())
    assert len(sent) == 2
    assert {*sent} <= {"127.0.0.1:1", "127.0.0.1:2"}
