"""Bodies with images: as large as their model allows, and no larger, one or many at once."""

from __future__ import annotations

import asyncio
import base64
import json
import random
from collections.abc import AsyncIterator, Callable
from contextlib import nullcontext
from typing import Any

import httpx2 as httpx
import pytest

from llmserve.client import Completion
from llmserve_gateway.admission import Limits
from llmserve_gateway.bodies import MAX_IMAGE_BYTES, ImageRoom, read_json
from llmserve_gateway.errors import ApiError
from llmserve_gateway.gateway import Settings

from .gateways import NO_TRITON, SeeingTriton, Triton, app_before, request_via

MB = 1 << 20
PHOTO = base64.b64encode(random.Random(1).randbytes(6 * MB + 1)).decode()
URL = f"data:image/jpeg;base64,{PHOTO}"


class ReportingTriton(SeeingTriton):
    """A model that tells what it takes of images."""

    def __init__(self, **images: int) -> None:
        super().__init__()
        self.about: dict[str, Any] = {
            "ids": [],
            "text": "",
            "context_length": None,
            "images": images,
        }

    async def generate(self, name: str, prompt: str, **options: Any) -> Completion:
        if options.get("prompt_only"):
            return Completion(json.dumps(self.about), "stop", 0, 0)
        return await super().generate(name, prompt, **options)


def chat(*urls: str, text: str = "What is this?") -> dict[str, Any]:
    parts = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
    content = [*parts, {"type": "text", "text": text}]
    return {"model": "m", "messages": [{"role": "user", "content": content}]}


def said(answer: Any) -> tuple[int, str]:
    return answer.status_code, answer.json()["error"]["message"]


OF_ANTHROPIC = {"type": "base64", "media_type": "image/jpeg", "data": PHOTO}
DOORS: list[tuple[str, dict[str, Any]]] = [
    ("/v1/chat/completions", chat(URL)),
    ("/v1/responses",
     {"model": "m", "input": [
         {"role": "user", "content": [{"type": "input_image", "image_url": URL}]}]}),
    ("/v1/messages",
     {"model": "m", "max_tokens": 4, "messages": [
         {"role": "user", "content": [{"type": "image", "source": OF_ANTHROPIC}]}]}),
    ("/api/chat",
     {"model": "m", "stream": False, "messages": [
         {"role": "user", "content": "What?", "images": [PHOTO]}]}),
    ("/api/generate", {"model": "m", "stream": False, "prompt": "What?", "images": [PHOTO]}),
]  # fmt: skip


@pytest.mark.parametrize(("path", "body"), DOORS)
def test_a_photo_as_a_camera_makes_it_reaches_the_model(path: str, body: Any) -> None:
    triton = SeeingTriton()
    answer = request_via(triton, path, json=body)
    assert answer.status_code == 200, answer.text
    (url,) = triton.requests[-1]["image_url"]
    assert url.rpartition(",")[2] == PHOTO
    # A model of text alone has no use for so much.
    refused = request_via(Triton(), path, json=body)
    assert refused.status_code == 413
    assert "the request is over 4 MB" in refused.text


@pytest.mark.parametrize(("triton", "reads"), [(SeeingTriton(), True), (Triton(), False)])
def test_a_list_of_models_says_which_read_images(triton: Triton, reads: bool) -> None:
    async def listed() -> Any:
        transport = httpx.ASGITransport(app=app_before(triton))
        async with httpx.AsyncClient(transport=transport, base_url="http://gateway") as client:
            return (await client.get("/v1/models")).json()["data"]

    (model,) = asyncio.run(listed())
    assert model["images"] is reads


def test_what_is_beside_images_has_its_old_limit() -> None:
    long, numbers = "A" * (5 * MB), [0] * (3 * MB)
    bodies = [
        chat(URL, text="Hello " * MB),
        # It looks like an image, and is not where one may be.
        chat(URL, text=long),
        {**chat(URL), "metadata": {"a": long}},
        {**chat(URL), "logit_bias": numbers},
        {**chat(URL), "stop": '"' * MB + "\\" * 3 * MB},
    ]
    for body in bodies:
        answer = request_via(SeeingTriton(), "/v1/chat/completions", json=body)
        assert said(answer) == (413, "without its images, the request is over 4 MB")
    answer = request_via(SeeingTriton(), "/v1/completions", json={"model": "m", "prompt": long})
    assert said(answer) == (413, "the request is over 4 MB")


def test_the_limit_is_what_the_model_takes() -> None:
    path = "/v1/chat/completions"
    small = ReportingTriton(images=2, megabytes=3, megapixels=25, tokens=64)
    whole = URL[: 4 * 900_000]
    assert request_via(small, path, json=chat(whole, whole)).status_code == 200
    words = "3 images are more than the 2 that this model takes: send fewer"
    short = URL[:4000]
    assert said(request_via(small, path, json=chat(short, short, short))) == (400, words)
    assert said(request_via(small, "/tokenize", json=chat(short, short, short))) == (400, words)
    large = URL[: 4 * 1_100_000]
    answer = request_via(small, path, json=chat(large))
    assert said(answer) == (400, "image 1 is over 3 MB: send it smaller")
    answer = request_via(small, path, json=chat(URL, URL))
    assert said(answer) == (413, "the request is over 11 MB")
    # Whatever a model says, there is an end to it.
    greedy = ReportingTriton(images=32, megabytes=20, megapixels=25, tokens=0)
    answer = request_via(greedy, path, content=b" " * (MAX_IMAGE_BYTES + 5 * MB))
    assert said(answer) == (413, "the request is over 68 MB")


