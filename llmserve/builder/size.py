"""Reads how large a model is, from its configuration and the headers of its files.

Nothing is loaded. Of a model on the hub, only ``config.json`` and an index are downloaded.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any

from llmserve.builder.gguf.header import KINDS, read_header
from llmserve.builder.hub.choice import needed_weights
from llmserve.builder.hub.download import content_of
from llmserve.builder.hub.failures import HubError
from llmserve.builder.hub.lookup import look_up
from llmserve.builder.layer_kinds import first, layers_of, state_bytes
from llmserve.builder.reading import read_object
from llmserve.builder.source import GGUF, WEIGHTS, is_demo, is_gguf, model_on_hub, path_of
from llmserve.builder.weights.quantised import quantised_by
from llmserve.builder.weights.stored import WHOLE, Stored, loaded_files, read_stored
from llmserve.demo import demo_model_path
from llmserve.errors import ModelSourceError
from llmserve.plugins.quantised import Quantised
from llmserve.plugins.size import BYTES, ModelSize, PackedSize
from llmserve.runtime.causal import original_length

_TYPES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
_IN_WORDS = ("qweight", "weight_packed")
"""The ends of the names of tensors that have several numbers in each word of 32 bits."""
_WORD = 32
_IN_BYTES = ("I8", "F8_E4M3", "F8_E5M2")
_SCALE = 16
_LENGTHS = ("max_position_embeddings", "n_positions", "seq_length", "n_ctx")
_GGUF_KIND = re.compile(r"(?:^|[-_.])(?:B?F(16|32)|(?:I?Q|MXFP)(\d))(?=[-_.])", re.IGNORECASE)
"""The bits of a weight, as the names of GGUF files say them: ``Q8_0``, ``IQ4_XS``, ``BF16``."""


def size_of(
    model: str,
    *,
    revision: str = "",
    weights: Sequence[str] = (WEIGHTS,),
    report: Callable[[str], None] = lambda _: None,
) -> ModelSize | None:
    """Return how large the model is that a build is given; None if that cannot be known.

    A hub that does not give the model gives the build nothing either: that is raised.
    """
    if is_demo(model):
        return size_in(demo_model_path(model), weights)
    try:
        path = path_of(model)
        if is_gguf(path):
            files = [path] if path.is_file() else sorted(path.glob(f"*{GGUF}"))
            return _of_gguf(files[0]) if len(files) == 1 else None
        if path.is_dir():
            return size_in(path, weights)
        return None if path.exists() else _of_hub(model, revision, weights, report)
    except HubError:
        raise
    except (ModelSourceError, OSError, ValueError, KeyError, TypeError, ZeroDivisionError):
        # What is wrong with it is found, and said better, by those who read it.
        return None


def with_draft(
    size: ModelSize, options: Mapping[str, Any], *, report: Callable[[str], None] = lambda _: None
) -> ModelSize:
    """Return a model's size with that of the draft model that its options name."""
    if not (named := options.get("draft_model")):
        return size
    return replace(size, draft=size_of(str(named), report=report))


