"""What a request's images may be, and how they are written in one."""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

IMAGE_LIMITS = "image_limits"
"""What a generator's settings call the limits of images; those of a model of text have none."""

IMAGE_ADAPTER = "image_adapter"
"""What a generator's settings call the adapter of all requests with images, if there is one."""

MAX_IMAGES = 8
"""How many images a request may have, unless the model's build says otherwise."""
MAX_IMAGE_MB = 20
"""How large the file of each may be: what phones and screens make is a tenth of that."""
MAX_MEGAPIXELS = 25
"""How many million pixels each may have: decoding takes up to 24 bytes of memory for each."""

_BEFORE_CONTENT = 160
_DATA_URL = re.compile(r"data:[\w.+/;= -]{0,128};base64,", re.ASCII | re.IGNORECASE)
_SHAPE = "send it as data:image/png;base64,…"


class ImageRefusedError(ValueError):
    """An image is not within the limits, or is not in the request."""


@dataclass(frozen=True)
class ImageLimits:
    """How many images a request may have, and what each may take."""

    images: int = MAX_IMAGES
    megabytes: int = MAX_IMAGE_MB
    megapixels: int = MAX_MEGAPIXELS

    @property
    def longest(self) -> int:
        """How many characters the data URL of an image may have."""
        return self.megabytes * 1_000_000 * 4 // 3 + _BEFORE_CONTENT


_BEGINNINGS = {b"\xff\xd8\xff": "jpeg", b"GIF8": "gif", b"RIFF": "webp"}


def image_url(image: Path | bytes) -> str:
    """Return the data URL of a file, or of what is in one, which says of which type it is."""
    content = image if isinstance(image, bytes) else image.read_bytes()
    kind = next((kind for begins, kind in _BEGINNINGS.items() if content.startswith(begins)), "png")
    return f"data:image/{kind};base64,{base64.b64encode(content).decode()}"


def with_images(text: str, urls: Sequence[str], *, in_parts: bool) -> str | list[dict[str, Any]]:
    """Return the content of a message that shows images, if any, and then asks about them.

    In OpenAI's API they are in its parts; Triton has an input of their own for them.
    """
    if not urls:
        return text
    shown: list[dict[str, Any]] = [
        {"type": "image_url", "image_url": {"url": url}} if in_parts else {"type": "image"}
        for url in urls
    ]
    return [*shown, {"type": "text", "text": text}]


def check_image_sizes(urls: Sequence[str], limits: ImageLimits) -> None:
    """Refuse too many images, or one that is too long, without a look into them."""
    if len(urls) > limits.images:
        raise ImageRefusedError(
            f"{len(urls)} images are more than the {limits.images} that this model takes: "
            "send fewer"
        )
    for number, url in enumerate(urls, 1):
        if len(url) > limits.longest:
            raise ImageRefusedError(
                f"image {number} is over {limits.megabytes} MB: send it smaller"
            )


def image_contents(urls: Sequence[str], limits: ImageLimits) -> list[bytes]:
    """Return the files that data URLs have; the message of a refusal names no part of any."""
    check_image_sizes(urls, limits)
    return [_content(url, number, limits) for number, url in enumerate(urls, 1)]


def _content(url: str, number: int, limits: ImageLimits) -> bytes:
    match = _DATA_URL.match(url)
    if match is None:
        kind = "is an address, and none is opened" if "://" in url[:64] else "is no data URL"
        raise ImageRefusedError(f"image {number} {kind}: {_SHAPE}")
    if (len(url) - match.end()) * 3 / 4 > limits.megabytes * 1e6 + 3:
        raise ImageRefusedError(f"image {number} is over {limits.megabytes} MB: send it smaller")
    try:
        content = base64.b64decode(url[match.end() :], validate=True)
    except (binascii.Error, ValueError):
        raise ImageRefusedError(f"image {number} is not base64: {_SHAPE}") from None
    if not content:
        raise ImageRefusedError(f"image {number} is empty: {_SHAPE}")
    return content
