"""Reads the images of requests, within limits that hold whatever is in them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from llmserve.contract.images import (
    MAX_MEGAPIXELS,
    ImageLimits,
    ImageRefusedError,
    image_contents,
)
from llmserve.runtime.answer.limited_process import (
    LimitedProcess,
    Limits,
    TooLargeError,
    TooSlowError,
)
from llmserve.runtime.errors import RequestError

_DECODER = Path(__file__).with_name("image_decoder.py")
CPU_SECONDS = 4.0
"""The processor time that decoding an image may take, or more where one may have more pixels than
usual, which take a fifth of it. Other requests of the model wait meanwhile."""
_WALL_SECONDS = 30.0
# Pillow's copies of a pixel at one time, with four bytes each, and ours with three.
_BYTES_OF_PIXEL = 24
_MEMORY, _STACK = 96 << 20, 8 << 20


@dataclass(frozen=True)
class DecodedImage:
    """A decoded image: upright, without transparency."""

    width: int
    height: int
    rgb: bytes
    """Three bytes for each pixel, row by row."""


class ImageReader:
    """Decodes the images of requests in a process of its own, which is started on first use."""

    def __init__(self, limits: ImageLimits | None = None) -> None:
        import PIL

        self._library = Path(PIL.__file__).parent.parent
        self._limits = limits or ImageLimits()
        self._process: LimitedProcess | None = None

    def read(self, urls: Sequence[str]) -> list[DecodedImage]:
        """Return the images of data URLs; raise :class:`RequestError` if one cannot be read."""
        try:
            contents = image_contents(urls, self._limits)
        except ImageRefusedError as error:
            raise _refused(str(error)) from None
        return [self._decoded(content, number) for number, content in enumerate(contents, 1)]

    def close(self) -> None:
        if self._process is not None:
            self._process.close()
            self._process = None

    def _decoded(self, content: bytes, number: int) -> DecodedImage:
        # The machine may have had no memory left for it: another one is started.
        for _ in range(2):
            try:
                if self._process is None:
                    self._process = self._started()
                answer, rgb = self._process.ask(None, content)
            except TooSlowError:
                raise _refused(
                    f"image {number} takes too long to decode: send it smaller"
                ) from None
            except TooLargeError:
                raise _refused(f"image {number} takes too much memory: send it smaller") from None
            except OSError:
                self.close()
                continue
            if "error" in answer:
                raise _refused(f"image {number} {answer['error']}")
            return DecodedImage(int(answer["width"]), int(answer["height"]), rgb)
        problem = f"image {number} could not be decoded: send it again"
        raise RequestError(problem, code="image_not_read", param="image_url")

    def _started(self) -> LimitedProcess:
        pixels = self._limits.megapixels * 1_000_000
        memory = _MEMORY + _BYTES_OF_PIXEL * pixels + self._limits.megabytes * 1_000_000
        seconds = CPU_SECONDS * max(1.0, self._limits.megapixels / MAX_MEGAPIXELS)
        limits = Limits(seconds, _WALL_SECONDS, memory, _STACK)
        return LimitedProcess(str(_DECODER), self._library, limits, {"pixels": pixels})


def _refused(problem: str) -> RequestError:
    return RequestError(problem, code="invalid_value", param="image_url")
