"""Images through the gateway to a model that sees: what clients send, and what attackers send."""

from __future__ import annotations

import base64
import io
import struct
import zlib
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import anthropic
import ollama
import openai
import pytest
from langchain_core.messages import HumanMessage
from langchain_openai import ChatOpenAI
from PIL import Image

from llmserve.testing import LiveTriton

from .process import Gateway

pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def seeing(triton: LiveTriton, tmp_path_factory: pytest.TempPathFactory) -> str:
    from llmserve.testing.tiny_seeing import save_seeing

    return triton.build("hf", str(save_seeing("llava", tmp_path_factory.mktemp("seeing"))))


def file_of(image: Image.Image, kind: str = "PNG", **options: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def colours(seed: int, width: int = 24, height: int = 16) -> Image.Image:
    from llmserve.testing.tiny_seeing import picture

    return picture(seed, width, height)


def url_of(content: bytes, kind: str = "png") -> str:
    return f"data:image/{kind};base64,{base64.b64encode(content).decode()}"


def chat(model: str, *urls: str, text: str = "What?") -> dict[str, Any]:
    parts = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
    message = {"role": "user", "content": [*parts, {"type": "text", "text": text}]}
    return {"model": model, "messages": [message], "max_tokens": 4, "temperature": 0}


def said(gateway: Gateway, body: dict[str, Any]) -> Any:
    answer = gateway.post("/v1/chat/completions", body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def png(width: int, height: int, rows: bytes) -> bytes:
    """Return a PNG whose header says any size."""

    def chunk(name: bytes, content: bytes) -> bytes:
        check = struct.pack(">I", zlib.crc32(name + content))
        return struct.pack(">I", len(content)) + name + content + check

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    data = chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + data


def test_a_large_photo_is_answered_and_counted_as_its_processor_does(
    gateway: Gateway, seeing: str
) -> None:
    photo = file_of(colours(1, 2000, 1500))
    assert len(photo) > 8_000_000
    body = chat(seeing, url_of(photo), url_of(photo))
    usage = said(gateway, body)["usage"]
    counted = gateway.post("/tokenize", {"model": seeing, "messages": body["messages"]}).json()
    assert usage["prompt_tokens"] == counted["count"]
    without = gateway.post("/tokenize", {"model": seeing, **chat(seeing)}).json()
    # 16 tokens stand for each image.
    assert counted["count"] - without["count"] == 32


def test_a_photo_is_seen_as_its_camera_was_held(gateway: Gateway, seeing: str) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    lying = colours(4, 40, 24)
    upright = lying.transpose(Image.Transpose.ROTATE_270)

    def likely(content: bytes) -> Any:
        answer = said(gateway, {**chat(seeing, url_of(content)), "logprobs": True})
        return [token["logprob"] for token in answer["choices"][0]["logprobs"]["content"]]

    turned = likely(file_of(lying, exif=exif))
    assert turned == pytest.approx(likely(file_of(upright)), abs=1e-4)
    assert turned != pytest.approx(likely(file_of(lying)), abs=1e-4)


MOVING = {"save_all": True, "append_images": [Image.new("RGB", (24, 16), "red")]}
SVG = b"<svg xmlns='http://www.w3.org/2000/svg'><image href='file:///etc/passwd'/></svg>"


def attacks() -> dict[str, tuple[list[str], str]]:
    still = Image.new("RGB", (24, 16), "blue")
    noise = file_of(colours(2, 400, 300))
    of_no_type = "image 1 is of no type that is read here: send a PNG, JPEG, WebP or GIF"
    moves, cut = "image 1 is animated", "image 1 is cut off or damaged"
    return {
        "a header of 50,000 x 50,000": ([url_of(png(50_000, 50_000, b""))], "50000 x 50000 pixels"),
        "a bomb of zeros": ([url_of(png(24_000, 24_000, bytes(3 << 24)))], "24000 x 24000 pixels"),
        "a TIFF": ([url_of(file_of(still, "TIFF"), "tiff")], of_no_type),
        "an SVG": ([url_of(SVG, "svg+xml")], of_no_type),
        "a page": ([url_of(b"<html>" * 99, "png")], of_no_type),
        "an animated GIF": ([url_of(file_of(still, "GIF", **MOVING))], moves),
        "an animated PNG": ([url_of(file_of(still, "PNG", **MOVING))], moves),
        "an animated WebP": ([url_of(file_of(still, "WEBP", **MOVING))], moves),
        "a PNG that is cut off": ([url_of(noise[: len(noise) // 2])], cut),
        "a JPEG that is cut off": ([url_of(file_of(colours(3, 300, 200), "JPEG")[:900])], cut),
        "nothing": (["data:image/png;base64,"], "an image that is not in the request"),
        "10,000 images": ([url_of(file_of(still))] * 10_000, "10000 images"),
        "nine images": ([url_of(file_of(still))] * 9, "9 images are more than the 8"),
        "an address": (["http://169.254.169.254/a.png"], "this server opens no addresses"),
    }


def test_each_attack_is_refused_in_a_line_and_harms_nobody(gateway: Gateway, seeing: str) -> None:
    asked = chat(seeing, url_of(file_of(colours(5))))
    alone = said(gateway, asked)["choices"][0]["message"]["content"]
    with ThreadPoolExecutor(1) as other:
        for name, (urls, words) in attacks().items():
            beside = other.submit(said, gateway, asked)
            refused = gateway.post("/v1/chat/completions", chat(seeing, *urls))
            assert refused.status_code == 400, (name, refused.text)
            message = refused.json()["error"]["message"]
            assert words in message, (name, message)
            assert "\n" not in message
            assert beside.result(60)["choices"][0]["message"]["content"] == alone, name


def test_clients_of_others_show_images_unchanged(gateway: Gateway, seeing: str) -> None:
    """Each with its own form of an image, and all get the same answer."""
    content = file_of(colours(6))
    url, data = url_of(content), base64.b64encode(content).decode()
    expected = said(gateway, chat(seeing, url))["choices"][0]["message"]["content"]
    base = f"{gateway.root}/v1"
    chats = openai.OpenAI(base_url=base, api_key="x", max_retries=0)
    answer = chats.chat.completions.create(**chat(seeing, url))
    assert answer.choices[0].message.content == expected
    shown: Any = [
        {"type": "input_image", "image_url": url}, {"type": "input_text", "text": "What?"},
    ]  # fmt: skip
    response = chats.responses.create(
        model=seeing, input=[{"role": "user", "content": shown}], max_output_tokens=4, temperature=0
    )
    assert response.output_text == expected
    source: Any = {"type": "base64", "media_type": "image/png", "data": data}
    parts: Any = [{"type": "image", "source": source}, {"type": "text", "text": "What?"}]
    claude = anthropic.Anthropic(base_url=gateway.root, api_key="x", max_retries=0)
    message = claude.messages.create(
        model=seeing, max_tokens=4, messages=[{"role": "user", "content": parts}],
        extra_body={"temperature": 0},
    )  # fmt: skip
    (block,) = message.content
    assert block.type == "text"
    assert block.text == expected
    chain = ChatOpenAI(model=seeing, base_url=base, api_key="x", max_tokens=4, temperature=0)  # type: ignore[call-arg, arg-type]
    asked = HumanMessage(content=chat(seeing, url)["messages"][0]["content"])
    assert chain.invoke([asked]).content == expected
    few: Any = {"num_predict": 4, "temperature": 0}
    shown = [{"role": "user", "content": "What?", "images": [data]}]
    seen = ollama.Client(host=gateway.root).chat(seeing, shown, options=few)
    assert seen.message.content == expected
