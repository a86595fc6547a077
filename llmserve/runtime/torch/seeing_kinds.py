"""The kinds of models that read images: how theirs are parted, and what is made of the parts."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from llmserve.runtime.errors import RequestError

if TYPE_CHECKING:
    from torch import Tensor

# torch is imported when a model is loaded: a build only looks up the kinds of models.


class SeenPart(NamedTuple):
    """What a tower computes at once."""

    tensors: Mapping[str, Tensor]
    marks: int | None = None
    """How many tokens stand for it; None if as many as for each other part of the prompt."""
    positions: npt.NDArray[np.int64] | None = None
    """Those of :class:`Embedded`."""
    in_windows: bool = False
    """Whether its tokens see each other in layers with a window alone, as in :class:`Embedded`."""


def _whole_images(_: Any, images: Mapping[str, Tensor]) -> list[SeenPart]:
    """Return the parts of a processor that makes one of each image."""
    pixels = images["pixel_values"]
    return [SeenPart({"pixel_values": pixels[at : at + 1]}) for at in range(len(pixels))]


def _cut_images(_: Any, images: Mapping[str, Tensor]) -> list[SeenPart]:
    """Return the parts of a processor that cuts images, and has those of a prompt in one row."""
    names = [name for name in ("pixel_values", "pixel_attention_mask") if name in images]
    pixels = images["pixel_values"]
    parts = [{n: images[n][:, at : at + 1] for n in names} for at in range(pixels.shape[1])]
    if not all(bool(part["pixel_values"].any()) for part in parts):
        # The model takes it for what fills the row.
        raise refused("an image has a part without any content")
    return [SeenPart(part) for part in parts]


def _grids(config: Any, images: Mapping[str, Tensor]) -> list[SeenPart]:
    """Return the parts of a processor that has the patches of all images in one row, and says of
    how many each consists: some neighbours are a token, which has its place in the image."""
    import torch

    merged, grids = config.vision_config.spatial_merge_size, images["image_grid_thw"]
    patches = torch.split(images["pixel_values"], grids.prod(-1).tolist())
    parts = []
    for at, (times, height, width) in enumerate(grids.tolist()):
        sides = times, height // merged, width // merged
        positions = np.indices(sides).reshape(3, -1)
        # The grid decides where the tokens are and how the tower reads them: it is in the digest.
        tensors = {"pixel_values": patches[at], "image_grid_thw": grids[at : at + 1]}
        parts.append(SeenPart(tensors, positions.shape[1], positions))
    return parts


def _filled_up(config: Any, images: Mapping[str, Tensor]) -> list[SeenPart]:
    """Return the parts of a processor that fills the patches of each image up to one number, and
    says where each patch is: some neighbours are a token, and what fills up is nowhere."""
    pixels, places = images["pixel_values"], images["image_position_ids"]
    counts = (places != -1).all(-1).sum(-1) // config.vision_config.pooling_kernel_size**2
    # The larger ones of Gemma 4 read an image in both directions.
    in_windows = config.get_text_config().use_bidirectional_attention == "vision"
    return [
        SeenPart(
            {"pixel_values": pixels[at : at + 1], "image_position_ids": places[at : at + 1]},
            count,
            in_windows=in_windows,
        )
        for at, count in enumerate(counts.tolist())
    ]


def _crops(config: Any, images: Mapping[str, Tensor]) -> list[SeenPart]:
    """Return the parts of a processor that makes an overview and crops of each image, fills them up
    to as many as the largest of a prompt has, and says which of their patches the image covers."""
    vision, sizes = config.vision_config, images["image_sizes"]
    # Counts of patches in 16 bits would be rounded.
    covers = images["image_attention_mask"].bool()
    parts = []
    for at, (down, across) in enumerate((sizes // vision.crop_size).tolist()):
        used = slice(at, at + 1), slice(1 + down * across)
        cover = covers[used]
        # Four neighbours are a token; one more ends each row, and one the crops.
        tokens = cover[0, :, ::2, ::2]
        crops = tokens[1:].view(down, across, *tokens.shape[1:])
        height, width = (int(each.sum()) for each in (crops[:, 0, :, 0], crops[0, :, 0]))
        overview = tokens.shape[1] * (tokens.shape[2] + 1)
        tensors = {
            "image_pixel_values": images["image_pixel_values"][used],
            "image_attention_mask": cover,
            "image_sizes": sizes[at : at + 1],
        }
        parts.append(SeenPart(tensors, height * (width + 1) + 1 + overview))
    return parts


def _features(model: Any, tensors: Mapping[str, Tensor], _: int) -> list[Tensor]:
    """Return the embeddings that a model makes of a part, and after them what its layers add."""
    import torch

    found = model.get_image_features(**tensors)
    # Before transformers 5, this is what is one of its parts since.
    levels = [getattr(found, "pooler_output", found), *getattr(found, "deepstack_features", [])]
    # Older versions have the rows of all images of Gemma 4 after one another.
    return [torch.cat([*level]).view(-1, level[0].shape[-1]) for level in levels]


def _replaced(model: Any, tensors: Mapping[str, Tensor], marks: int) -> list[Tensor]:
    """Return the embeddings that a model's tower, which has no other way out, puts in the place of
    those of marks."""
    import torch

    config = model.config
    mark = config.vision_config.image_token_id
    ids = torch.full((1, marks), mark, device=model.device)
    empty = torch.zeros(1, marks, config.hidden_size, dtype=model.dtype, device=model.device)
    return [model.model.embed_tokens_extend.image_embed(ids, empty, **tensors)[0]]


@dataclass(frozen=True)
class SeeingKind:
    """How the models of a kind read images."""

    parts: Callable[[Any, Mapping[str, Tensor]], list[SeenPart]]
    """How the tensors of their processors are parted, by the model's configuration."""
    is_whole: bool = False
    """Whether the tokens of a part see each other, also those that follow."""
    is_grid: bool = False
    """Whether the tokens of a part have :attr:`Embedded.positions`."""
    is_deep: bool = False
    """Whether the tower makes more than embeddings: rows that the first layers add to theirs."""
    is_layered: bool = False
    """Whether layers may have embeddings of tokens of their own. Tokens that stand for anything but
    a text have those of the padding, in layers and at first."""
    is_causal: bool = False
    """Whether transformers has it among the models of text: its configuration is that of its text,
    and its tower is a part of what embeds that."""
    rows: Callable[[Any, Mapping[str, Tensor], int], list[Tensor]] = _features
    """What a model makes of the tensors of a part, and of how many marks."""
    adapter: str = ""
    """The name of the adapter that images are read with, where a model is released with one: it is
    in a folder beside the weights, called so with ``-lora``."""
    least_transformers: str = "5"
    """The first version of transformers that reads such images as it is done here."""


