"""The images of prompts: which of their tokens stand for images, and what takes the place of these.

A model's vision tower makes a row of embeddings for each mark. What it makes depends on one part of
an image alone (LLaVA's and Qwen2-VL's images have one, those of Idefics3 are cut into several), so
each part is computed when a pass first needs it, and kept as long as there is space.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, Any

from llmserve.runtime.engine.runner import Chunk, Embedded
from llmserve.runtime.torch.seeing_kinds import FAMILIES, refused

if TYPE_CHECKING:
    from torch import Tensor

# torch is imported when a model is loaded: a build only looks up the kinds of models.

_MOST_KEPT = 64_000_000
"""The bytes of rows that are kept; what was computed last is kept whatever it takes."""


def embedded_parts(
    config: Any, ids: Sequence[int], images: Mapping[str, Tensor]
) -> tuple[Embedded, ...]:
    """Return which tokens of a prompt stand for which parts of its images."""
    family = FAMILIES[config.model_type]
    mark = (config.vision_config if family.is_causal else config).image_token_id
    places = [at for at, token in enumerate(ids) if token == mark]
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
        raise refused(f"the prompt has {len(places)} marks for {len(parts)} parts of images")
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
    def text_part(self) -> str:
        """What transformers calls the part of the model's configuration that is of its text."""
        return "" if self._kind.is_causal else "text_config"

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
            rows = torch.cat(self._kind.rows(self._model, tensors, part.count), dim=-1)
        if len(rows) != part.count:
            raise ValueError(f"the model makes {len(rows)} rows of {part.count} marks of an image")
        return rows.clone()
