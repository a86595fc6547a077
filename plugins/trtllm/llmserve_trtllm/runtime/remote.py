"""What the Python models know of the engine: its limits, for the engine itself is elsewhere."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from llmserve.runtime.errors import RequestError


class RemoteEngine:
    """The runtime of the generator ``tensorrt_llm`` in the models around the engine."""

    def __init__(self, settings: Mapping[str, Any], folder: Path) -> None:
        del folder
        self.context_length: int = settings["max_seq_len"]
        self.max_input_len: int = settings["max_input_len"]
        self.vocab_size: int = settings["vocab_size"]
        self.max_beam_width: int = settings["max_beam_width"]
        self.eos_ids = frozenset(settings["eos_ids"])
        self.pad_id: int | None = settings["pad_id"]

    def check_prompt(self, ids: list[int]) -> None:
        """Refuse a prompt that is longer than the engine was built for."""
        if len(ids) > self.max_input_len:
            raise RequestError(
                f"the prompt has {len(ids)} tokens and the engine takes {self.max_input_len} "
                f"of its context of {self.context_length}: shorten it, or build it for more"
            )

    def ends(self, tokenizer_eos: frozenset[int]) -> list[int]:
        """Return the ids that end an answer, the one for the engine first."""
        return sorted(self.eos_ids) + sorted(tokenizer_eos - self.eos_ids)
