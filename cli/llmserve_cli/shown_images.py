"""Images of files, as messages show them."""

from __future__ import annotations

from pathlib import Path

from llmserve.errors import UsageError
from llmserve.runtime.contract import IMAGE_URL, OPTIONS, image_url

_MOST_BYTES = OPTIONS[IMAGE_URL.name].longest * 3 // 4


def url_of_file(path: Path) -> str:
    """Return an image as requests have it; what it is, its model finds out."""
    try:
        if not path.is_file():
            raise UsageError(f"{path} is no file")
        if path.stat().st_size > _MOST_BYTES:
            raise UsageError(f"{path} is over {_MOST_BYTES >> 20} MB", hint="make it smaller")
        return image_url(path)
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}") from None
