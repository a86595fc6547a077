"""Crops of images are those of transformers' own processor for Phi-4 multimodal."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import pytest
import torch

from llmserve.runtime.torch.image_crops import ImageCrops
from llmserve.testing.tiny_seeing import picture

RELEASED = ImageCrops(448, 14, 36, (0.5,) * 3, (0.5,) * 3, 1 / 255)
SIZES = [(1024, 768), (448, 448), (300, 200), (2000, 700), (97, 1500)]


@pytest.mark.parametrize(
    ("size", "tokens", "crops", "covered", "total"),
    [
        (SIZES[0], 1681, 6, 6528, 472248.7),
        (SIZES[1], 545, 1, 2048, 125.9),
        (SIZES[2], 460, 1, 1728, 401132.9),
        (SIZES[3], 2541, 10, 9984, 829056.7),
        (SIZES[4], 657, 4, 2176, 2237387.7),
    ],
)
def test_an_image_is_cut_and_counted_as_by_the_own_processor(
    size: tuple[int, int], tokens: int, crops: int, covered: int, total: float
) -> None:
    """As it did with transformers 5.23 and torchvision 0.28, of which the numbers are."""
    found = RELEASED([[picture(7, *size)]])
    pixels, covers = found["image_pixel_values"], found["image_attention_mask"]
    assert found["num_img_tokens"] == [tokens]
    # Before anything is made of it.
    assert RELEASED.get_number_of_image_patches(size[1], size[0]) == tokens
    assert pixels.shape == (1, 1 + crops, 3, 448, 448)
    assert covers.shape == (1, 1 + crops, 32, 32)
    assert int(covers.sum()) == covered
    # A processor may round a colour otherwise.
    assert float(pixels.double().sum()) == pytest.approx(total, abs=pixels.numel() / 10_000)


@pytest.mark.skipif(find_spec("torchvision") is None, reason="the own processor wants torchvision")
@pytest.mark.parametrize("most", [36, 6])
def test_images_are_the_numbers_of_the_own_processor(most: int) -> None:
    import transformers

    small: Any = transformers.Phi4MultimodalImageProcessor(
        size={"height": 32, "width": 32}, patch_size=1, dynamic_hd=most
    )
    images = [picture(at, *size) for at, size in enumerate([*SIZES, (24, 16), (33, 33)])]
    own = small(images, return_tensors="pt")
    found = ImageCrops(32, 1, most, (0.5,) * 3, (0.5,) * 3, 1 / 255)([images])
    assert [*own["num_img_tokens"]] == found["num_img_tokens"]
    for name in ("image_pixel_values", "image_attention_mask", "image_sizes"):
        assert torch.equal(own[name], found[name])


def test_an_image_that_is_too_narrow_is_refused() -> None:
    with pytest.raises(ValueError, match="an image of 4000 x 8 pixels is too narrow"):
        RELEASED([[picture(1, 4000, 8)]])