def test_an_image_counts_as_its_model_says() -> None:
    limits = Limits(max_queued_tokens=100_000)
    path, body = "/v1/chat/completions", chat(URL[:4000])

    def waiting(tokens: int) -> int:
        triton = ReportingTriton(images=8, megabytes=20, megapixels=25, tokens=tokens)
        app = app_before(triton, Settings(NO_TRITON, limits=limits))
        counted = 0

        async def generate(name: str, prompt: str, **options: Any) -> Completion:
            nonlocal counted
            if not options.get("prompt_only"):
                counted = app.state.gateway.admission.tokens["m"]
            return await ReportingTriton.generate(triton, name, prompt, **options)

        async def go() -> None:
            transport = httpx.ASGITransport(app=app)
            async with httpx.AsyncClient(transport=transport, base_url="http://gateway") as client:
                assert (await client.get("/v1/models")).status_code == 200
                assert (await client.post(path, json=body)).status_code == 200

        triton.generate = generate  # type: ignore[method-assign]
        asyncio.run(go())
        return counted

    assert waiting(2576) - waiting(64) == 2512


def test_bodies_that_are_read_at_once_have_a_bound_together() -> None:
    settings = Settings(NO_TRITON, limits=Limits(max_queued_tokens=40_000))
    app = app_before(SeeingTriton(), settings)
    path, content = "/v1/chat/completions", json.dumps(chat(URL)).encode()

    async def go() -> None:
        transport = httpx.ASGITransport(app=app)
        came, left = asyncio.Event(), asyncio.Event()

        async def halting() -> AsyncIterator[bytes]:
            yield content[:-1]
            came.set()
            await left.wait()
            yield content[-1:]

        async with httpx.AsyncClient(transport=transport, base_url="http://gateway") as client:
            slow = asyncio.ensure_future(client.post(path, content=halting()))
            await came.wait()
            # What one has sent is counted, not what it has said; who sends more is refused.
            assert 8_000 < app.state.gateway.admission.tokens[""] < 40_000
            refused = await client.post(path, content=b'"' + b"A" * (12 * MB))
            assert refused.status_code == 429
            assert refused.headers["retry-after"]
            assert "that count as" in refused.json()["error"]["message"]
            # Nobody else notices.
            small = await client.post(path, json=chat(URL[:4000]))
            assert small.status_code == 200
            left.set()
            assert (await slow).status_code == 200
        assert not app.state.gateway.admission.tokens

    asyncio.run(go())


def read(body: bytes) -> Any:
    async def most() -> int:
        return MAX_IMAGE_BYTES

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": body}

    return asyncio.run(read_json(receive, {}, ImageRoom(most, lambda _: nullcontext())))


def as_python(content: Any) -> str:
    return json.dumps(content)


def as_php(content: Any) -> str:
    return json.dumps(content).replace("/", "\\/")


def as_indented(content: Any) -> str:
    return json.dumps(content, indent=2)


def as_dotnet(content: Any) -> str:
    return json.dumps(content).replace("+", "\\u002B").replace("=", "\\u003D")


@pytest.mark.parametrize("write", [as_python, as_php, as_dotnet, as_indented])
def test_what_is_cut_out_is_put_back_where_it_was(write: Callable[[Any], str]) -> None:
    rng = random.Random(2)
    texts = ["", "a", '"', "\\", 'see "', '\\"', "A" * 40_000, "é" * 20_000, '"' + "A" * 33_000,
             "A" * 33_000 + '"', "A" * 33_000 + "\\", "\\" + "A" * 33_000]  # fmt: skip
    for _ in range(5):
        urls = [f"data:image/png;base64,{PHOTO[: rng.randrange(2 * MB, 3 * MB)]}" for _ in range(3)]
        shown = [{"image_url": {"url": url}} for url in urls]
        content: dict[str, Any] = {
            "a": rng.sample(texts, 6),
            "b": shown,
            "images": [PHOTO[-MB:]],
            "c": [1, None],
        }
        if any(len(text) > 32_768 and text.isalpha() and text.isascii() for text in content["a"]):
            with pytest.raises(ApiError, match="without its images"):
                read(write(content).encode())
            content["a"] = [text for text in content["a"] if "AA" not in text]
        assert read(write(content).encode()) == content


@pytest.mark.parametrize(
    "body",
    [b'{"url": "' + b"A" * (5 * MB), b'{"url": ' + b"1" * (5 * MB) + b"}",
     b'{"url": "' + b"A" * (5 * MB) + b'" "' + b"A" * (5 * MB) + b'"}', b"A" * (5 * MB)],
)  # fmt: skip
def test_what_is_no_json_is_refused_whatever_it_looks_like(body: bytes) -> None:
    with pytest.raises(ApiError) as refused:
        read(body)
    assert refused.value.status in (400, 413)
