"""The gateway with a real Triton, used by OpenAI's own client and by malicious clients."""

from __future__ import annotations

import asyncio
import json
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median
from typing import Any, Literal

import httpx2 as httpx
import openai
import pydantic
import pytest

from llmserve.testing import LiveTriton, run
from llmserve_gateway.keys import new_key

from .process import Gateway

CHAT: list[Any] = [{"role": "user", "content": "What is the capital of Japan?"}]
PROMPT = "Programming in C++ is like"


def test_a_chat_is_answered_whole_and_as_a_stream(gateway: Gateway, model: str) -> None:
    client = gateway.client()
    whole = client.chat.completions.create(model=model, messages=CHAT)
    assert whole.choices[0].message.content == "The capital of Japan is Tokyo."
    assert whole.choices[0].finish_reason == "stop"
    assert whole.usage
    stream = client.chat.completions.create(
        model=model, messages=CHAT, stream=True, stream_options={"include_usage": True}
    )
    chunks = list(stream)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content
    # The role, more than one piece of text, and the usage; on a busy machine, pieces join.
    assert len(chunks) > 3
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[-2].choices[0].finish_reason == "stop"
    assert (chunks[-1].choices, chunks[-1].usage) == ([], whole.usage)


def test_the_answer_is_the_same_as_tritons(
    triton: LiveTriton, gateway: Gateway, model: str
) -> None:
    direct = triton.client.generate(model, PROMPT, max_tokens=20)
    through = gateway.client().completions.create(model=model, prompt=PROMPT, max_tokens=20)
    assert through.choices[0].text == direct.text
    assert through.choices[0].finish_reason == direct.finish_reason == "length"
    assert through.usage
    assert through.usage.prompt_tokens == direct.input_tokens
    assert through.usage.completion_tokens == direct.output_tokens == 20


def test_several_prompts_and_several_answers_to_each(gateway: Gateway, model: str) -> None:
    several = gateway.client().completions.create(
        model=model, prompt=[PROMPT, "Once upon a time"], n=2, max_tokens=6
    )
    assert [choice.index for choice in several.choices] == [0, 1, 2, 3]
    texts = [choice.text for choice in several.choices]
    assert texts[0] == texts[1] != texts[2] == texts[3]
    single = gateway.client().completions.create(model=model, prompt=PROMPT, max_tokens=6)
    assert single.usage
    assert several.usage
    assert several.usage.completion_tokens == 24
    assert several.usage.prompt_tokens < 2 * single.usage.prompt_tokens + 10


def test_stop_words_log_probabilities_and_echo(gateway: Gateway, model: str) -> None:
    client = gateway.client()
    stopped = client.completions.create(model=model, prompt=PROMPT, stop=[" bottle"], echo=True)
    assert stopped.choices[0].text == f"{PROMPT} building a ship in a"
    chat = client.chat.completions.create(
        model=model, messages=CHAT, logprobs=True, top_logprobs=2, max_tokens=3
    )
    assert chat.choices[0].logprobs
    entries = chat.choices[0].logprobs.content
    assert entries
    assert len(entries) == 3
    assert [len(entry.top_logprobs) for entry in entries] == [2, 2, 2]
    assert entries[0].logprob == entries[0].top_logprobs[0].logprob


@pytest.mark.parametrize(
    ("body", "status", "param"),
    [
        ({"model": "nope"}, 404, "model"),
        ({"messages": []}, 400, "messages"),
        ({"messages": [{"role": "king", "content": ""}]}, 400, "messages[0]"),
        ({"temperature": 3}, 400, "temperature"),
        ({"n": 0}, 400, "n"),
        ({"stop": ["x"] * 65}, 400, "stop"),
        ({"tools": [{"type": "function"}]}, 400, "tools"),
        ({"max_tokens": 10**14}, 400, "max_tokens"),
        ({"chat_template_kwargs": {"messages": []}}, 400, "chat_template_kwargs"),
        ({"model": "m" * 100_000}, 404, "model"),
        ({"max_tokens": 5000}, 400, "max_tokens"),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": 5}}}, 400,
         "response_format"),
    ],
)  # fmt: skip
def test_unsupported_requests_are_refused_by_name(
    gateway: Gateway, model: str, body: dict[str, Any], status: int, param: str | None
) -> None:
    request = {"model": model, "messages": CHAT, **body}
    answer = httpx.post(f"{gateway.url}/chat/completions", json=request)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (status, param), error
    assert error.keys() == {"message", "type", "param", "code"}


