"""What a model's configuration says to the stand-in, which wants what the real backend wants."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

SOURCE = "llmserve.stand_in"
"""The parameter that says what the engine was built from."""
_STATIC = ("V1", "v1")
_TYPES = (*_STATIC, "inflight_batching", "inflight_fused_batching")
_REQUIRED = ("gpt_model_type", "gpt_model_path")
_REQUIRED_FROM_0_19 = ("tokenizer_dir", "xgrammar_tokenizer_info_path", "guided_decoding_backend")


class Settings:
    """Triton's JSON of a ``config.pbtxt``, read as far as PyTorch can follow it."""

    def __init__(self, name: str, config: Mapping[str, Any]) -> None:
        parameters = config.get("parameters") or {}
        given = {key: str(value.get("string_value", "")) for key, value in parameters.items()}
        inputs = {tensor["name"] for tensor in config.get("input") or ()}
        later = _REQUIRED_FROM_0_19 if "guided_decoding_guide" in inputs else ()
        for key in (*_REQUIRED, *later):
            if key not in given:
                raise RuntimeError(f"Cannot find parameter with name: {key}")
        self.tokenizer_info: Mapping[str, Any] | None = None
        if given.get("guided_decoding_backend") and given["xgrammar_tokenizer_info_path"]:
            path = Path(given["xgrammar_tokenizer_info_path"])
            if not path.exists():
                raise RuntimeError(f"Xgrammar's tokenizer info path at {path} does not exist.")
            self.tokenizer_info = json.loads(path.read_text(encoding="utf-8"))
        kind = given["gpt_model_type"]
        if kind not in _TYPES:
            raise RuntimeError(f"gpt_model_type {kind!r} is none of {', '.join(_TYPES)}")
        if kind in _STATIC and "seed" in inputs:
            raise RuntimeError("from 0.20 on TensorRT-LLM runs no static batches (V1)")
        if not given.get(SOURCE):
            raise RuntimeError(
                "there is no TensorRT-LLM here, and the stand-in does not know which model the "
                f"engine was built from: build it with llmserve, or set the parameter {SOURCE} to "
                '{"path": "FOLDER"}'
            )
        self.name = name
        self.source: Mapping[str, Any] = json.loads(given[SOURCE])
        self.static = kind in _STATIC
        self.decoupled = bool((config.get("model_transaction_policy") or {}).get("decoupled"))
        self.max_batch_size = max(1, int(config.get("max_batch_size", 1)))
        self.excludes_input = given.get("exclude_input_in_output", "").lower() == "true"
        self.outputs = {out["name"]: tuple(map(int, out["dims"])) for out in config["output"]}
        # 0.5.0 says no lengths.
        self.is_first = "sequence_length" not in self.outputs
        # Before 0.14 there is a 0 for every score that nobody asked for.
        self.fills_in_scores = "sequence_index" not in self.outputs
