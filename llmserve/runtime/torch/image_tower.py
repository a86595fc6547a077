"""The images of prompts: which models they are read with, and what takes the place of their marks.

A model's vision tower makes a row of embeddings for each mark. What it makes depends on one part of
an image alone (LLaVA's and Qwen2-VL's images have one, those of Idefics3 are cut into several), so
each part is computed when a pass first needs it, and kept as long as there is space.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from llmserve.runtime.engine.runner import Chunk, Embedded
from llmserve.runtime.errors import RequestError

if TYPE_CHECKING:
    from torch import Tensor

# torch is imported when a model is loaded: a build only looks up the kinds of models.

_MOST_KEPT = 64_000_000
"""The bytes of rows that are kept; what was computed last is kept whatever it takes."""


class _Part(NamedTuple):
    """What a tower computes at once."""

    tensors: Mapping[str, Tensor]
    marks: int | None = None
    """How many tokens stand for it; None if as many as for each other part of the prompt."""
    positions: npt.NDArray[np.int64] | None = None
    """Those of :class:`Embedded`."""
    in_windows: bool = False
    """Whether its tokens see each other in layers with a window alone, as in :class:`Embedded`."""


def _whole_images(_: Any, images: Mapping[str, Tensor]) -> list[_Part]:
    """Return the parts of a processor that makes one of each image."""
    pixels = images["pixel_values"]
    return [_Part({"pixel_values": pixels[at : at + 1]}) for at in range(len(pixels))]


def _cut_images(_: Any, images: Mapping[str, Tensor]) -> list[_Part]:
    """Return the parts of a processor that cuts images, and has those of a prompt in one row."""
    names = [name for name in ("pixel_values", "pixel_attention_mask") if name in images]
    pixels = images["pixel_values"]
    parts = [{n: images[n][:, at : at + 1] for n in names} for at in range(pixels.shape[1])]
    if not all(bool(part["pixel_values"].any()) for part in parts):
        # The model takes it for what fills the row.
        raise _refused("an image has a part without any content")
    return [_Part(part) for part in parts]


def _grids(config: Any, images: Mapping[str, Tensor]) -> list[_Part]:
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
        parts.append(_Part(tensors, positions.shape[1], positions))
    return parts


def _filled_up(config: Any, images: Mapping[str, Tensor]) -> list[_Part]:
    """Return the parts of a processor that fills the patches of each image up to one number, and
    says where each patch is: some neighbours are a token, and what fills up is nowhere."""
    pixels, places = images["pixel_values"], images["image_position_ids"]
    counts = (places != -1).all(-1).sum(-1) // config.vision_config.pooling_kernel_size**2
    # The larger ones of Gemma 4 read an image in both directions.
    in_windows = config.get_text_config().use_bidirectional_attention == "vision"
    return [
        _Part(
            {"pixel_values": pixels[at : at + 1], "image_position_ids": places[at : at + 1]},
            count,
            in_windows=in_windows,
        )
        for at, count in enumerate(counts.tolist())
    ]


@dataclass(frozen=True)
class SeeingKind:
    """How the models of a kind read images."""

    parts: Callable[[Any, Mapping[str, Tensor]], list[_Part]]
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
}
"""The kinds of models whose images are read."""


def seeing_kind(model_type: str) -> SeeingKind | None:
    """Return how models of a type read images; None where that is not known."""
    return FAMILIES.get(model_type)


def deep_layers(config: Any) -> int:
    """Return how many of a model's first layers add rows of their own where an image is."""
    kind = FAMILIES.get(config.model_type)
    return len(config.vision_config.deepstack_visual_indexes) if kind and kind.is_deep else 0


