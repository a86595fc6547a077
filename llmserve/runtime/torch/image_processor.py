"""Makes images and text into what a model reads, with the model's own processor."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from functools import cached_property
from pathlib import Path
from typing import Any

from llmserve.contract.images import IMAGE_ADAPTER, IMAGE_LIMITS, ImageLimits
from llmserve.runtime.answer.images import DecodedImage, ImageReader
from llmserve.runtime.errors import RequestError
from llmserve.runtime.location import located
from llmserve.runtime.protocols import SeenPrompt
from llmserve.runtime.torch.processor import load_processor

# What a generator makes itself, for all that it computes together.
_OF_TEXT = ("input_ids", "attention_mask")
_USUAL_SIZE = 1024, 768
_OTHER_MARKS = {"video_token": "a video", "audio_token": "a sound"}
"""The names of a processor's marks for what it is never given here, which it would look for."""
_MOST_HELD = 2_000_000_000
"""Of the bytes of what was made of images for requests that wait and run: while there are as many,
no more is made."""


class ImageProcessor:
    """The processor of a model that reads images, or of one of text alone, which refuses them.

    Images that have more tokens than the ``context_length``, None if that is not known, are refused
    before they are processed.
    """

    def __init__(
        self, settings: Mapping[str, Any], folder: Path, *, context_length: int | None
    ) -> None:
        self._context_length = context_length
        self._held: weakref.WeakSet[Any] = weakref.WeakSet()
        """The memory of what was made of images, as long as anybody has it or a part of it."""
        self._holding = threading.Lock()
        self._reader: ImageReader | None = None
        self._adapter: str = settings.get(IMAGE_ADAPTER, "")
        limits = settings.get(IMAGE_LIMITS)
        if not limits or not limits["images"]:
            return
        location, options = located(settings, folder)
        self._processor = load_processor(location, **options)
        self._limits = ImageLimits(**limits)
        self._reader = ImageReader(self._limits)
        self._mark: str = getattr(self._processor, "image_token", None) or ""

    @property
    def reads(self) -> bool:
        """Whether the model reads images at all."""
        return self._reader is not None

    def about(self) -> dict[str, int] | None:
        """Return the limits of images, and how many tokens one has; None without images."""
        if self._reader is None:
            return None
        return {**asdict(self._limits), "tokens": self._tokens_of_one}

    @cached_property
    def _tokens_of_one(self) -> int:
        """What the processor makes of an image as a screen or a phone has it, 0 if unknown."""
        image = DecodedImage(*_USUAL_SIZE, bytes(3 * _USUAL_SIZE[0] * _USUAL_SIZE[1]))
        try:
            return len(self._processed(self._mark, [_as_pillow(image)])["input_ids"][0])
        except Exception:  # a processor may want more than the mark of an image
            return 0

    def marked(self, text: str, urls: Sequence[str]) -> tuple[list[int], list[Any]]:
        """Return a conversation's ids, with a mark for each image, and the images for Pillow.

        For an engine that has the rest of the processor itself.
        """
        images = self._images(text, urls)
        return self._marks(text), images

    def counted(self, text: str, urls: Sequence[str]) -> SeenPrompt:
        """Return a conversation as the model reads it, and its ids with a mark for each image.

        For an engine in another process, which gets the images themselves as well.
        """
        return SeenPrompt(self.read(text, urls).ids, self._marks(text))

    def _marks(self, text: str) -> list[int]:
        if not self._mark:
            # One in a text of the request would be taken for that of an image.
            problem = "its processor does not say what stands for an image"
            raise RequestError(problem, code="unsupported_option", param="image_url")
        ids: list[int] = self._processor.tokenizer(text, add_special_tokens=False)["input_ids"]
        return ids

    def _images(self, text: str, urls: Sequence[str]) -> list[Any]:
        if self._reader is None:
            problem = "this model reads only text"
            raise RequestError(problem, code="unsupported_option", param="image_url")
        self._refuse_marks(text, len(urls))
        return [_as_pillow(image) for image in self._reader.read(urls)]

    def _refuse_marks(self, text: str, images: int) -> None:
        """Refuse a prompt that has what stands for an image or a part of one, or for what nobody
        sends here, in its texts."""
        problem = ""
        # Gemma 3 has another token for each part of an image than its mark.
        part = getattr(getattr(self._processor, "tokenizer", None), "image_token", None)
        if self._mark and (count := text.count(self._mark)) != images:
            problem = f"{count} times {self._mark}, which stands for an image, and {images} images"
        elif part and part != self._mark and part in text:
            problem = f"{part}, which stands for a part of an image"
        for name, what in _OTHER_MARKS.items():
            if (mark := getattr(self._processor, name, None)) and mark in text:
                problem = f"{mark}, which stands for {what}"
        if problem:
            raise RequestError(
                f"the prompt has {problem}: leave it out of the texts of messages",
                code="invalid_value",
                param="messages",
            )

    def read(self, text: str, urls: Sequence[str]) -> SeenPrompt:
        """Return a conversation and its images as the model reads them."""
        with self._holding:
            held = sum(memory.nbytes() for memory in self._held)
        if held >= _MOST_HELD:
            problem = "other requests have images that take the memory for images: send them again"
            raise RequestError(problem, code="image_not_read", param="image_url")
        images = self._images(text, urls)
        try:
            self._refuse_long(images)
            found = self._processed(text, images)
        except (ValueError, IndexError, TypeError) as error:
            # Such as an image that is too narrow for it.
            reason = next(iter(str(error).splitlines()), type(error).__name__)
            problem = f"the model's processor refuses these images: {reason[:200]}"
            raise RequestError(problem, code="invalid_value", param="image_url") from None
        ids = found["input_ids"][0].tolist()
        tensors = {name: found[name] for name in found if name not in _OF_TEXT}
        self._hold(tensors)
        return SeenPrompt(ids, tensors, self._adapter)

    def _hold(self, found: Any) -> None:
        """Note the memory of tensors, which some processors have in lists, beside other things."""
        if isinstance(found, Mapping):
            found = [*found.values()]
        if isinstance(found, list | tuple):
            for each in found:
                self._hold(each)
        elif hasattr(found, "untyped_storage"):
            with self._holding:
                # Parts are views, which share it.
                self._held.add(found.untyped_storage())

    def _refuse_long(self, images: Sequence[Any]) -> None:
        """Refuse images that alone exceed the context, if the processor makes more tokens of larger
        ones: it would first make up to a gigabyte of numbers of what is then refused."""
        maker, context = getattr(self._processor, "image_processor", None), self._context_length
        merged = getattr(maker, "merge_size", None)
        count = getattr(maker, "get_number_of_image_patches", None)
        if context is None or count is None or not isinstance(merged, int):
            return
        patches = sum(count(image.height, image.width, {}) for image in images)
        if (tokens := patches // merged**2) >= context:
            raise RequestError(
                f"the images have {tokens} tokens and the model's context {context}: send fewer or "
                "smaller images",
                code="context_length_exceeded",
                param="image_url",
                context=context,
                prompt_tokens=tokens,
            )

    def _processed(self, text: str, images: Sequence[Any]) -> Any:
        # The template has already added the special tokens.
        return self._processor(
            text=[text], images=[images], add_special_tokens=False, return_tensors="pt"
        )


def _as_pillow(image: DecodedImage) -> Any:
    from PIL import Image as pillow

    return pillow.frombytes("RGB", (image.width, image.height), image.rgb)
