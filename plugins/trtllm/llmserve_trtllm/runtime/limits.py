"""What the models around the engine know of it, for the engine itself is elsewhere."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from llmserve.runtime import RequestError


class EngineLimits:
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


class Renamed:
    """Shows a request to the core's reader under the names that it knows.

    ``names`` leads from the tensors' own names to the contract's; others stay as they are.
    """

    def __init__(self, raw: Any, names: Mapping[str, str]) -> None:
        self._raw = raw
        self._names = names

    def inputs(self) -> list[Any]:
        """Return the input tensors."""
        return [_Named(t, self._names.get(t.name(), t.name())) for t in self._raw.inputs()]

    def parameters(self) -> Any:
        """Return the request's parameters."""
        return self._raw.parameters()


class _Named:
    def __init__(self, tensor: Any, name: str) -> None:
        self._tensor, self._name = tensor, name

    def name(self) -> str:
        return self._name

    def as_numpy(self) -> Any:
        return self._tensor.as_numpy()
