"""Makes images into an overview and crops, as the processor of Phi-4 multimodal does.

transformers has that one for torchvision alone. This one makes the same numbers without it, and
with crops of other sizes too: that one counts the tokens of the overview of its own.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

_WHITE = 255
_BICUBIC = 3
"""Pillow's number for it."""
_NARROWEST = 10
"""The pixels that an image has at least in each direction, once it is scaled."""
_FIXED = {"do_rescale": True, "do_normalize": True, "resample": _BICUBIC}
"""What is not done in any other way."""


class _Plan(NamedTuple):
    """How an image is cut."""

    down: int
    across: int
    """Of how many crops is its height, and its width."""
    scaled: tuple[int, int]
    """The width and the height that the image is given."""
    missing: tuple[int, int]
    """How much of the crops it leaves to be filled, in its width and its height."""
    covers: Tensor
    """Which of the crops' patches the image covers, 1 or 0."""


class _Cut(NamedTuple):
    """An image as the model reads it."""

    crops: Tensor
    """The pixels of the overview and of each crop, row by row."""
    covers: Tensor
    """Which of their patches the image covers, 1 or 0."""
    size: tuple[int, int]
    """The height and the width of all crops together."""
    tokens: int


@dataclass(frozen=True)
class ImageCrops:
    """What ``processor.image_processor`` is to the processor of Phi-4 multimodal."""

    side: int
    patch: int
    most: int
    mean: tuple[float, ...]
    std: tuple[float, ...]
    factor: float

    def fetch_images(self, images: Any) -> Any:
        """Return images, none of which is an address."""
        return images

    def __call__(self, images: Sequence[Any], **_: Any) -> dict[str, Any]:
        """Return the numbers of images of Pillow, in a list or in one for each prompt."""
        rows = [each if isinstance(each, list | tuple) else [each] for each in images]
        cut = [self._cut(image) for row in rows for image in row]
        most = max(len(each.crops) for each in cut)
        return {
            "image_pixel_values": torch.stack([_filled(each.crops, most, 0) for each in cut]),
            "image_attention_mask": torch.stack([_filled(each.covers, most, 1) for each in cut]),
            "image_sizes": torch.tensor([each.size for each in cut]),
            "num_img_tokens": [each.tokens for each in cut],
        }

    # As that of Qwen2-VL has them, of whose patches some are merged to a token.
    merge_size = 1

    def get_number_of_image_patches(self, height: int, width: int, _: Any = None) -> int:
        """Return how many tokens an image of a size has."""
        return self._tokens(self._plan(width, height))

    def _cut(self, image: Any) -> _Cut:
        plan = self._plan(image.width, image.height)
        pixels = torch.from_numpy(np.array(image.convert("RGB"))).permute(2, 0, 1)
        pixels = functional.interpolate(
            pixels[None].contiguous(), plan.scaled[::-1], mode="bilinear", antialias=True
        )
        pixels = functional.pad(pixels, (0, plan.missing[0], 0, plan.missing[1]), value=_WHITE)
        mean, std = (torch.tensor(each) * (1 / self.factor) for each in (self.mean, self.std))
        numbers = pixels.float().sub_(mean.view(-1, 1, 1)).div_(std.view(-1, 1, 1))
        overview = functional.interpolate(numbers, (self.side, self.side), mode="bicubic")
        covers = _parted(plan.covers, plan.down, plan.across)[:, 0]
        return _Cut(
            torch.cat([overview, _parted(numbers, plan.down, plan.across)]),
            torch.cat([torch.ones(1, *covers.shape[1:]), covers]),
            (plan.down * self.side, plan.across * self.side),
            self._tokens(plan),
        )

    def _plan(self, width: int, height: int) -> _Plan:
        across, down = self._grid(width, height)
        whole = across * self.side, down * self.side
        wider, higher = whole[0] / width, whole[1] / height
        if wider < higher:
            scaled = whole[0], int(height * wider)
        else:
            scaled = int(width * higher), whole[1]
        if min(scaled) < _NARROWEST:
            raise ValueError(f"an image of {width} x {height} pixels is too narrow")
        missing = whole[0] - scaled[0], whole[1] - scaled[1]
        patches = self.side // self.patch
        covers = torch.ones(1, 1, down * patches, across * patches)
        covers[..., covers.shape[-1] - missing[0] // self.patch :] = 0
        covers[..., covers.shape[-2] - missing[1] // self.patch :, :] = 0
        return _Plan(down, across, scaled, missing, covers)

    def _tokens(self, plan: _Plan) -> int:
        """Return how many tokens an image has: four patches are one, each row of them ends with one
        more, and so do the crops."""
        patches = self.side // self.patch
        half = -(-patches // 2)
        # Counted within each crop, which may have an odd number of patches.
        covers = plan.covers.view(plan.down, patches, plan.across, patches)[:, ::2, :, ::2]
        covered = int(covers.sum()) + int(covers[:, :, 0, 0].sum())
        return half * (half + 1) + 1 + covered

    def _grid(self, width: int, height: int) -> tuple[int, int]:
        """Return of how many crops an image has its width and its height."""
        across, down = math.ceil(width / self.side), math.ceil(height / self.side)
        if across * down <= self.most:
            return across, down
        sides = range(1, self.most + 1)
        grids = sorted(
            ((x, y) for x in sides for y in sides if x * y <= self.most),
            key=lambda grid: grid[0] * grid[1],
        )
        best, least = (1, 1), math.inf
        for grid in grids:
            off = abs(width / height - grid[0] / grid[1])
            # Of those with the same shape, a larger one that is not mostly made up.
            is_filled = 2 * width * height > self.side**2 * grid[0] * grid[1]
            if off < least or (off == least and is_filled):
                best, least = grid, off
        return best


def load_crops(location: str, **options: Any) -> ImageCrops:
    """Return what makes images into numbers, as a model's files say."""
    from transformers import ImageProcessingMixin

    found, _ = ImageProcessingMixin.get_image_processor_dict(location, **options)
    for name, value in _FIXED.items():
        if found.get(name, value) not in (value, None):
            raise ValueError(f"images with {name} {found[name]} are not read")
    size = found.get("size") or {"height": 448, "width": 448}
    if size.get("height") != size.get("width"):
        raise ValueError(f"images in crops of {size} are not read: they are not square")
    half = (0.5, 0.5, 0.5)
    return ImageCrops(
        size["height"],
        found.get("patch_size") or 14,
        found.get("dynamic_hd") or 36,
        tuple(found.get("image_mean") or half),
        tuple(found.get("image_std") or half),
        found.get("rescale_factor") or 1 / 255,
    )


def _parted(pixels: Tensor, down: int, across: int) -> Tensor:
    """Return the crops of an image, row by row."""
    channels, height, width = pixels.shape[1:]
    parts = pixels.view(channels, down, height // down, across, width // across)
    return parts.permute(1, 3, 0, 2, 4).flatten(0, 1)


def _filled(parts: Tensor, most: int, value: int) -> Tensor:
    """Return parts of an image, filled up to as many as the largest one has."""
    missing = (0, 0) * (parts.ndim - 1) + (0, most - len(parts))
    return functional.pad(parts, missing, value=value)