def embeds_images(
    config: Mapping[str, Any], *, wholes: bool = False, grids: bool = False, layers: bool = False
) -> bool:
    """Return whether a model with this configuration attends to the rows that its tower makes of
    images as to those of a text, and each part of an image can be computed alone.

    With ``wholes``, the tokens of a part may see each other; with ``grids``, they may have
    :attr:`Embedded.positions`; with ``layers``, layers may have embeddings of their own, and
    the tokens of a part may see each other in some of them.
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
    )


def embedded_parts(
    config: Any, ids: Sequence[int], images: Mapping[str, Tensor]
) -> tuple[Embedded, ...]:
    """Return which tokens of a prompt stand for which parts of its images."""
    places = [at for at, token in enumerate(ids) if token == config.image_token_id]
    family = FAMILIES[config.model_type]
    parts = family.parts(config, images)
    counts = [part.marks or len(places) // len(parts) for part in parts]
    *firsts, total = 0, *accumulate(counts)
    if (
        not all(counts)
        or total != len(places)
        or any(
            places[first + count - 1] - places[first] >= count
            for first, count in zip(firsts, counts, strict=True)
        )
    ):
        raise _refused(f"the prompt has {len(places)} marks for {len(parts)} parts of images")
    return tuple(
        Embedded(
            places[first],
            count,
            _digest(part.tensors),
            part.tensors,
            family.is_whole or part.in_windows,
            part.positions,
            part.in_windows,
        )
        for first, count, part in zip(firsts, counts, parts, strict=True)
    )


def _digest(part: Mapping[str, Tensor]) -> bytes:
    found = hashlib.blake2b(digest_size=32)
    for name, tensor in sorted(part.items()):
        found.update(f"{name} {tensor.dtype} {[*tensor.shape]} ".encode())
        found.update(tensor.contiguous().numpy().tobytes())
    return found.digest()


def _refused(problem: str) -> RequestError:
    return RequestError(problem, code="invalid_value", param="image_url")


def _for_layers(
    ids: Tensor, places: Sequence[int], rows: Sequence[Tensor], width: int
) -> dict[str, Any]:
    """Return what Qwen's text models take: at which tokens of a pass their first layers add rows,
    and those of each layer, which are beside one another here."""
    import torch

    is_seen = torch.zeros(ids.numel(), dtype=torch.bool, device=ids.device)
    is_seen[list(places)] = True
    layers = torch.split(torch.cat([*rows]), width, dim=-1)
    return {"visual_pos_masks": is_seen.view(ids.shape), "deepstack_visual_embeds": [*layers]}


def _without_marks(config: Any, ids: Tensor) -> Tensor:
    """Return the ids of a pass as the whole model embeds them: with padding in place of all that
    stands for an image, a video or a sound, also where none is and in answers."""
    import torch

    marks = (config.image_token_id, config.video_token_id, config.audio_token_id)
    known = torch.tensor([mark for mark in marks if mark is not None], device=ids.device)
    return torch.where(torch.isin(ids, known), config.get_text_config().pad_token_id, ids)


class ImageTower:
    """Computes what a model makes of images, and keeps the newest up to a limit of bytes."""

    def __init__(self, model: Any, most_bytes: int = _MOST_KEPT) -> None:
        self._model, self._most_bytes = model, most_bytes
        self._kept: OrderedDict[bytes, Tensor] = OrderedDict()
        """The rows of parts by their digests; the least recently used first."""
        self.computed = 0
        """How many parts were computed."""
        self._deep: dict[str, Any] = {}
        """What the layers of the next pass add, as its text model takes it."""
        self._kind = FAMILIES[model.config.model_type]
        if self._kind.is_deep:
            # The whole model passes only what it has made of pixels itself.
            model.model.language_model.register_forward_pre_hook(self._add_deep, with_kwargs=True)

    @property
    def least_transformers(self) -> str:
        """The first version of transformers that reads such images as it is done here."""
        return self._kind.least_transformers

    @property
    def form(self) -> str:
        """All that decides what is computed of an image and is not of the model's files."""
        import torch
        import transformers

        versions = f"torch {torch.__version__} transformers {transformers.__version__}"
        return f"{versions} {self._model.dtype}"

    @property
    def bytes(self) -> int:
        return sum(rows.nbytes for rows in self._kept.values())

    def inputs(self, chunks: Sequence[Chunk], ids: Tensor) -> dict[str, Tensor]:
        """Return what a pass reads: the ids of all chunks in their order, in a tensor of any shape,
        or embeddings if some of them stand for images. The pass comes next."""
        self._deep = {}
        if not any(chunk.embedded for chunk in chunks):
            return {"input_ids": ids}
        of_layers: dict[str, Tensor] = {}
        if self._kind.is_layered:
            ids = _without_marks(self._model.config, ids)
            # The whole model would look for the ids of embeddings, which an image has not.
            if self._model.config.get_text_config().hidden_size_per_layer_input:
                text_model = self._model.model.language_model
                of_layers["per_layer_inputs"] = text_model.get_per_layer_inputs(ids, None)
        embeddings = self._model.get_input_embeddings()(ids)
        rows, first = embeddings.flatten(0, -2), 0
        width = rows.shape[-1]
        places: list[int] = []
        deeper: list[Tensor] = []
        for chunk in chunks:
            for part, of_part, of_chunk in chunk.replaced():
                at, stop = first + of_chunk.start, first + of_chunk.stop
                found = self.rows(part)[of_part]
                rows[at:stop] = found[:, :width]
                places += range(at, stop)
                deeper.append(found[:, width:])
            first += len(chunk.ids)
        if deeper[0].shape[-1]:
            self._deep = _for_layers(ids, places, deeper, width)
        return {"inputs_embeds": embeddings, **of_layers}

    def _add_deep(
        self, _: Any, args: tuple[Any, ...], options: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        # A later pass that this was not asked for has none.
        deep, self._deep = self._deep, {}
        return args, {**options, **deep}

    def rows(self, part: Embedded) -> Tensor:
        """Return a row for each token that stands for a part of an image: its embedding, and after
        it what each of the first layers adds, if they add anything."""
        if (rows := self._kept.get(part.digest)) is None:
            rows = self._kept[part.digest] = self._compute(part)
            self.computed += 1
        self._kept.move_to_end(part.digest)
        while self.bytes > self._most_bytes and len(self._kept) > 1:
            self._kept.popitem(last=False)
        return rows

    def keep(self, part: Embedded, rows: Tensor) -> None:
        """Have rows of a part that were made elsewhere."""
        self._kept[part.digest] = rows

    def _compute(self, part: Embedded) -> Tensor:
        import torch

        device, dtype = self._model.device, self._model.dtype
        tensors = {
            name: tensor.to(device, dtype) if tensor.is_floating_point() else tensor.to(device)
            for name, tensor in part.source.items()
        }
        with torch.inference_mode():
            found = self._model.get_image_features(**tensors)
            # Before transformers 5, this is what is one of its parts since.
            levels = [getattr(found, "pooler_output", found)]
            levels += getattr(found, "deepstack_features", [])
            # Older versions have the rows of all images of Gemma 4 after one another.
            rows = torch.cat(
                [torch.cat([*level]).view(-1, level[0].shape[-1]) for level in levels], dim=-1
            )
        if len(rows) != part.count:
            raise ValueError(f"the model makes {len(rows)} rows of {part.count} marks of an image")
        return rows.clone()
