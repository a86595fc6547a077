"""What a conversion does because of someone else's fault, as ``llmserve.server.workarounds``."""

from __future__ import annotations

import errno
import re
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache

from llmserve.contract.workaround import Workaround

_READER = "transformers 5.20 to 5.23, gguf 0.19"

READ_AGAIN = Workaround(
    "A file's header is read three times, and the table of its tensors' names is made once for "
    "each module of the model: more than half of a conversion's time.",
    _READER,
    ("workarounds:remembered",),
    "converting a model with 50,000 tokens takes no longer without it",
)
STRETCH_LEFT_OUT = Workaround(
    "What stretches the context of a model is left in the file, except the base of its rotation.",
    _READER,
    ("convert:apply_rope",),
    "test_a_stretched_context_stays_stretched passes without it",
)
OTHER_DEFAULTS = Workaround(
    "Special tokens that the file does not name, and GPT-2's context, are those of some other "
    "model.",
    _READER,
    ("convert:complete_config",),
    "test_a_converted_model_is_the_model passes for gpt2 and phi3 without it",
)
NOT_SAVED = Workaround(
    "A model that was read from GGUF cannot be saved, even if nothing in it is quantized any more.",
    _READER,
    ("convert:without_quantizer",),
    "`save_pretrained` of such a model writes it",
)
FULL_DISK = Workaround(
    "On a full disk, safetensors raises an error of its own, which has the number in its words.",
    "safetensors 0.4 to 0.8",
    ("workarounds:is_full",),
    "test_a_full_disk_is_told_from_other_failures passes with OSError alone",
)
_OS_ERROR = re.compile(r"\(os error ([0-9]+)\)")


def is_full(error: BaseException) -> bool:
    """Return whether the disk, or what a user may have of it, is full: ``FULL_DISK``."""
    number = getattr(error, "errno", None)
    if number is None and (found := _OS_ERROR.search(str(error))):
        number = int(found[1])
    return number in (errno.ENOSPC, errno.EDQUOT)


@contextmanager
def remembered() -> Iterator[None]:
    """Let transformers get at once what it asks the package gguf for again: ``READ_AGAIN``."""
    import gguf

    originals = {name: getattr(gguf, name) for name in ("GGUFReader", "get_tensor_name_map")}
    for name, original in originals.items():
        setattr(gguf, name, lru_cache(maxsize=1)(original))
    try:
        yield
    finally:
        for name, original in originals.items():
            setattr(gguf, name, original)