def test_unknown_fields_are_accepted_and_logged_once(gateway: Gateway, model: str) -> None:
    request = {"model": model, "messages": CHAT, "user": "me", "brand_new": 1, "max_tokens": 2}
    for name in ("first", "second"):
        answer = gateway.post("/v1/chat/completions", request, **{"x-request-id": name})
        assert answer.status_code == 200
    gateway.logged(id="second")
    warnings = "".join(gateway.warnings)
    assert (warnings.count("'brand_new'"), warnings.count("'user'")) == (1, 0)


def test_a_request_can_shorten_its_timeout(gateway: Gateway, model: str) -> None:
    request = {"model": model, "prompt": PROMPT, "max_tokens": 400, "ignore_eos": True}
    late = gateway.post("/v1/completions", request, **{"x-request-timeout": "0.05"})
    assert (late.status_code, late.json()["error"]["code"]) == (504, "timeout")
    refused = gateway.post("/v1/completions", request, **{"x-request-timeout": "soon"})
    assert refused.json()["error"]["param"] == "x-request-timeout"


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (b"[" * 200_000, 400),
        (b'{"model": "x", "prompt": "' + b"a" * (10 << 20) + b'"}', 413),
        (b"\xff\xfe", 400),
        (b'{"model": "x", "prompt": "\\ud800"}', 404),
        (b'{"model": "x", "prompt": "a", "seed": ' + b"9" * 5000 + b"}", 400),
    ],
    ids=["brackets", "large", "binary", "surrogate", "digits"],
)
def test_malicious_bodies(triton: LiveTriton, gateway: Gateway, body: bytes, status: int) -> None:
    answer = httpx.post(f"{gateway.url}/completions", content=body)
    assert answer.status_code == status, answer.text
    assert answer.json()["error"]["message"]
    assert triton.server.alive()


def test_a_flood_of_tiny_chunks_is_cut_off(triton: LiveTriton, gateway: Gateway) -> None:
    host, _, port = gateway.root.removeprefix("http://").partition(":")
    head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n"
    with socket.create_connection((host, int(port)), timeout=60) as connection:
        connection.sendall(head.encode())
        try:
            for _ in range(600):
                connection.sendall(b"1\r\n \r\n" * 1000)
        except OSError:
            pass
        else:
            connection.sendall(b"0\r\n\r\n")
            assert b" 4" in connection.recv(64)
    assert httpx.get(f"{gateway.root}/livez").status_code == 200
    assert triton.server.alive()


@pytest.mark.parametrize(("stream", "times"), [(False, 1), (True, 1), (True, 2)])
def test_disconnecting_frees_the_slot(
    gateway: Gateway, model: str, stream: bool, times: int
) -> None:
    name = f"disconnects-{stream}-{times}"
    request = {"model": model, "prompt": PROMPT, "stream": stream, "max_tokens": 400}
    request["ignore_eos"] = True
    host, _, port = gateway.root.removeprefix("http://").partition(":")
    body = json.dumps(request)
    head = f"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\nx-request-id: {name}\r\n"
    with socket.create_connection((host, int(port)), timeout=60) as connection:
        connection.sendall(f"{head}content-length: {len(body)}\r\n\r\n{body}".encode() * times)
        if stream:
            assert connection.recv(64)
        else:
            while not running(gateway, model):
                assert not [line for line in gateway.log if line["id"] == name]
                time.sleep(0.02)
    disconnected = time.monotonic()
    while running(gateway, model):
        # It should take 0.5 s, but a machine that is busy with other tests may stall.
        assert time.monotonic() < disconnected + 3
        time.sleep(0.02)
    assert gateway.logged(id=name)["outcome"] == "cancelled"
    assert "Traceback" not in "".join(gateway.warnings)


