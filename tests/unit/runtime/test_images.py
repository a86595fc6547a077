"""Reading the images of requests, whatever is in them."""

from __future__ import annotations

import base64
import io
import os
import signal
import struct
import time
import zlib
from collections.abc import Iterator
from typing import Any

import pytest
from PIL import Image as pillow

from llmserve.runtime import ImageReader, RequestError
from llmserve.runtime.contract import ImageLimits
from llmserve.testing.tiny_seeing import data_url, picture


@pytest.fixture(scope="module")
def reader() -> Iterator[ImageReader]:
    reader = ImageReader(ImageLimits(images=4, megabytes=1, megapixels=1))
    yield reader
    reader.close()


def refusal(reader: ImageReader, *urls: str) -> str:
    with pytest.raises(RequestError) as refused:
        reader.read(urls)
    assert (refused.value.code, refused.value.param) == ("invalid_value", "image_url")
    return str(refused.value)


def url_of(content: bytes, kind: str = "image/png") -> str:
    return f"data:{kind};base64,{base64.b64encode(content).decode()}"


def png(width: int, height: int, rows: bytes) -> bytes:
    """Return a PNG whose header says any size."""

    def chunk(name: bytes, content: bytes) -> bytes:
        check = struct.pack(">I", zlib.crc32(name + content))
        return struct.pack(">I", len(content)) + name + content + check

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    data = chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + data


@pytest.mark.parametrize(
    ("kind", "options"),
    [("PNG", {}), ("WEBP", {"lossless": True}), ("GIF", {}), ("JPEG", {"quality": 95})],
)
def test_each_type_is_read_in_order(reader: ImageReader, kind: str, options: Any) -> None:
    pictures = [picture(1, 30, 20).quantize(16).convert("RGB"), picture(2, 5, 7)]
    urls = [data_url(pictures[0], kind, **options), data_url(pictures[1])]
    first, second = reader.read(urls)
    assert (first.width, first.height, len(first.rgb)) == (30, 20, 1800)
    assert (second.width, second.height, second.rgb) == (5, 7, pictures[1].tobytes())
    if kind != "JPEG":
        assert first.rgb == pictures[0].tobytes()


def test_the_content_decides_and_not_the_named_type(reader: ImageReader) -> None:
    url = data_url(picture(3)).replace("image/png", "image/jpeg")
    assert reader.read([url])[0].rgb == picture(3).tobytes()


def test_an_image_is_turned_as_its_camera_was(reader: ImageReader) -> None:
    exif = pillow.Exif()
    exif[0x0112] = 6
    (image,) = reader.read([data_url(picture(4, 12, 8), exif=exif)])
    upright = picture(4, 12, 8).transpose(pillow.Transpose.ROTATE_270)
    assert (image.width, image.height, image.rgb) == (8, 12, upright.tobytes())


def test_transparent_parts_are_white(reader: ImageReader) -> None:
    clear = pillow.new("RGBA", (2, 1), (9, 9, 9, 0))
    clear.putpixel((1, 0), (10, 20, 30, 255))
    assert reader.read([data_url(clear)])[0].rgb == b"\xff\xff\xff\x0a\x14\x1e"


def test_sixteen_bits_of_grey_keep_their_brightness(reader: ImageReader) -> None:
    grey = pillow.new("I;16", (1, 1), 257 * 100)
    assert reader.read([data_url(grey)])[0].rgb == bytes([100] * 3)


def test_a_photo_with_a_second_picture_in_it_is_read(reader: ImageReader) -> None:
    file = io.BytesIO()
    picture(5).save(file, "MPO", save_all=True, append_images=[picture(6)])
    (image,) = reader.read([url_of(file.getvalue(), "image/jpeg")])
    assert (image.width, image.height) == (24, 16)


def animated(kind: str) -> str:
    return data_url(picture(1), kind, save_all=True, append_images=[picture(2)])


