"""Loads the processor of a model, as builds and served models do."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

_OF_CROPS = "Phi4MultimodalProcessor"
"""The processor whose images transformers makes into numbers with torchvision alone."""


def load_processor(location: str, **options: Any) -> Any:
    """Return what makes images and text into what a model reads.

    One that reads videos as well wants torchvision for these alone: without it, the same one is
    loaded for images and text. That of Phi-4 multimodal gets what is here in its place.
    """
    import transformers
    from transformers import AutoProcessor

    if _named(location, options) == {_OF_CROPS}:
        from llmserve.runtime.torch.image_crops import load_crops

        crops = load_crops(location, **options)
        kind = _without(getattr(transformers, _OF_CROPS), "image_processor", "audio_processor")
        processor = kind.from_pretrained(location, **options)
        processor.image_processor = crops
        return processor
    try:
        return AutoProcessor.from_pretrained(location, **options)
    except (ImportError, ValueError) as error:
        if "torchvision" not in str(error).lower() or _has_torchvision():
            raise
        if (found := _video_processor(location, options)) is None:
            raise
    return _without(found, "video_processor").from_pretrained(location, **options)


def _has_torchvision() -> bool:
    from transformers.utils import is_torchvision_available

    return bool(is_torchvision_available())


def _video_processor(location: str, options: dict[str, Any]) -> Any:
    """Return the class of a processor that reads videos too, if the model's files name the one that
    transformers has for its kind; otherwise None."""
    from transformers import AutoConfig
    from transformers.models.auto.processing_auto import PROCESSOR_MAPPING

    kind = type(AutoConfig.from_pretrained(location, **options))
    found = PROCESSOR_MAPPING.get(kind, None)
    # Before transformers 5, a class has a list instead.
    attributes: list[str] = getattr(found, "get_attributes", list)()
    if attributes[-1:] != ["video_processor"] or "image_processor" not in attributes:
        return None
    return found if _named(location, options) <= {found.__name__} else None


def _named(location: str, options: dict[str, Any]) -> set[str]:
    """Return the classes of processors that a model's files name."""
    from transformers import ImageProcessingMixin, ProcessorMixin

    found = set()
    for read in (ProcessorMixin.get_processor_dict, ImageProcessingMixin.get_image_processor_dict):
        # Whoever has none of these files is told by who loads them.
        with suppress(OSError, ValueError):
            found.add(read(location, **options)[0].get("processor_class"))
    return found - {None}


def _without(processor: Any, *left_out: str) -> Any:
    """Return a class of processors that loads all parts of another one but some, which are None."""

    class Without(processor):  # type: ignore[misc]
        is_loaded = False

        @classmethod
        def get_attributes(cls) -> list[str]:
            # Gemma 4's names it as it is made, and its file has one.
            attributes: list[str] = super().get_attributes()
            return [name for name in attributes if cls.is_loaded or name not in left_out]

        @classmethod
        def from_args_and_dict(cls, args: list[Any], *others: Any, **options: Any) -> Any:
            loaded, cls.is_loaded = iter(args), True
            parts = [None if name in left_out else next(loaded) for name in cls.get_attributes()]
            return super().from_args_and_dict(parts, *others, **options)

        def check_argument_for_proper_class(self, name: str, argument: Any) -> Any:
            if name in left_out:
                return None
            return super().check_argument_for_proper_class(name, argument)

    # transformers looks at names of classes.
    Without.__name__ = processor.__name__
    return Without
