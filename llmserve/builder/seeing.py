"""Putting a model that reads images and text into a repository."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmserve.builder.adapters import named_adapters, place_adapters
from llmserve.builder.causal import (
    CAUSAL,
    SEEING,
    ModelKind,
    allowed,
    check_kind,
    place_model,
)
from llmserve.builder.progress import Note
from llmserve.builder.source import ModelSource
from llmserve.builder.source_files import processor_files, tokenizer_files
from llmserve.contract.images import (
    IMAGE_ADAPTER,
    IMAGE_LIMITS,
    MAX_IMAGE_MB,
    MAX_IMAGES,
    MAX_MEGAPIXELS,
)
from llmserve.contract.options import IMAGE_URL, OPTIONS
from llmserve.errors import ModelSourceError, OptionError
from llmserve.plugins.options import Option

if TYPE_CHECKING:
    from llmserve.builder.context import BuildContext

_ROW = OPTIONS[IMAGE_URL.name]
_NOT_BESIDE = ("adapters", "draft_model")

IMAGE_OPTIONS = (
    Option(
        "max_images", MAX_IMAGES,
        "Of a model that reads images: how many a request may have; 0 builds it for text alone.",
        minimum=0, maximum=_ROW.high,
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


def sees_images(source: ModelSource, *, causal: bool = False) -> bool:
    """Return whether transformers loads a model with what makes its images into numbers.

    One whose processor is not there is a model of text alone. With ``causal``, it may also be one
    that transformers has among the models of text.
    """
    if not processor_files(source):
        return False
    from transformers.models.auto import modeling_auto

    kind = source.config().get("model_type")
    return kind in getattr(modeling_auto, SEEING.mapping) or (
        causal and _model_kind(source) is CAUSAL
    )


def _model_kind(source: ModelSource) -> ModelKind:
    """Return what a model that reads images is to transformers."""
    # It imports numpy.
    from llmserve.runtime.torch.seeing_kinds import image_loader

    is_causal = image_loader(source.config().get("model_type") or "") == CAUSAL.loader
    return CAUSAL if is_causal else SEEING


def is_for_text(context: BuildContext) -> bool:
    """Return whether a build is of text alone, and of a model that transformers loads for that."""
    return not context.options["max_images"] and _reads_text_alone(context.source)


def _reads_text_alone(source: ModelSource) -> bool:
    """Return whether transformers also loads a model of this kind for text alone."""
    from transformers.models.auto import modeling_auto

    return source.config().get("model_type") in getattr(modeling_auto, CAUSAL.mapping)


def note_unread(context: BuildContext, plugin: str, *, instead: str) -> None:
    """Say that a model reads images, that a plugin serves it for its text, and which reads them."""
    kind = context.source.config()["model_type"]
    problem = f"note: {plugin} reads no images with a model of the kind {kind}"
    context.report(Note(f"{problem}: it is served for text alone; {instead} reads them"))


def lacks_adapter(context: BuildContext) -> bool:
    """Return whether the images of a model are read with an adapter that a build does not name, and
    say so: the model is then one of text alone."""
    source, adapter = context.source, _adapter(context.source)
    beside = source.path / f"{adapter}-lora"
    if not adapter or adapter in named_adapters(context.options):
        return False
    if source.repo_id is None and not beside.exists():
        # Its weights have it in them.
        problem = f"note: there is no {beside.name} beside the weights of {source.asked}"
        context.report(Note(f"{problem}: its images are read with these alone"))
        return False
    where = beside if source.repo_id is None else f"FOLDER/{adapter}-lora"
    context.report(
        Note(
            f"note: the images of {source.asked} want its adapter {adapter}: it is served for text "
            f"alone; --adapter {adapter}={where} reads them"
        )
    )
    return True


def _adapter(source: ModelSource) -> str:
    """Return the name of the adapter that a model's images are read with, if there is one."""
    from llmserve.runtime.torch.seeing_kinds import seeing_kind

    kind = seeing_kind(source.config().get("model_type") or "")
    return kind.adapter if kind else ""


def place_seeing_model(context: BuildContext, *, runtime: str = "") -> dict[str, Any]:
    """Check a model that reads images, place it with its processor, and have it take images.

    Returns the settings that ``llmserve.runtime.causal.load`` reads, and the limits of images: with
    ``max_images`` 0, it is placed for text alone. The generator must have ``PLACEMENT_OPTIONS`` and
    ``IMAGE_OPTIONS``. With ``runtime``, which is as for ``place_adapters``, it has adapters where a
    model's images are read with one.
    """
    beside = checked_processor(context)
    limits = take_images(context)
    placed = {**place_model(context, beside=beside), **limits}
    if runtime and (adapter := _adapter(context.source)):
        place_adapters(context, runtime, placed)
        if adapter in named_adapters(context.options):
            placed[IMAGE_ADAPTER] = adapter
    return placed


def checked_processor(context: BuildContext) -> tuple[Path, ...]:
    """Return the files of the tokenizer and of the processor, which loads; none with ``max_images``
    0."""
    if not context.options["max_images"]:
        return ()
    _check_processor(context)
    return seeing_files(context.source)


def seeing_files(source: ModelSource) -> tuple[Path, ...]:
    """Return the files of the tokenizer and of the processor."""
    return tuple(dict.fromkeys([*tokenizer_files(source), *processor_files(source)]))


def take_images(context: BuildContext, *, requires: Iterable[str] = ()) -> dict[str, Any]:
    """Check a model that reads images, and have it take them; return the setting of their limits.

    The generator must have ``IMAGE_OPTIONS``. ``requires`` is what it needs only for images.
    """
    source, options = context.source, context.options
    for name in _NOT_BESIDE:
        if options.get(name) and not (name == "adapters" and _adapter(source)):
            hint = f"leave out {name}"
            if _reads_text_alone(source):
                hint += ", or build it for text alone with --set max_images=0"
            raise OptionError(
                f"{source.asked} reads images, which goes with no {name} yet", hint=hint
            )
    check_kind(source, _model_kind(source), **allowed(context))
    if options["max_images"]:
        # Pillow decodes them, where the model is served.
        context.take(IMAGE_URL, requires=("pillow", *requires))
    limits: Mapping[str, Any] = {
        "images": options["max_images"],
        "megabytes": options["max_image_mb"],
        "megapixels": options["max_image_megapixels"],
    }
    return {IMAGE_LIMITS: limits}


def _check_processor(context: BuildContext) -> None:
    """Refuse a model whose processor lacks a package, which loading it would stumble over."""
    from llmserve.runtime.torch.processor import load_processor

    try:
        load_processor(
            str(context.source.path),
            local_files_only=True,
            trust_remote_code=bool(context.options["trust_remote_code"]),
        )
    except Exception as error:  # it imports what the files name
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        reason = lines[0] if lines else type(error).__name__
        raise ModelSourceError(
            f"the processor of {context.source.asked} cannot be loaded: {reason[:200]}",
            hint="install what it needs, or build it for text alone with --set max_images=0",
        ) from None
