"""Loads the processor of a model, as builds and served models do."""

from __future__ import annotations

from typing import Any


def load_processor(location: str, **options: Any) -> Any:
    """Return what makes images and text into what a model reads.

    One that reads videos as well wants torchvision for these alone: without it, the same one is
    loaded for images and text.
    """
    from transformers import AutoProcessor

    try:
        return AutoProcessor.from_pretrained(location, **options)
    except (ImportError, ValueError) as error:
        if "torchvision" not in str(error).lower() or _has_torchvision():
            raise
        if (found := _video_processor(location, options)) is None:
            raise
    return _without_videos(found).from_pretrained(location, **options)


def _has_torchvision() -> bool:
    from transformers.utils import is_torchvision_available

    return bool(is_torchvision_available())


def _video_processor(location: str, options: dict[str, Any]) -> Any:
    """Return the class of a processor that reads videos too, if the model's files name the one that
    transformers has for its kind; otherwise None."""
    from transformers import AutoConfig, ImageProcessingMixin, ProcessorMixin
    from transformers.models.auto.processing_auto import PROCESSOR_MAPPING

    kind = type(AutoConfig.from_pretrained(location, **options))
    found = PROCESSOR_MAPPING.get(kind, None)
    # Before transformers 5, a class has a list instead.
    attributes: list[str] = getattr(found, "get_attributes", list)()
    if attributes[-1:] != ["video_processor"] or "image_processor" not in attributes:
        return None
    files = (
        ProcessorMixin.get_processor_dict(location, **options)[0],
        ImageProcessingMixin.get_image_processor_dict(location, **options)[0],
    )
    named = {file["processor_class"] for file in files if file.get("processor_class")}
    return found if named <= {found.__name__} else None


def _without_videos(processor: Any) -> Any:
    """Return a class of processors that has all that another one has but videos, its last part."""

    class WithoutVideos(processor):  # type: ignore[misc]
        is_loaded = False

        @classmethod
        def get_attributes(cls) -> list[str]:
            # Gemma 4's names it as it is made, and its file has one.
            attributes: list[str] = super().get_attributes()
            return [name for name in attributes if cls.is_loaded or name != "video_processor"]

        @classmethod
        def from_args_and_dict(cls, args: list[Any], *others: Any, **options: Any) -> Any:
            cls.is_loaded = True
            return super().from_args_and_dict([*args, None], *others, **options)

        def check_argument_for_proper_class(self, name: str, argument: Any) -> Any:
            if name == "video_processor":
                return None
            return super().check_argument_for_proper_class(name, argument)

    # transformers looks at names of classes.
    WithoutVideos.__name__ = processor.__name__
    return WithoutVideos
