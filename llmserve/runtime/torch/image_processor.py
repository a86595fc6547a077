"""Makes images and text into what a model reads, with the model's own processor."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from llmserve.contract.images import LIMITS, ImageLimits
from llmserve.runtime.answer.images import DecodedImage, ImageReader
from llmserve.runtime.errors import RequestError
from llmserve.runtime.location import located
from llmserve.runtime.protocols import SeenPrompt

# What a generator makes itself, for all that it computes together.
_OF_TEXT = ("input_ids", "attention_mask")


class ImageProcessor:
    """The processor of a model that reads images, or of one of text alone, which refuses them."""

    def __init__(self, settings: Mapping[str, Any], folder: Path) -> None:
        self._reader: ImageReader | None = None
        if LIMITS not in settings:
            return
        from transformers import AutoProcessor

        location, options = located(settings, folder)
        self._processor = AutoProcessor.from_pretrained(location, **options)
        self._reader = ImageReader(ImageLimits(**settings[LIMITS]))
        self._mark: str = getattr(self._processor, "image_token", None) or ""

    def read(self, text: str, urls: Sequence[str]) -> SeenPrompt:
        """Return a conversation and its images as the model reads them."""
        if self._reader is None:
            problem = "this model reads only text"
            raise RequestError(problem, code="unsupported_option", param="image_url")
        if self._mark and text.count(self._mark) != len(urls):
            raise RequestError(
                f"the prompt has {text.count(self._mark)} times {self._mark}, which stands for an "
                f"image, and {len(urls)} images: leave it out of the texts of messages",
                code="invalid_value",
                param="messages",
            )
        images = [_as_pillow(image) for image in self._reader.read(urls)]
        try:
            # The template has already added the special tokens.
            found = self._processor(
                text=[text], images=[images], add_special_tokens=False, return_tensors="pt"
            )
        except (ValueError, IndexError, TypeError) as error:
            # Such as an image that is too narrow for it.
            reason = next(iter(str(error).splitlines()), type(error).__name__)
            problem = f"the model's processor refuses these images: {reason[:200]}"
            raise RequestError(problem, code="invalid_value", param="image_url") from None
        ids = found["input_ids"][0].tolist()
        tensors = {name: found[name] for name in found if name not in _OF_TEXT}
        return SeenPrompt(ids, tensors)


def _as_pillow(image: DecodedImage) -> Any:
    from PIL import Image as pillow

    return pillow.frombytes("RGB", (image.width, image.height), image.rgb)
