"""Putting a model that reads images and text into a repository."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from llmserve.builder.causal import SEEING, allowed, check_kind, place_model
from llmserve.builder.source import ModelSource
from llmserve.builder.source_files import processor_files, tokenizer_files
from llmserve.contract.images import LIMITS, MAX_IMAGE_MB, MAX_IMAGES, MAX_MEGAPIXELS
from llmserve.contract.options import IMAGE_URL, OPTIONS
from llmserve.errors import ModelSourceError, OptionError
from llmserve.plugins.options import Option

if TYPE_CHECKING:
    from llmserve.builder.context import BuildContext

_ROW = OPTIONS[IMAGE_URL.name]
_NOT_BESIDE = ("adapters", "draft_model")

IMAGE_OPTIONS = (
    Option(
        "max_images", MAX_IMAGES, "Of a model that reads images: how many a request may have.",
        minimum=1, maximum=_ROW.high,
    ),
    Option(
        "max_image_mb", MAX_IMAGE_MB, "How large the file of an image may be, in megabytes.",
        minimum=1, maximum=_ROW.longest * 3 // 4 // 1_000_000,
    ),
    Option(
        "max_image_megapixels", MAX_MEGAPIXELS,
        "How many million pixels an image may have; decoding one takes up to 24 bytes of each.",
        minimum=1, maximum=1000,
    ),
)  # fmt: skip
"""The options of a generator that reads images; ``place_seeing_model`` reads them."""


def sees_images(source: ModelSource) -> bool:
    """Return whether transformers loads a model with what makes its images into numbers.

    One whose processor is not there is a model of text alone.
    """
    if not processor_files(source):
        return False
    from transformers.models.auto import modeling_auto

    kind = source.config().get("model_type")
    return kind in getattr(modeling_auto, SEEING.mapping)


def place_seeing_model(context: BuildContext) -> dict[str, Any]:
    """Check a model that reads images, place it with its processor, and have it take images.

    Returns the settings that ``llmserve.runtime.causal.load`` reads, and the limits of images. The
    generator must have ``PLACEMENT_OPTIONS`` and ``IMAGE_OPTIONS``.
    """
    source, options = context.source, context.options
    for name in _NOT_BESIDE:
        if options.get(name):
            raise OptionError(
                f"{source.asked} reads images, which goes with no {name} yet",
                hint=f"leave out {name}",
            )
    _check_processor(context)
    check_kind(source, SEEING, **allowed(context))
    beside = dict.fromkeys([*tokenizer_files(source), *processor_files(source)])
    # Pillow decodes them, where the model is served.
    context.take(IMAGE_URL, requires=("pillow",))
    limits: Mapping[str, Any] = {
        "images": options["max_images"],
        "megabytes": options["max_image_mb"],
        "megapixels": options["max_image_megapixels"],
    }
    return {**place_model(context, beside=tuple(beside)), LIMITS: limits}


def _check_processor(context: BuildContext) -> None:
    """Refuse a model whose processor lacks a package, which loading it would stumble over."""
    from transformers import AutoProcessor

    try:
        AutoProcessor.from_pretrained(
            str(context.source.path),
            local_files_only=True,
            trust_remote_code=bool(context.options["trust_remote_code"]),
        )
    except Exception as error:  # it imports what the files name
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        reason = lines[0] if lines else type(error).__name__
        raise ModelSourceError(
            f"the processor of {context.source.asked} cannot be loaded: {reason[:200]}",
            hint="install what it needs, or move its preprocessor_config.json and "
            "processor_config.json away: the model then reads text alone",
        ) from None
