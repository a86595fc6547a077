"""Reads how large a model is, from its configuration and the headers of its files.

Nothing is loaded. Of a model on the hub, only ``config.json`` is downloaded.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatch
from math import prod
from pathlib import Path
from typing import Any

from llmserve.builder.gguf.header import read_header
from llmserve.builder.source import DEMO, GGUF, WEIGHTS, hub_listing, is_gguf, path_of, read_object
from llmserve.builder.weights.stored import Stored, read_stored
from llmserve.errors import ModelSourceError
from llmserve.plugins.size import BYTES, ModelSize

_TYPES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
_LENGTHS = ("max_position_embeddings", "n_positions", "seq_length", "n_ctx")
_HALF_BYTE = 0.5625
"""What a weight of most GGUF files takes, with its share of a scale."""


def size_of(
    model: str, *, revision: str = "", weights: Sequence[str] = (WEIGHTS,)
) -> ModelSize | None:
    """Return how large the model is that a build is given; None if that cannot be known."""
    if model == DEMO:
        from llmserve.demo import demo_model_path

        return size_in(demo_model_path(), weights)
    try:
        path = path_of(model)
        if is_gguf(path):
            files = [path] if path.is_file() else sorted(path.glob(f"*{GGUF}"))
            return _of_gguf(files[0]) if len(files) == 1 else None
        if path.is_dir():
            return size_in(path, weights)
        return None if path.exists() else _of_hub(model, revision, weights)
    except (ModelSourceError, OSError, ValueError, KeyError, TypeError, ZeroDivisionError):
        # What is wrong with it is found, and said better, by those who read it.
        return None


def size_in(folder: Path, weights: Sequence[str] = (WEIGHTS,)) -> ModelSize | None:
    """Return how large the model in a folder is."""
    files = sorted({file for pattern in weights for file in folder.glob(pattern)})
    if not files or not (folder / "config.json").is_file():
        return None
    config = _text_config(read_object(folder / "config.json"))
    stored: dict[str, Stored] = {}
    for file in files:
        if file.match(WEIGHTS):
            stored |= read_stored(file)
    size = sum(file.stat().st_size for file in files)
    if not stored:
        return replace(_by_bytes(size, config), is_checkpoint=False)
    kinds: Counter[str] = Counter()
    for tensor in stored.values():
        kinds[tensor.dtype] += prod(tensor.shape)
    vocabulary = config.get("vocab_size")
    ends = [prod(t.shape) for t in stored.values() if len(t.shape) == 2 and vocabulary in t.shape]
    return ModelSize(
        parameters=kinds.total(),
        bytes=size,
        dtype=_TYPES.get(kinds.most_common(1)[0][0], "float32"),
        ends=sum(ends),
        largest=max(prod(tensor.shape) for tensor in stored.values()),
        cache=_cache_of(config),
        context=_first(config, *_LENGTHS),
    )


def _by_bytes(size: int, config: Mapping[str, Any]) -> ModelSize:
    dtype = str(config.get("dtype") or config.get("torch_dtype") or "float32")
    dtype = dtype if dtype in BYTES else "float32"
    hidden, vocabulary = (config.get(name) or 0 for name in ("hidden_size", "vocab_size"))
    count = 1 if config.get("tie_word_embeddings") else 2
    return ModelSize(
        parameters=size // BYTES[dtype],
        bytes=size,
        dtype=dtype,
        ends=count * hidden * vocabulary,
        largest=hidden * vocabulary,
        cache=_cache_of(config),
        context=_first(config, *_LENGTHS),
    )


def _of_hub(model: str, revision: str, weights: Sequence[str]) -> ModelSize | None:
    listing = hub_listing(model, revision=revision)
    if listing is None:
        return None
    file, sizes, config = listing
    if file:
        return ModelSize(
            parameters=int(sizes[file] / _HALF_BYTE), bytes=sizes[file], dtype="bfloat16",
            is_on_hub=True, is_gguf=True,
        )  # fmt: skip
    chosen = [
        size for name, size in sizes.items()
        if "/" not in name and any(fnmatch(name, pattern) for pattern in weights)
    ]  # fmt: skip
    if not chosen:
        return None
    return replace(_by_bytes(sum(chosen), _text_config(config)), is_on_hub=True)


def _text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the part of a configuration that describes the model of texts."""
    text = config.get("text_config")
    return {**config, **text} if isinstance(text, Mapping) else config


def _cache_of(config: Mapping[str, Any]) -> int:
    """Return how many numbers the keys and values of a token are, 0 if that is not said."""
    layers = _first(config, "num_hidden_layers", "n_layer", "num_layers", "n_layers")
    heads = _first(config, "num_attention_heads", "n_head", "n_heads")
    hidden = _first(config, "hidden_size", "n_embd", "d_model")
    width = _first(config, "head_dim") or (hidden // heads if heads else 0)
    key_heads = _first(config, "num_key_value_heads", "num_kv_heads") or heads
    return 2 * layers * (1 if config.get("multi_query") else key_heads) * width


def _first(config: Mapping[str, Any], *names: str) -> int:
    found = (config.get(name) for name in names)
    return next((value for value in found if type(value) is int and value > 0), 0)


def _of_gguf(path: Path) -> ModelSize:
    header = read_header(path)
    own = header.own
    heads, keys = own("attention.head_count"), own("attention.head_count_kv")
    ends = [t.elements for t in header.tensors if t.name in ("token_embd.weight", "output.weight")]
    described = {
        "num_hidden_layers": own("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": keys,
        "hidden_size": own("embedding_length"),
        "head_dim": own("attention.key_length"),
        "max_position_embeddings": own("context_length"),
    }
    is_plain = all(tensor.kind == 0 for tensor in header.tensors)
    return ModelSize(
        parameters=sum(tensor.elements for tensor in header.tensors),
        bytes=path.stat().st_size,
        # What it is converted to before anything else is done with it.
        dtype="float32" if is_plain else "bfloat16",
        ends=sum(ends),
        largest=max(tensor.elements for tensor in header.tensors),
        is_gguf=True,
        cache=_cache_of(described),
        context=_first(described, *_LENGTHS),
    )