def size_in(folder: Path, weights: Sequence[str] = (WEIGHTS,)) -> ModelSize | None:
    """Return how large the model in a folder is."""
    files = sorted({file for pattern in weights for file in folder.glob(pattern)})
    if not files or not (folder / "config.json").is_file():
        return None
    described = read_object(folder / "config.json")
    config = _text_config(described)
    stored: dict[str, Stored] = {}
    # Some models have their weights a second time, for other programs.
    for file in loaded_files(folder, WHOLE, WEIGHTS):
        if file in files:
            stored |= read_stored(file)
    size = sum(file.stat().st_size for file in files)
    if not stored:
        return replace(_by_bytes(size, config), is_checkpoint=False)
    quantised = quantised_by(described)
    packed = _packed(stored, quantised) if quantised else []
    if packed is None:
        return None
    of_packed = {name for weight in packed for name in weight.names}
    others = {name: tensor for name, tensor in stored.items() if name not in of_packed}
    kinds: Counter[str] = Counter()
    for tensor in others.values():
        kinds[tensor.dtype] += prod(tensor.shape)
    if (dtype := _TYPES.get(kinds.most_common(1)[0][0])) is None:
        return None
    vocabulary = config.get("vocab_size")
    ends = [prod(t.shape) for t in others.values() if len(t.shape) == 2 and vocabulary in t.shape]
    ends += [weight.parameters for weight in packed if vocabulary in weight.lengths]
    counts = [weight.parameters for weight in packed]
    found = ModelSize(
        parameters=kinds.total() + sum(counts),
        bytes=size,
        dtype=dtype,
        ends=sum(ends),
        largest=max([*counts, *(prod(tensor.shape) for tensor in others.values())]),
        packed=PackedSize(quantised, sum(counts), sum(weight.bytes for weight in packed))
        if quantised
        else None,
    )
    return _with_cache(found, config)


@dataclass(frozen=True)
class _Packed:
    """A quantised weight: the names of its tensors, what they stand for and take."""

    names: Sequence[str]
    parameters: int
    bytes: int
    lengths: frozenset[int]
    """All numbers in the shapes of its tensors."""


