"""Writes small GGUF files: whole models, as llama.cpp's converter would, and broken ones."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
import transformers
from numpy.typing import NDArray

from llmserve.demo import demo_model_path

VOCABULARY = 1024
"""That of the demo, whose tokenizer these models have."""
CONTEXT = 256
_SIZES = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
}
Weights = NDArray[np.float32]


def _same(name: str, weights: Weights) -> Weights:
    return weights


def _llama(name: str, weights: Weights) -> Weights:
    """Order the rows of queries and keys as llama.cpp rotates them: in pairs, not in halves."""
    heads = {"q_proj": 4, "k_proj": 2}.get(name.split(".")[-2])
    if heads is None:
        return weights
    halves = weights.reshape(heads, 2, weights.shape[0] // heads // 2, *weights.shape[1:])
    return np.ascontiguousarray(halves.swapaxes(1, 2).reshape(weights.shape))


def _gemma(name: str, weights: Weights) -> Weights:
    return weights + 1 if name.endswith("norm.weight") else weights


def _gpt2(name: str, weights: Weights) -> Weights:
    """Transpose what GPT-2 stores with its outputs last."""
    transposed = name.split(".")[-2] in ("c_attn", "c_proj", "c_fc") and weights.ndim == 2
    return np.ascontiguousarray(weights.T) if transposed else weights


FAMILIES: dict[str, tuple[str, dict[str, Any], Callable[[str, Weights], Weights]]] = {
    "llama": ("LlamaForCausalLM", {}, _llama),
    "qwen2": ("Qwen2ForCausalLM", {}, _same),
    "qwen3": ("Qwen3ForCausalLM", {"head_dim": 128}, _same),
    "gemma2": ("Gemma2ForCausalLM", {"query_pre_attn_scalar": 256}, _gemma),
    "phi3": ("Phi3ForCausalLM", {"pad_token_id": 0}, _same),
    "gpt2": ("GPT2LMHeadModel", {}, _gpt2),
}
"""The names of architectures in GGUF, with their classes in transformers."""


def make_model(family: str, **changes: Any) -> Any:
    """Return a small random model; the one of GPT-2's family is the demo."""
    name, own, _ = FAMILIES[family]
    model_class = getattr(transformers, name)
    if family == "gpt2":
        return model_class.from_pretrained(demo_model_path()).eval()
    settings = {**_SIZES, **own, **changes}
    if family == "qwen2":
        del settings["head_dim"]
    torch.manual_seed(3)
    config = model_class.config_class(
        **settings,
        vocab_size=VOCABULARY,
        max_position_embeddings=CONTEXT,
        bos_token_id=None,
        eos_token_id=0,
        tie_word_embeddings=family == "gemma2",
    )
    model = model_class(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            # Random weights give nearly uniform scores; larger weights give clear preferences.
            parameter.mul_(6 if parameter.ndim > 1 else 1)
            parameter.add_(0.1 * torch.randn_like(parameter) if parameter.ndim == 1 else 0)
    return model


def write_model(
    path: Path,
    family: str = "llama",
    *,
    model: Any = None,
    kind: gguf.GGMLQuantizationType = gguf.GGMLQuantizationType.F32,
    kinds: Mapping[str, gguf.GGMLQuantizationType] | None = None,
    facts: Mapping[str, Any] | None = None,
    extra: Mapping[str, Weights] | None = None,
    left_out: str = "nothing",
) -> Any:
    """Write a model with the demo's tokenizer; return the model.

    ``facts`` are added and change others; one that is None is left out. ``kinds`` are those of
    tensors with other types, by a part of their names.
    """
    model = make_model(family) if model is None else model
    facts = {} if facts is None else facts
    architecture = facts.get("general.architecture", family)
    writer = gguf.GGUFWriter(path, architecture)
    for name, value in {**_facts(architecture, model), **facts}.items():
        if name != "general.architecture":
            _add(writer, name, value)
    names = gguf.get_tensor_name_map(_architecture(family), model.config.num_hidden_layers)
    written = {} if extra is None else {**extra}
    for name, weights in model.state_dict().items():
        if name == "lm_head.weight" and model.config.tie_word_embeddings:
            continue
        found = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert found, name
        written[found] = FAMILIES[family][2](name, weights.float().numpy())
    for name, array in written.items():
        if left_out not in name:
            own = next((own for part, own in (kinds or {}).items() if part in name), kind)
            chosen = own if array.ndim > 1 else gguf.GGMLQuantizationType.F32
            data = quantized(array, chosen)
            writer.add_tensor(name, data, raw_dtype=chosen)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return model


def quantized(weights: Weights, kind: gguf.GGMLQuantizationType) -> Any:
    """Return weights in blocks: also of 256, which the package ``gguf`` only reads."""
    write = {"Q4_K": _q4_k, "Q5_K": _q5_k, "Q6_K": _q6_k}.get(kind.name)
    if write is None:
        return gguf.quantize(weights, kind)
    blocks = write(np.ascontiguousarray(weights, np.float32).reshape(-1, 256))
    return blocks.reshape(len(weights), -1)


def _q4_k(values: Weights) -> Any:
    head, numbers = _with_minima(values, 15)
    pairs = numbers.reshape(-1, 4, 2, 32)
    return np.concatenate([head, (pairs[:, :, 0] | pairs[:, :, 1] << 4).reshape(-1, 128)], -1)


def _q5_k(values: Weights) -> Any:
    head, numbers = _with_minima(values, 31)
    high = np.bitwise_or.reduce((numbers >> 4) << np.arange(8, dtype=np.uint8)[:, None], axis=1)
    pairs = (numbers & 15).reshape(-1, 4, 2, 32)
    low = (pairs[:, :, 0] | pairs[:, :, 1] << 4).reshape(-1, 128)
    return np.concatenate([head, high, low], -1)


def _with_minima(values: Weights, highest: int) -> tuple[Any, Any]:
    """Return the 16 bytes of scales of each block, and its numbers in eight groups."""
    groups = values.reshape(-1, 8, 32)
    least = np.maximum(0, -groups.min(-1))
    steps = (groups.max(-1) + least) / highest
    halves = [(each.max(-1, keepdims=True) / 63).astype("<f2") for each in (steps, least)]
    widths = [half.astype(np.float32) for half in halves]
    scale, minimum = (
        np.rint(each / width).clip(1, 63).astype(np.uint8)
        for each, width in zip((steps, least), widths, strict=True)
    )
    numbers = np.rint((groups + (widths[1] * minimum)[..., None]) / (widths[0] * scale)[..., None])
    factors = [
        scale[:, :4] | scale[:, 4:] >> 4 << 6,
        minimum[:, :4] | minimum[:, 4:] >> 4 << 6,
        scale[:, 4:] & 15 | (minimum[:, 4:] & 15) << 4,
    ]
    head = np.concatenate([*(half.view(np.uint8) for half in halves), *factors], -1)
    return head, numbers.clip(0, highest).astype(np.uint8)


def _q6_k(values: Weights) -> Any:
    groups = values.reshape(-1, 16, 16)
    steps = np.abs(groups).max(-1) / 31
    half = (steps.max(-1, keepdims=True) / 127).astype("<f2")
    scale = np.rint(steps / half.astype(np.float32)).clip(1, 127)
    numbers = np.rint(groups / (half.astype(np.float32) * scale)[..., None]).clip(-32, 31) + 32
    four = numbers.astype(np.uint8).reshape(-1, 2, 4, 32)
    low = np.concatenate([four[:, :, i] & 15 | (four[:, :, i + 2] & 15) << 4 for i in (0, 1)], -1)
    high = np.bitwise_or.reduce(
        [(four[:, :, i] >> 4 << 2 * i).astype(np.uint8) for i in range(4)], axis=0
    )
    parts = [low, high, scale.astype(np.int8).view(np.uint8), half.view(np.uint8)]
    return np.concatenate([part.reshape(len(half), -1) for part in parts], -1)


def _architecture(family: str) -> gguf.MODEL_ARCH:
    return next(key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == family)


def _facts(architecture: str, model: Any) -> dict[str, Any]:
    config = model.config
    own = {
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "block_count": config.num_hidden_layers,
        "attention.head_count": config.num_attention_heads,
        "vocab_size": VOCABULARY,
    }
    if architecture == "gpt2":
        own |= {
            "feed_forward_length": 4 * config.hidden_size,
            "attention.layer_norm_epsilon": config.layer_norm_epsilon,
        }
    else:
        own |= {
            "feed_forward_length": config.intermediate_size,
            "attention.head_count_kv": config.num_key_value_heads,
            "attention.layer_norm_rms_epsilon": config.rms_norm_eps,
            "attention.key_length": getattr(config, "head_dim", 16),
            "rope.dimension_count": getattr(config, "head_dim", 16),
            "rope.freq_base": 10000.0,
        }
    return {**{f"{architecture}.{name}": value for name, value in own.items()}, **_tokenizer()}


CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message['role'] + ': ' + message['content'] + '\n' }}"
    "{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"
)


def _tokenizer() -> dict[str, Any]:
    content = json.loads((demo_model_path() / "tokenizer.json").read_text())
    vocabulary = sorted(content["model"]["vocab"].items(), key=lambda item: item[1])
    assert [number for _, number in vocabulary] == [*range(VOCABULARY)]
    special = {token["id"] for token in content["added_tokens"] if token["special"]}
    merges = [
        merge if isinstance(merge, str) else " ".join(merge) for merge in content["model"]["merges"]
    ]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": [token for token, _ in vocabulary],
        "tokenizer.ggml.token_type": [3 if i in special else 1 for i in range(VOCABULARY)],
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.eos_token_id": 0,
        "tokenizer.chat_template": CHAT_TEMPLATE,
    }


def _add(writer: gguf.GGUFWriter, name: str, value: Any) -> None:
    if value is None:
        return
    if isinstance(value, bool):
        writer.add_bool(name, value)
    elif isinstance(value, int):
        writer.add_uint32(name, value)
    elif isinstance(value, float):
        writer.add_float32(name, value)
    elif isinstance(value, str):
        writer.add_string(name, value)
    else:
        writer.add_array(name, value)
