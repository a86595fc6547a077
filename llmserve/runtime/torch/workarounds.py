"""What is done here because of a fault of transformers, as ``llmserve.server.workarounds``."""

from __future__ import annotations

from functools import wraps
from typing import Any

from llmserve.contract.workaround import Workaround

_PHI4 = "transformers 5.23, Phi-4 multimodal"

ONE_WAY_TOWER = Workaround(
    "The tower is marked as one that sees only backwards. With PyTorch's attention, an image that "
    "fills all crops of a prompt is read so, and otherwise than the same image beside one that "
    "does not, or with the attention of transformers.",
    _PHI4,
    ("workarounds:mend",),
    "test_an_image_is_read_as_beside_one_that_fills_less passes without it",
)
LOST_SIZES = Workaround(
    "After the first pass, generate() leaves the sizes of images out, and not their pixels: it "
    "ends with an error where an answer has the mark of an image, or where all tokens are computed "
    "anew because longrope turns them another way.",
    _PHI4,
    ("workarounds:_Sizes",),
    "test_an_answer_goes_on_beyond_the_length_of_longrope passes without it",
)
LOST_TOKENS = Workaround(
    "Where all tokens are to be computed anew, generate() computes the last one alone, as if it "
    "were the first: what it answers from there on is made up. With Phi-3 it computes all.",
    _PHI4,
    ("workarounds:_whole_again",),
    "test_an_answer_goes_on_beyond_the_length_of_longrope passes without it",
)


def mend(model: Any) -> None:
    """Make up for the faults of a model's class, if it has any."""
    vision = getattr(model.config, "vision_config", None)
    if getattr(vision, "model_type", None) != "phi4_multimodal_vision":
        return
    for module in model.modules():
        is_of_tower = isinstance(getattr(module, "config", None), type(vision))
        if is_of_tower and hasattr(module, "is_causal"):
            module.is_causal = False
    embedding = model.model.embed_tokens_extend
    embedding.register_forward_pre_hook(_Sizes().found_again, with_kwargs=True)
    model.__class__ = _whole_again(type(model))


def _whole_again(kind: Any) -> Any:
    """Return a class of models that computes all tokens where it forgets those before."""

    class WholeAgain(kind):  # type: ignore[misc]
        @wraps(kind.prepare_inputs_for_generation)
        def prepare_inputs_for_generation(
            self, input_ids: Any, past_key_values: Any = None, **kwargs: Any
        ) -> Any:
            known, border = past_key_values, self.config.original_max_position_embeddings
            if known is not None and known.get_seq_length() <= border < input_ids.shape[1]:
                kwargs["next_sequence_length"] = None
            return super().prepare_inputs_for_generation(
                input_ids, past_key_values=past_key_values, **kwargs
            )

    # transformers looks at names of classes.
    WholeAgain.__name__ = kind.__name__
    return WholeAgain


class _Sizes:
    """The sizes of the images that a model has read last, for its later passes over them."""

    def __init__(self) -> None:
        self._last: Any = None

    def found_again(
        self, _: Any, args: tuple[Any, ...], options: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        if options.get("image_pixel_values") is None:
            return None
        if options.get("image_sizes") is not None:
            self._last = options["image_sizes"]
            return None
        # A token of an answer stands for no image.
        is_new = args[0].shape[1] == 1
        found = {"image_pixel_values": None} if is_new else {"image_sizes": self._last}
        return args, {**options, **found}
