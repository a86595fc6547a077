"""What the plugin puts into a repository: the converted model, and what it is told of it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from llmserve.builder.causal import check_causal
from llmserve.builder.context import BuildContext
from llmserve.errors import ModelSourceError
from llmserve.placement import place_instances
from llmserve_openvino.convert import convert

_FOLDER = "openvino"
_MODEL = "openvino_model.xml"
# Only these: the tokenizer is a part of its own, whatever form it has.
_FILES = (_MODEL, "openvino_model.bin")
_LENGTHS = ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length", "n_ctx")
_PRECISIONS = {"auto": "f32", "float32": "f32", "bfloat16": "bf16", "float16": "f16"}


def prepare(context: BuildContext) -> Mapping[str, Any]:
    """Place a model that is converted already, or convert it."""
    source, options = context.source, context.options
    check_causal(source, trust_remote_code=bool(options["trust_remote_code"]))
    place_instances(context.config, "cpu", 1)
    precision = _PRECISIONS[str(options["dtype"])]
    cache = precision if options["kv_cache"] == "auto" else options["kv_cache"]
    return {
        **_place(context),
        "context_length": _context_length(source.config()),
        "eos_ids": _eos_ids(source.path, source.config()),
        "vocab_size": _vocab_size(source.config()),
        "precision": precision,
        "kv_cache": cache,
        "cache_gb": options["cache_gb"],
        "max_sequences": options["max_sequences"],
        "prefix_cache": options["prefix_cache"],
        "threads": options["threads"],
    }


def _place(context: BuildContext) -> Mapping[str, Any]:
    source = context.source
    if (source.path / _MODEL).is_file():
        files = [source.path / name for name in _FILES if (source.path / name).is_file()]
        if len(files) < len(_FILES):
            raise ModelSourceError(f"{source.asked} has {_MODEL} without openvino_model.bin")
        # The engine opens files, so what lies in the hub's cache is copied.
        return context.place(files, _FOLDER, copy=True if source.repo_id else None)
    target = context.folder / _FOLDER
    context.report(f"converting {source.asked} to OpenVINO")
    convert(
        source.path,
        target,
        weight_format=str(context.options["weight_format"]),
        trust_remote_code=bool(context.options["trust_remote_code"]),
    )
    for path in target.iterdir():
        if path.name not in _FILES:
            path.unlink()
    return {"path": _FOLDER}


def _context_length(config: Mapping[str, Any]) -> int | None:
    inner = config.get("text_config") or config
    found = (inner.get(name) for name in _LENGTHS)
    return next((length for length in found if isinstance(length, int)), None)


def _vocab_size(config: Mapping[str, Any]) -> int:
    size = (config.get("text_config") or config).get("vocab_size")
    return size if isinstance(size, int) else 0


def _eos_ids(folder: Path, config: Mapping[str, Any]) -> list[int]:
    path = folder / "generation_config.json"
    told = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    eos = told.get("eos_token_id", config.get("eos_token_id"))
    return sorted(eos) if isinstance(eos, list) else [] if eos is None else [eos]