def running(gateway: Gateway, model: str) -> float:
    for line in httpx.get(f"{gateway.root}/metrics").text.splitlines():
        if line.startswith(f'vllm:num_requests_running{{model_name="{model}"}}'):
            return float(line.split()[-1])
    return 0.0


def test_a_full_queue_refuses_at_once(triton: LiveTriton, model: str) -> None:
    gateway = Gateway(triton, "--max-requests", "1", "--max-queue", "8")
    try:
        request = {"model": model, "prompt": PROMPT, "max_tokens": 100, "ignore_eos": True}

        def ask(_: int) -> tuple[int, str | None]:
            answer = client.post(f"{gateway.url}/completions", json=request, timeout=120)
            return answer.status_code, answer.headers.get("retry-after")

        # A single client, because creating one takes longer than an answer.
        with httpx.Client() as client, ThreadPoolExecutor(20) as pool:
            responses = list(pool.map(ask, range(20)))
        refused = [after for status, after in responses if status == 429 and after]
        # 9 have a place; some may be answered before the last ones arrive.
        assert len(refused) >= 6
        assert sum(status == 200 for status, _ in responses) == 20 - len(refused)
        # Measured by the gateway: the twenty threads of this process would distort the time.
        gateway.logged(status=429)
        assert median(line["total_ms"] for line in gateway.log if line["status"] == 429) < 50
    finally:
        gateway.stop()


def test_keys(triton: LiveTriton, model: str, tmp_path: Path) -> None:
    file = tmp_path / "keys.json"
    alice = new_key(file, "alice", requests_per_minute=2)
    assert alice not in file.read_text(encoding="utf-8")
    guarded = Gateway(triton, "--keys", str(file))
    try:
        assert guarded.client(alice).models.list().data
        bob = new_key(file, "bob", models=["another"])
        with pytest.raises(openai.PermissionDeniedError):
            guarded.client(bob).completions.create(model=model, prompt="x", max_tokens=1)
        request: Any = {"model": model, "prompt": "x", "max_tokens": 1}
        for _ in range(2):
            guarded.client(alice).completions.create(**request)
        with pytest.raises(openai.RateLimitError):
            guarded.client(alice).completions.create(**request)
        assert guarded.logged(key="alice")
        assert guarded.logged(key="bob")
        assert not [line for line in guarded.log if alice in json.dumps(line)]
    finally:
        guarded.stop()


def test_other_addresses_need_keys_or_no_auth(triton: LiveTriton) -> None:
    url = triton.server.grpc_url
    done = run("gateway", "--host", "0.0.0.0", "--port", "0", "--url", url)
    assert done.returncode == 2
    assert "--no-auth" in done.stderr


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["gateway", "--port", "99999"], "--port"),
        (["gateway", "--port", "0", "--keys", "/nowhere/keys.json"], "cannot read the keys"),
        (["gateway", "--port", "0", "--tls-cert", "/nowhere/cert.pem"], "--tls-cert"),
        (["key", "new", "me", "--file", "/nowhere/keys.json"], "cannot write"),
    ],
)
def test_an_invalid_command_is_reported_in_one_line(args: list[str], message: str) -> None:
    done = run(*args)
    assert done.returncode in (2, 3)
    assert message in done.stderr
    assert len(done.stderr.splitlines()) == 1, done.stderr


