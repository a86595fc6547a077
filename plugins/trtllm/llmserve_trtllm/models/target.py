"""What is built: for which version, with which engine, in which way."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from llmserve_trtllm.tables import client
from llmserve_trtllm.tables import engine as tables
from llmserve_trtllm.tables.row import Row, of_version
from llmserve_trtllm.versions import FIRST_CONFIGURABLE, Version


@dataclass(frozen=True)
class Target:
    """One build's decisions, which all its models share."""

    version: Version
    options: Mapping[str, Any]
    batching: str
    scheduler: str

    @property
    def is_first(self) -> bool:
        """Whether it is 0.5.0, whose tensors have other types and wires."""
        return self.version < FIRST_CONFIGURABLE

    @property
    def streams(self) -> bool:
        """Whether the engine's model is decoupled."""
        return bool(self.options["decoupled"])

    @property
    def engine_echoes(self) -> bool:
        """Whether the engine's tokens begin with the prompt's."""
        return self.is_first or not self.options["exclude_input_in_output"]

    def rows(self, first: tuple[Row, ...], later: tuple[Row, ...]) -> list[Row]:
        """Return the rows that the version has, of two tables."""
        return list(of_version(first if self.is_first else later, self.version, dict(self.options)))

    @property
    def engine_inputs(self) -> list[Row]:
        """What the engine reads."""
        return self.rows(tables.INPUTS_0_5, tables.INPUTS)

    @property
    def engine_outputs(self) -> list[Row]:
        """What the engine answers."""
        return self.rows(tables.OUTPUTS_0_5, tables.OUTPUTS)

    @property
    def text(self) -> list[Row]:
        """What a client says, as far as it is text and lengths."""
        return self.rows(client.TEXT_0_5, client.TEXT)

    @property
    def wishes(self) -> list[Row]:
        """What a client can wish for of the engine, by way of preprocessing."""
        return self.rows(client.WISHES_0_5, client.WISHES)

    @property
    def straight(self) -> list[Row]:
        """What goes from the client to the engine as it is."""
        return self.rows(client.STRAIGHT_0_5, client.STRAIGHT)

    @property
    def bias(self) -> list[Row]:
        """A client's bias on words."""
        return self.rows((), client.BIAS)

    @property
    def scores(self) -> list[Row]:
        """What the engine says of an answer beside its tokens."""
        return self.rows((), client.SCORES)

    @property
    def answer(self) -> list[Row]:
        """The text that the client gets."""
        return self.rows(client.ANSWER_0_5, client.ANSWER)

    @property
    def read(self) -> list[Row]:
        """What preprocessing makes, beside a tensor for each wish."""
        return self.rows(client.READ_0_5, client.READ)

    @property
    def write(self) -> list[Row]:
        """What postprocessing reads of the engine."""
        return self.rows(client.WRITE_0_5, client.WRITE)

    @property
    def written(self) -> list[Row]:
        """What postprocessing makes of it."""
        return self.rows(client.WRITTEN_0_5, client.WRITTEN)
