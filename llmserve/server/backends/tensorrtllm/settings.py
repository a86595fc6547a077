"""What a model's configuration says to the stand-in."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

SOURCE = "llmserve.stand_in"
"""The parameter that says what the engine was built from."""
_STATIC = ("V1", "v1")


@dataclass(frozen=True)
class Settings:
    """A configuration of the backend, as far as PyTorch can follow it."""

    name: str
    source: Mapping[str, Any]
    static: bool
    decoupled: bool
    max_batch_size: int
    excludes_input: bool
    cache_tokens: int
    outputs: Mapping[str, tuple[str, tuple[int, ...]]]
    """The types and dimensions of what is answered."""

    @classmethod
    def read(cls, name: str, config: Mapping[str, Any]) -> Settings:
        """Read Triton's JSON of a ``config.pbtxt``; what cannot be served is told as such."""
        given = {
            key: str(value.get("string_value", ""))
            for key, value in (config.get("parameters") or {}).items()
        }
        if not given.get(SOURCE):
            raise RuntimeError(
                "there is no TensorRT-LLM here, and the stand-in does not know which model the "
                f"engine was built from: build it with llmserve, or set the parameter {SOURCE} to "
                '{"path": "FOLDER"}'
            )
        return cls(
            name=name,
            source=json.loads(given[SOURCE]),
            static=given.get("gpt_model_type") in _STATIC,
            decoupled=bool((config.get("model_transaction_policy") or {}).get("decoupled")),
            max_batch_size=max(1, int(config.get("max_batch_size", 1))),
            excludes_input=given.get("exclude_input_in_output", "").lower() == "true",
            cache_tokens=_whole(given.get("max_tokens_in_paged_kv_cache", "")),
            outputs={
                output["name"]: (
                    output["data_type"].removeprefix("TYPE_"),
                    tuple(int(size) for size in output["dims"]),
                )
                for output in config["output"]
            },
        )


def _whole(text: str) -> int:
    return int(text) if text.isdigit() else 0