def test_running_streams_end_when_the_gateway_is_stopped(triton: LiveTriton, model: str) -> None:
    stopping = Gateway(triton)
    request: Any = {"model": model, "prompt": PROMPT, "stream": True, "max_tokens": 200}
    stream = stopping.client().completions.create(**request, extra_body={"ignore_eos": True})
    first = next(iter(stream))
    stopping.process.terminate()
    chunks = [first, *stream]
    assert chunks[-1].choices[0].finish_reason == "length"
    assert stopping.process.wait(20) == 0


def test_the_clients_for_asyncio(gateway: Gateway, model: str) -> None:
    async def ask() -> list[str]:
        async with openai.AsyncOpenAI(base_url=gateway.url, api_key="none") as client:

            async def chat() -> str:
                stream = await client.chat.completions.create(
                    model=model, messages=CHAT, stream=True
                )
                return "".join([c.choices[0].delta.content or "" async for c in stream])

            return list(await asyncio.gather(*(chat() for _ in range(8))))

    assert set(asyncio.run(ask())) == {"The capital of Japan is Tokyo."}


def test_models_and_health(triton: LiveTriton, gateway: Gateway, model: str) -> None:
    names = [entry.id for entry in gateway.client().models.list()]
    assert model in names
    assert gateway.client().models.retrieve(model).id == model
    with pytest.raises(openai.NotFoundError):
        gateway.client().models.retrieve("nope")
    assert httpx.get(f"{gateway.root}/readyz").json()["models"][model] == {"ready": True}
    assert httpx.get(f"{gateway.root}/readyz/{model}").status_code == 200
    assert httpx.get(f"{gateway.root}/readyz/nope").status_code == 404
    (info,) = [m for m in httpx.get(f"{gateway.url}/models").json()["data"] if m["id"] == model]
    assert info["max_model_len"] == 512


def test_answers_follow_a_schema(gateway: Gateway, model: str) -> None:
    class City(pydantic.BaseModel):
        name: Literal["Tokyo", "Paris"]

    chat = gateway.client().chat.completions.parse(
        model=model, messages=CHAT, response_format=City, max_tokens=60
    )
    assert isinstance(chat.choices[0].message.parsed, City)
    with gateway.client().chat.completions.stream(
        model=model, messages=CHAT, response_format=City, max_tokens=60
    ) as stream:
        assert isinstance(stream.get_final_completion().choices[0].message.parsed, City)


@pytest.mark.parametrize("connection", ["keep-alive", "close"])
def test_the_log_has_figures_and_no_text(gateway: Gateway, model: str, connection: str) -> None:
    name = f"from-me-{connection}"
    answer = httpx.post(
        f"{gateway.url}/completions",
        json={"model": model, "prompt": PROMPT, "max_tokens": 3},
        headers={"x-request-id": name, "connection": connection},
    )
    assert answer.headers["x-request-id"] == name
    line = gateway.logged(id=name)
    assert (line["model"], line["outcome"], line["output_tokens"]) == (model, "length", 3)
    assert PROMPT not in json.dumps(gateway.log)


def test_a_name_that_triton_reads_only_in_part_is_no_model(gateway: Gateway, model: str) -> None:
    for name in (f"{model}\0", f"{model}\0other"):
        answer = gateway.post("/v1/completions", {"model": name, "prompt": "Hi"})
        assert (answer.status_code, answer.json()["error"]["code"]) == (404, "model_not_found")


def test_a_prompt_that_cannot_fit_is_refused_before_the_model_reads_it(
    gateway: Gateway, model: str
) -> None:
    giant = "giant " * 600_000
    gateway.post("/v1/completions", {"model": model, "prompt": "Hi", "max_tokens": 1})
    for path, fields in (
        ("/v1/completions", {"prompt": giant}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": giant}]}),
        ("/tokenize", {"prompt": giant}),
    ):
        error = gateway.post(path, {"model": model, **fields}).json()["error"]
        assert error["code"] == "context_length_exceeded"
        assert error["message"].startswith("this model's maximum context length is 512 tokens")