SVG = b"<svg xmlns='http://www.w3.org/2000/svg'><image href='file:///etc/passwd'/></svg>"
TYPES = "image 1 is of no type that is read here: send a PNG, JPEG, WebP or GIF"
MOVING = "image 1 is animated: send one of its pictures"
ADDRESS = "image 1 is an address, and none is opened: send it as data:image/png;base64,…"
CUT = "image 1 is cut off or damaged: send the whole file"
REFUSED: list[tuple[str, str]] = [
    ("http://169.254.169.254/latest", ADDRESS),
    ("https://example.com/a.png", ADDRESS),
    ("HTTP://[::1]/a.png", ADDRESS),
    ("file:///etc/passwd", ADDRESS),
    ("/etc/passwd", "image 1 is no data URL: send it as data:image/png;base64,…"),
    ("data:image/png,abc", "image 1 is no data URL: send it as data:image/png;base64,…"),
    ("data:image/png;base64,a b", "image 1 is not base64: send it as data:image/png;base64,…"),
    ("data:image/png;base64,é", "image 1 is not base64: send it as data:image/png;base64,…"),
    ("data:image/png;base64,", "image 1 is empty: send it as data:image/png;base64,…"),
    ("data:image/png;base64," + "A" * 1_400_000, "image 1 is over 1 MB: send it smaller"),
    (url_of(SVG, "image/svg+xml"), TYPES),
    (data_url(picture(1), "TIFF"), TYPES),
    (data_url(picture(1), "BMP"), TYPES),
    (url_of(b"%PDF-1.7"), TYPES),
    (animated("GIF"), MOVING),
    (animated("PNG"), MOVING),
    (animated("WEBP"), MOVING),
    (data_url(picture(1, 90, 90))[:4022], CUT),
    (data_url(picture(1, 90, 90), "JPEG")[:2023], CUT),
    (url_of(png(50_000, 50_000, b"")),
     "image 1 has 50000 x 50000 pixels, more than the 1 million that are read here: "
     "send it smaller"),
    (url_of(png(2**31 - 1, 2**31 - 1, b"")),
     "image 1 has 2147483647 x 2147483647 pixels, more than the 1 million that are read here: "
     "send it smaller"),
    (url_of(png(100, 100, b"\0" * 10)), CUT),
]  # fmt: skip


@pytest.mark.parametrize(("url", "words"), REFUSED)
def test_what_is_no_image_is_refused_in_one_line(reader: ImageReader, url: str, words: str) -> None:
    assert refusal(reader, url) == words


def test_more_than_a_request_may_have_are_refused_and_the_wrong_one_is_numbered(
    reader: ImageReader,
) -> None:
    good = data_url(picture(1))
    words = "10000 images are more than the 4 that this model takes: send fewer"
    assert refusal(reader, *[good] * 10_000) == words
    assert refusal(reader, good, "data:,").startswith("image 2 is no data URL")


def test_a_bomb_of_a_megabyte_harms_nobody(reader: ImageReader) -> None:
    """Two hundred megabytes of zeros behind a small header: it is never unpacked whole."""
    bomb = png(1000, 1000, b"\0" * (200 << 20))
    started = time.monotonic()
    (image,) = reader.read([url_of(bomb)])
    assert set(image.rgb) == {0}
    assert time.monotonic() - started < 30


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("CPU_SECONDS", 0.0005, "image 1 takes too long to decode: send it smaller"),
        ("_MEMORY", -(20 << 20), "image 1 takes too much memory: send it smaller"),
    ],
)
def test_an_image_that_takes_too_much_is_refused_by_a_process_that_goes_on(
    name: str, value: float, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(f"llmserve.runtime.answer.images.{name}", value)
    reader = ImageReader(ImageLimits(megabytes=5, megapixels=1))
    noise = data_url(picture(1, 999, 999))
    assert refusal(reader, noise) == words
    assert reader._process is not None
    process = reader._process.pid
    assert refusal(reader, noise) == words
    assert reader._process.pid == process
    reader.close()


def test_a_killed_process_is_replaced(reader: ImageReader) -> None:
    assert reader.read([data_url(picture(1))])
    assert reader._process is not None
    os.kill(reader._process.pid, signal.SIGKILL)
    assert reader.read([data_url(picture(1))])