def _packed(stored: Mapping[str, Stored], found: Quantised) -> list[_Packed] | None:
    """Return the quantised weights of a checkpoint; None if it is not known how many they are."""
    by_module: dict[str, dict[str, Stored]] = {}
    for name, tensor in stored.items():
        module, _, end = name.rpartition(".")
        if end != "bias":
            by_module.setdefault(module, {})[end] = tensor
    weights = []
    for module, tensors in by_module.items():
        words = [tensors[end] for end in _IN_WORDS if end in tensors]
        whole = [t for end, t in tensors.items() if end == "weight" and t.dtype in _IN_BYTES]
        if words and not found.bits:
            return None
        parameters = sum(prod(tensor.shape) * _WORD // found.bits for tensor in words)
        parameters += sum(prod(tensor.shape) for tensor in whole)
        if parameters:
            names = [f"{module}.{end}" if module else end for end in tensors]
            size = sum(tensor.end - tensor.begin for tensor in tensors.values())
            lengths = frozenset(length for t in tensors.values() for length in t.shape)
            weights.append(_Packed(names, parameters, size, lengths))
    return weights or None


def _by_bytes(size: int, config: Mapping[str, Any]) -> ModelSize:
    dtype = str(config.get("dtype") or config.get("torch_dtype") or "float32")
    dtype = dtype if dtype in BYTES else "float32"
    hidden, vocabulary = (first(config, name) for name in ("hidden_size", "vocab_size"))
    count = 1 if config.get("tie_word_embeddings") else 2
    found = ModelSize(
        parameters=size // BYTES[dtype],
        bytes=size,
        dtype=dtype,
        ends=count * hidden * vocabulary,
        largest=hidden * vocabulary,
    )
    return _with_cache(found, config)


def _by_packed_bytes(found: ModelSize, quantised: Quantised) -> ModelSize | None:
    """Return the size of a quantised checkpoint whose files are not here.

    All but the table and the product of the scores are taken to be quantised.
    """
    if not (bits := quantised.bits or (8 if quantised.method == "fp8" else 0)):
        return None
    packed = max(0, found.bytes - found.ends * BYTES[found.dtype])
    of_scales = (_SCALE + bits) / quantised.group if quantised.group else 0
    parameters = int(packed * 8 / (bits + of_scales))
    return replace(
        found,
        parameters=found.ends + parameters,
        packed=PackedSize(quantised, parameters, packed),
    )


def _of_hub(
    model: str, revision: str, weights: Sequence[str], report: Callable[[str], None]
) -> ModelSize | None:
    named = model_on_hub(model)
    if named is None:
        return None
    repo_id, file = named
    if not file and repo_id.lower().endswith(GGUF):
        # A file that is not there.
        return None
    listing = look_up(repo_id, file or "config.json", revision=revision, report=report)
    if isinstance(listing, Path):
        if file:
            return replace(_of_gguf(listing / file), is_on_hub=True)
        found = size_in(listing, weights)
        return found and replace(found, is_on_hub=True)

    def read(name: str) -> Path:
        return content_of(listing, name, report)

    if file:
        size = listing.files[file].size
        return None if size is None else _of_gguf_on_hub(file, size)
    described = read_object(read("config.json"))
    config, quantised = _text_config(described), quantised_by(described)
    sizes = [listing.files[name].size for name in needed_weights(listing.files, weights, read)]
    known = [size for size in sizes if size is not None]
    if not known or len(known) < len(sizes):
        return None
    by_bytes = replace(_by_bytes(sum(known), config), is_on_hub=True)
    return by_bytes if quantised is None else _by_packed_bytes(by_bytes, quantised)


def _of_gguf_on_hub(file: str, size: int) -> ModelSize | None:
    """Return the size of a model by the type that the name of its file says."""
    if (named := _GGUF_KIND.search(file)) is None:
        return None
    # With its share of a scale. The larger weights of a file in fewer bits have more of them.
    bits = int(named[1]) if named[1] else max(4, int(named[2])) + 0.5
    return ModelSize(
        parameters=int(size * 8 / bits), bytes=size, dtype="bfloat16", is_on_hub=True, is_gguf=True
    )


def _text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the part of a configuration that describes the model of texts."""
    text = config.get("text_config")
    return {**config, **text} if isinstance(text, Mapping) else config


def _with_cache(size: ModelSize, config: Mapping[str, Any]) -> ModelSize:
    """Add what a configuration says about keys and values, and for how many tokens they are."""
    layers, near = layers_of(config), 0
    if window := first(config, "sliding_window", "attention_chunk_size"):
        near = layers.windowed
    if config.get("use_sliding_window") is False or not near:
        window = near = 0
    of_layer, of_heads = _latent(config), _cache_of_layer(config)
    return replace(
        size,
        layers=layers.count,
        cache=layers.attending * (of_layer or of_heads),
        of_heads=layers.attending * of_heads if of_layer else None,
        capped=of_heads if config.get("attn_logit_softcapping") else None,
        state=state_bytes(config),
        context=first(config, *_LENGTHS),
        window=window,
        windowed=near * (of_layer or of_heads) if window else 0,
        unstretched=original_length(config) or 0,
    )


def _latent(config: Mapping[str, Any]) -> int:
    """Return how many numbers of a token keys and values are made from; 0 if they are kept."""
    latent = first(config, "kv_lora_rank")
    return latent and latent + first(config, "qk_rope_head_dim")


def _cache_of_layer(config: Mapping[str, Any]) -> int:
    """Return how many numbers the keys and values of a token are, 0 if that is not said."""
    heads = first(config, "num_attention_heads", "n_head", "n_heads")
    hidden = first(config, "hidden_size", "n_embd", "d_model")
    width = first(config, "head_dim", "attention_head_dim") or (hidden // heads if heads else 0)
    key_heads = first(config, "num_key_value_heads", "num_kv_heads") or heads
    if _latent(config):
        key = sum(first(config, f"qk_{part}_head_dim") for part in ("nope", "rope"))
        return heads * (key + (first(config, "v_head_dim") or width))
    return 2 * (1 if config.get("multi_query") else key_heads) * width


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
    kinds: Counter[str] = Counter()
    for tensor in header.tensors:
        kinds[KINDS.get(tensor.kind, "")] += tensor.elements
    found = ModelSize(
        parameters=sum(tensor.elements for tensor in header.tensors),
        bytes=path.stat().st_size,
        # What it is converted to before anything else is done with it.
        dtype="float32" if is_plain else "bfloat16",
        ends=sum(ends),
        largest=max(tensor.elements for tensor in header.tensors),
        is_gguf=True,
        kinds=kinds,
    )
    return _with_cache(found, described)
