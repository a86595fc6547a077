"""The settings of a model; the stand-in requires the same parameters as the real backend."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

SOURCE = "llmserve.stand_in"
"""The parameter that names the model the engine was built from."""
_STATIC = ("V1", "v1")
_TYPES = (*_STATIC, "inflight_batching", "inflight_fused_batching")
_REQUIRED = ("gpt_model_type", "gpt_model_path")
_REQUIRED_FROM_0_19 = ("tokenizer_dir", "xgrammar_tokenizer_info_path", "guided_decoding_backend")


class Settings:
    """Triton's JSON of a ``config.pbtxt``, read as far as PyTorch supports it."""

    def __init__(self, name: str, config: Mapping[str, Any]) -> None:
        parameters = config.get("parameters") or {}
        values = {key: str(value.get("string_value", "")) for key, value in parameters.items()}
        inputs = {tensor["name"] for tensor in config.get("input") or ()}
        later = _REQUIRED_FROM_0_19 if "guided_decoding_guide" in inputs else ()
        for key in (*_REQUIRED, *later):
            if key not in values:
                raise RuntimeError(f"Cannot find parameter with name: {key}")
        self.tokenizer_info: Mapping[str, Any] | None = None
        if values.get("guided_decoding_backend") and values["xgrammar_tokenizer_info_path"]:
            path = Path(values["xgrammar_tokenizer_info_path"])
            if not path.exists():
                raise RuntimeError(f"Xgrammar's tokenizer info path at {path} does not exist.")
            self.tokenizer_info = json.loads(path.read_text(encoding="utf-8"))
        model_type = values["gpt_model_type"]
        if model_type not in _TYPES:
            raise RuntimeError(f"gpt_model_type cannot be {model_type!r}: choose one of {_TYPES}")
        if model_type in _STATIC and "seed" in inputs:
            raise RuntimeError("TensorRT-LLM 0.20 and later do not run static batches (V1)")
        if not values.get(SOURCE):
            raise RuntimeError(
                "TensorRT-LLM is not installed here, and the stand-in does not know which model "
                f"the engine was built from: build it with llmserve, or set the parameter {SOURCE} "
                'to {"path": "FOLDER"}'
            )
        self.name = name
        self.source: Mapping[str, Any] = json.loads(values[SOURCE])
        self.static = model_type in _STATIC
        self.decoupled = bool((config.get("model_transaction_policy") or {}).get("decoupled"))
        self.max_batch_size = max(1, int(config.get("max_batch_size", 1)))
        self.excludes_input = values.get("exclude_input_in_output", "").lower() == "true"
        self.outputs = {out["name"]: tuple(map(int, out["dims"])) for out in config["output"]}
        # 0.5.0 returns no lengths.
        self.is_0_5 = "sequence_length" not in self.outputs
        # Before 0.14 every score that was not requested is 0.
        self.fills_in_scores = "sequence_index" not in self.outputs