FAMILIES: Mapping[str, SeeingKind] = {
    "llava": SeeingKind(_whole_images, least_transformers="4"),
    "idefics3": SeeingKind(_cut_images, least_transformers="4"),
    "smolvlm": SeeingKind(_cut_images, least_transformers="4"),
    "gemma3": SeeingKind(_whole_images, is_whole=True),
    # Before 5.13, transformers reads images in both directions in layers without a window too.
    "gemma4": SeeingKind(_filled_up, is_layered=True, least_transformers="5.13"),
    "qwen2_vl": SeeingKind(_grids, is_grid=True),
    "qwen2_5_vl": SeeingKind(_grids, is_grid=True),
    "qwen3_vl": SeeingKind(_grids, is_grid=True, is_deep=True),
    "phi4_multimodal": SeeingKind(
        _crops, is_causal=True, rows=_replaced, adapter="vision", least_transformers="5.23"
    ),
}
"""The kinds of models whose images are read."""


def seeing_kind(model_type: str) -> SeeingKind | None:
    """Return how models of a type read images; None where that is not known."""
    return FAMILIES.get(model_type)


def deep_layers(config: Any) -> int:
    """Return how many of a model's first layers add rows of their own where an image is."""
    kind = FAMILIES.get(config.model_type)
    return len(config.vision_config.deepstack_visual_indexes) if kind and kind.is_deep else 0


def image_loader(model_type: str) -> str:
    """Return the class of transformers that loads a model of a type with what reads its images."""
    kind = FAMILIES.get(model_type)
    return "AutoModelForCausalLM" if kind and kind.is_causal else "AutoModelForImageTextToText"


def embeds_images(
    config: Mapping[str, Any],
    *,
    wholes: bool = False,
    grids: bool = False,
    layers: bool = False,
    causal: bool = False,
) -> bool:
    """Return whether a model with this configuration attends to the rows that its tower makes of
    images as to those of a text, and each part of an image can be computed alone.

    With ``wholes``, the tokens of a part may see each other; with ``grids``, they may have
    :attr:`Embedded.positions`; with ``layers``, layers may have embeddings of their own, and
    the tokens of a part may see each other in some of them; with ``causal``, transformers may have
    it among the models of text.
    """
    vision = config.get("vision_config") or {}
    family = FAMILIES.get(config.get("model_type") or "")
    # Pixtral's images have all sizes, and its tower reads them together.
    if family is None or vision.get("model_type") == "pixtral":
        return False
    return (
        (wholes or not family.is_whole)
        and (grids or not family.is_grid)
        and (layers or not family.is_layered)
        and (causal or not family.is_causal)
    )


def refused(problem: str) -> RequestError:
    return RequestError(problem, code="invalid_value", param="image_url")
