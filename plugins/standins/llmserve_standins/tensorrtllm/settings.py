"""What a model's configuration says to the stand-in, which wants what the real backend wants."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SOURCE = "llmserve.stand_in"
"""The parameter that says what the engine was built from."""
_STATIC = ("V1", "v1")
_TYPES = (*_STATIC, "inflight_batching", "inflight_fused_batching")
_REQUIRED = ("gpt_model_type", "gpt_model_path")
_REQUIRED_FROM_0_19 = ("tokenizer_dir", "xgrammar_tokenizer_info_path", "guided_decoding_backend")


@dataclass(frozen=True)
class Settings:
    """A configuration of the backend, as far as PyTorch can follow it."""

    name: str
    source: Mapping[str, Any]
    static: bool
    decoupled: bool
    max_batch_size: int
    excludes_input: bool
    outputs: Mapping[str, tuple[str, tuple[int, ...]]]
    """The types and dimensions of what is answered."""
    tokenizer_info: Mapping[str, Any] | None = None
    """What guided decoding knows of the tokenizer; None where there is none."""

    @property
    def is_first(self) -> bool:
        """Whether it is a TensorRT-LLM 0.5.0, which says no lengths."""
        return "sequence_length" not in self.outputs

    @property
    def fills_in_scores(self) -> bool:
        """Whether there is a 0 for every score that nobody asked for, as before 0.14."""
        return "sequence_index" not in self.outputs

    @classmethod
    def read(cls, name: str, config: Mapping[str, Any]) -> Settings:
        """Read Triton's JSON of a ``config.pbtxt``; what the real backend refuses is refused."""
        parameters = config.get("parameters") or {}
        given = {key: str(value.get("string_value", "")) for key, value in parameters.items()}
        inputs = {tensor["name"] for tensor in config.get("input") or ()}
        later = _REQUIRED_FROM_0_19 if "guided_decoding_guide" in inputs else ()
        for key in (*_REQUIRED, *later):
            if key not in given:
                raise RuntimeError(f"Cannot find parameter with name: {key}")
        info = None
        if given.get("guided_decoding_backend") and given["xgrammar_tokenizer_info_path"]:
            path = Path(given["xgrammar_tokenizer_info_path"])
            if not path.exists():
                raise RuntimeError(f"Xgrammar's tokenizer info path at {path} does not exist.")
            info = json.loads(path.read_text(encoding="utf-8"))
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
        return cls(
            name=name,
            source=json.loads(given[SOURCE]),
            static=kind in _STATIC,
            decoupled=bool((config.get("model_transaction_policy") or {}).get("decoupled")),
            max_batch_size=max(1, int(config.get("max_batch_size", 1))),
            excludes_input=given.get("exclude_input_in_output", "").lower() == "true",
            outputs={
                out["name"]: (out["data_type"], tuple(map(int, out["dims"])))
                for out in config["output"]
            },
            tokenizer_info=info,
        )
