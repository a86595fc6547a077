"""A tensor of a template, and the versions that have it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from tritonclient.grpc import model_config_pb2 as pb

from llmserve_trtllm.versions import Version

LOGITS = "LOGITS"
"""Stands for the type that ``logits_datatype`` gives; the others stand for options likewise."""
ENCODER = "ENCODER"
PROMPT_TABLE = "PROMPT_TABLE"
BY_OPTION = {
    LOGITS: "logits_datatype",
    ENCODER: "encoder_input_features_data_type",
    PROMPT_TABLE: "prompt_embedding_table_data_type",
}


@dataclass(frozen=True)
class Row:
    """A tensor as a template declares it, from version ``since`` on and before ``until``."""

    name: str
    kind: str
    dims: tuple[int, ...] = (1,)
    optional: bool = False
    reshape: bool = False
    ragged: bool = False
    since: str = "0.0"
    until: str = "999.0"

    def put(self, fields: Any, *, inputs: bool) -> None:
        """Add the tensor to a configuration's inputs or outputs."""
        field = fields.add(
            name=self.name, data_type=pb.DataType.Value(f"TYPE_{self.kind}"), dims=self.dims
        )
        if self.reshape:
            # A reshape to nothing at all: the batch dimension is all that the backend sees.
            field.reshape.SetInParent()
        if inputs and self.optional:
            field.optional = True
        if inputs and self.ragged:
            field.allow_ragged_batch = True


def scalar(name: str, kind: str, **more: Any) -> Row:
    """Return an optional input with one value a row, which the backend sees without dimension."""
    return Row(name, kind, optional=True, reshape=True, **more)


def wish(name: str, kind: str, **more: Any) -> Row:
    """Return an optional input of a client with one value a row."""
    return Row(name, kind, optional=True, **more)


def free(name: str, kind: str, *dims: int, **more: Any) -> Row:
    """Return an optional input whose size is the request's own."""
    return Row(name, kind, dims or (-1,), optional=True, ragged=True, **more)


def of_version(
    rows: Iterable[Row], version: Version, options: dict[str, Any] | None = None
) -> Iterator[Row]:
    """Give the rows that a version has, with the types that the options name."""
    for row in rows:
        if not Version.parse(row.since) <= version < Version.parse(row.until):
            continue
        kind = row.kind
        if kind in BY_OPTION:
            kind = str((options or {})[BY_OPTION[kind]]).removeprefix("TYPE_")
        yield replace(row, kind=kind)
