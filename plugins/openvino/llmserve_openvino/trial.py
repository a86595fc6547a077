"""Tries a small random model of a kind before a large one of it is read.

OpenVINO silently leaves out what it does not understand, such as a mask that is not causal. In a
small model this shows at once, also where a large one would need thousands of tokens for it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from llmserve.graphs import StoredWeights
from llmserve.plugin import IncompatibleError, UnservedError
from llmserve.runtime.causal import NEAR, original_length, small_model
from llmserve_openvino.compare import LENGTHS, difference, seen_difference, window
from llmserve_openvino.recurrent_layers import RECURRENT, STATE, keeps_states
from llmserve_openvino.seen_inputs import sees_ahead
from llmserve_openvino.tower import LOADER
from llmserve_openvino.trace import convert

TOLERANCE = 0.02
DIFFERS = "is computed differently by OpenVINO: log-probabilities are off by {:.2g}"
_FAR = (2 * NEAR + 54, NEAR + 20, 13)
"""Lengths of texts beyond everything that begins at ``NEAR``."""


class Trial(NamedTuple):
    """What has been found."""

    served: int | None
    """Up to which length a model is computed as by itself, None if it always is."""
    is_done: bool
    """Whether there was a small model. Otherwise the length is that of what may be left out."""


@contextmanager
def refusals(text_config: Any) -> Iterator[None]:
    """Say of a model that fails while it is computed which part of it cannot be."""
    try:
        yield
    except IncompatibleError:
        raise UnservedError("has attention of a kind that OpenVINO cannot read in pages") from None
    except RuntimeError as error:
        if keeps_states(text_config):
            raise UnservedError(STATE) from None
        line = str(error).strip().splitlines()[-1]
        raise UnservedError(
            f"has a part that OpenVINO reads, but cannot compute ({line})"
        ) from None


def try_small(config: Any, *, sees: bool = False) -> Trial:
    """Try a small model; a part that cannot be computed raises an :class:`UnservedError`.

    Of one that ``sees``, the part for texts is tried, also where some tokens stand for an image.
    What it is given there is random: the tower itself is not computed.
    """
    text_config = config.get_text_config()
    limits = [window(text_config), original_length(text_config.to_dict())]
    limit = min((each for each in limits if each), default=None)
    if text_config.model_type in RECURRENT:
        raise UnservedError(STATE)
    if sees:
        _check_windows(config)
    model = small_model(config, loader=LOADER) if sees else small_model(config)
    if model is None:
        return Trial(limit, is_done=False)
    stored = StoredWeights(model)
    converted = convert(model, stored)
    with refusals(text_config):
        far = difference(model, stored, converted, lengths=_FAR)
        if sees and (off := seen_difference(model, stored, converted)) > TOLERANCE:
            raise UnservedError(f"{DIFFERS.format(off)} where an image is")
    if far <= TOLERANCE:
        return Trial(None, is_done=True)
    within = [min(length, NEAR) for length in LENGTHS]
    if (off := difference(model, stored, converted, lengths=within)) > TOLERANCE or limit is None:
        raise UnservedError(DIFFERS.format(off))
    return Trial(limit, is_done=True)


def _check_windows(config: Any) -> None:
    """Refuse images whose tokens see each other, and of which not all are within a window.

    OpenVINO lets each see all others nonetheless (2026.4.1).
    """
    back = window(config.get_text_config())
    # Gemma 4's depend on the image: each is looked at when it comes.
    count = getattr(config, "mm_tokens_per_image", 0)
    if sees_ahead(config) and back and back < count:
        raise UnservedError(
            f"looks back on {back} tokens, and an image has {count}, each of which would see all "
            "others: max_images=0 builds it for text alone, and the plugin iterative reads its "
            "images"
        )
