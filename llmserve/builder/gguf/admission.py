"""Refuses GGUF files that cannot be converted, by their headers, before anything is loaded."""

from __future__ import annotations

import re
import shutil
from collections import Counter
from importlib.util import find_spec
from pathlib import Path

from llmserve.builder.gguf.header import GgufHeader
from llmserve.builder.reading import damaged
from llmserve.errors import ModelSourceError, OutputError
from llmserve.packages import install_command

_READERS = ("gguf", "transformers", "accelerate", "torch")
_BLOCK = re.compile(r"blk\.([0-9]{1,6})\.")
NEEDS_SPACE = "make some space, or build to another disk"
FLOATS = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}


def check_readers(path: Path) -> None:
    """Refuse the file if a package that reads it is not installed."""
    if any(find_spec(name) is None for name in _READERS):
        raise ModelSourceError(
            f"{path.name} is a GGUF file, and the packages that read it are not installed",
            hint=install_command("llmserve[gguf]"),
        )


def check_complete(header: GgufHeader) -> None:
    """Refuse parts of models, and what is no language model."""
    facts, name = header.facts, header.path.name
    parts = facts.get("split.count")
    if isinstance(parts, int) and parts > 1:
        raise ModelSourceError(
            f"{name} is one of {parts} files of a model",
            hint="join them with llama.cpp's `llama-gguf-split --merge FIRST_FILE JOINED_FILE`",
        )
    kind = facts.get("general.type", "model")
    if kind != "model":
        raise ModelSourceError(f"{name} is no model: it says it is of type {str(kind)[:64]!r}")
    if not header.tensors:
        raise ModelSourceError(f"{name} has no weights", hint="name the model's own GGUF file")
    if "tokenizer.ggml.tokens" not in facts:
        raise ModelSourceError(
            f"{name} has no tokenizer", hint="name a GGUF file of a whole language model"
        )


def check_extent(header: GgufHeader) -> Counter[str]:
    """Refuse a file whose tensors are not all in it; return how many weights have which type."""
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

    size, kinds = header.path.stat().st_size, Counter[str]()
    for tensor in header.tensors:
        try:
            kind = GGMLQuantizationType(tensor.kind)
            block, length = GGML_QUANT_SIZES[kind]
        except (KeyError, ValueError):
            raise ModelSourceError(
                f"{header.path.name} has weights of a type that the package gguf does not know, "
                f"{tensor.kind}",
                hint=install_command("gguf", "--upgrade"),
            ) from None
        rest = tensor.shape[-1] % block if tensor.shape else 0
        end = header.data + tensor.offset + tensor.elements // block * length
        if rest or tensor.elements < 1:
            raise damaged(header.path, f"its tensor {tensor.name[:64]!r} has an impossible shape")
        if end > size:
            raise damaged(header.path, f"it has {size} bytes of at least {end}")
        kinds[kind.name] += tensor.elements
    _check_blocks(header)
    return kinds


def _check_blocks(header: GgufHeader) -> None:
    """Refuse many more layers than there are tensors of: each would be made before it is missed."""
    numbers = {int(match[1]) for tensor in header.tensors if (match := _BLOCK.match(tensor.name))}
    blocks, claimed = max(numbers, default=-1) + 1, header.own("block_count")
    # A few models have layers without any weights.
    if not isinstance(claimed, int) or not blocks <= claimed <= 2 * blocks:
        raise damaged(header.path, f"it claims to have {claimed} layers, and has {blocks}")


def type_of_most(kinds: Counter[str]) -> str:
    """Return the type of most of the weights, such as Q4_K."""
    return kinds.most_common(1)[0][0]


def dtype_for(kinds: Counter[str]) -> str:
    """Return the type that the weights are stored in: their own, or bfloat16 if it is quantized.

    float16 would hold it a little closer, but models that were trained in bfloat16 compute beyond
    its range.
    """
    if not kinds.keys() <= FLOATS.keys():
        return "bfloat16"
    # Beside 16-bit weights, the few of norms are in 32 bits.
    return FLOATS[type_of_most(kinds)]


def check_space(folder: Path, kinds: Counter[str], dtype: str) -> None:
    """Refuse what the disk of a folder has no space for, before minutes go into it."""
    needed = sum(kinds.values()) * (4 if dtype == "float32" else 2)
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise OutputError(
            f"its weights take {needed / 1e6:.0f} MB in {dtype}, and the disk of {folder} has "
            f"{free / 1e6:.0f} MB free",
            hint=NEEDS_SPACE,
        )
