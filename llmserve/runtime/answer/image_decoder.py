"""Decodes one image with Pillow: the work of a :class:`LimitedProcess`.

It is run as a script, which is in no package.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping
from typing import Any

FORMATS = ("PNG", "JPEG", "WEBP", "GIF")
"""What is decoded. Others have no use here, or parts that could load or run something."""

_ANIMATED = ("PNG", "WEBP", "GIF")
_TYPES = "send a PNG, JPEG, WebP or GIF"


class UnreadableError(Exception):
    """The image cannot be read."""


def prepare(setup: Mapping[str, Any]) -> Callable[[Any, bytes], tuple[Mapping[str, Any], bytes]]:
    """Return what decodes an image of at most so many ``pixels``."""
    from PIL import (
        GifImagePlugin,
        Image,
        ImageOps,
        JpegImagePlugin,
        PngImagePlugin,
        WebPImagePlugin,
    )

    # Loaded here, once, instead of in every child.
    del GifImagePlugin, JpegImagePlugin, PngImagePlugin, WebPImagePlugin
    pixels = int(setup["pixels"])
    # The size is compared below, with words of our own.
    Image.MAX_IMAGE_PIXELS = None

    def decode(_: Any, content: bytes) -> tuple[Mapping[str, Any], bytes]:
        try:
            image = _decoded(Image, ImageOps, content, pixels)
        except UnreadableError as error:
            return {"error": str(error)}, b""
        return {"width": image.width, "height": image.height}, image.tobytes()

    return decode


def _decoded(library: Any, ops: Any, content: bytes, pixels: int) -> Any:
    """Return an image as a person sees it: upright, in RGB, what is transparent on white."""
    try:
        image = library.open(io.BytesIO(content), formats=FORMATS)
    except library.UnidentifiedImageError:
        raise UnreadableError(f"is of no type that is read here: {_TYPES}") from None
    except MemoryError:
        raise
    except Exception:
        raise UnreadableError("is damaged: send the whole file") from None
    if image.width * image.height > pixels:
        raise UnreadableError(
            f"has {image.width} x {image.height} pixels, more than the {pixels / 1e6:g} million "
            "that are read here: send it smaller"
        )
    try:
        # Photos of some phones are JPEG files with a second, smaller picture.
        if image.format in _ANIMATED and getattr(image, "is_animated", False):
            raise UnreadableError("is animated: send one of its pictures")
        image.load()
        image = ops.exif_transpose(image)
        return _in_rgb(library, image)
    except (MemoryError, UnreadableError):
        raise
    except Exception:
        # Pillow and its libraries raise whatever they stumble over.
        raise UnreadableError("is cut off or damaged: send the whole file") from None


def _in_rgb(library: Any, image: Any) -> Any:
    if image.mode.startswith("I"):
        # 16 bits of grey, of which Pillow would keep the lower half.
        image = image.convert("I").point(lambda value: value * (1 / 257)).convert("L")
    if image.mode in ("RGBA", "LA", "PA", "RGBa", "La") or "transparency" in image.info:
        image = image.convert("RGBA")
        white = library.new("RGB", image.size, (255, 255, 255))
        white.paste(image, mask=image)
        return white
    return image.convert("RGB")
