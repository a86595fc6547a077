"""Reads and writes ``config.pbtxt`` as a protobuf message, without templates."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any, TypeAlias

from google.protobuf import text_format
from tritonclient.grpc import model_config_pb2 as pb

from llmserve.contract.tensors import MESSAGES, TEXT_INPUT, TEXT_PAIR, Tensor
from llmserve.errors import ConfigError

_TEXTS = frozenset({TEXT_INPUT.name, TEXT_PAIR.name, MESSAGES.name})
ModelConfig: TypeAlias = Any
"""Triton's ``ModelConfig`` message; its generated module is untyped."""

FILE = "config.pbtxt"


def new_config(name: str, *, backend: str, max_batch_size: int) -> ModelConfig:
    return pb.ModelConfig(name=name, backend=backend, max_batch_size=max_batch_size)


def add_inputs(config: ModelConfig, tensors: Iterable[Tensor]) -> None:
    """Declare inputs; without a batch dimension, ``text_input`` itself contains the prompts."""
    for tensor in tensors:
        field = config.input.add(
            name=tensor.name,
            data_type=pb.DataType.Value(tensor.data_type),
            dims=_dims(tensor, config, per_prompt=tensor.name in _TEXTS),
        )
        if tensor.optional:
            field.optional = True
        if tensor.ragged and config.max_batch_size:
            # Requests with lists of different lengths can share a batch.
            field.allow_ragged_batch = True


def add_outputs(config: ModelConfig, tensors: Iterable[Tensor]) -> None:
    """Declare outputs; each has one element per prompt."""
    for tensor in tensors:
        config.output.add(
            name=tensor.name,
            data_type=pb.DataType.Value(tensor.data_type),
            dims=_dims(tensor, config, per_prompt=True),
        )


def set_parameters(config: ModelConfig, values: dict[str, str]) -> None:
    """Set string parameters, which clients can read from a running server."""
    for key, value in values.items():
        config.parameters[key].string_value = value


def to_text(config: ModelConfig) -> str:
    """Serialize a configuration, and verify that parsing the text restores it."""
    text = str(text_format.MessageToString(config))
    if parse(text, where=config.name) != config:
        raise ConfigError(f"the configuration of {config.name} does not survive serialization")
    return text


def parse(text: str, *, where: str) -> ModelConfig:
    """Parse a ``config.pbtxt``; an error names the line."""
    config = pb.ModelConfig()
    try:
        text_format.Parse(text, config)
    except text_format.ParseError as error:
        raise ConfigError(f"{where} is not a Triton configuration: {error}") from None
    return config


def read(folder: Path) -> ModelConfig:
    path = folder / FILE
    try:
        return parse(path.read_text(encoding="utf-8"), where=str(path))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from None


def backend_of(config: ModelConfig) -> str:
    # The old way to name a backend, as in pytorch_libtorch.
    return str(config.backend or config.platform.partition("_")[0])


def versions(model: Path) -> list[Path]:
    """Return the folders of a model's versions."""
    return [path for path in model.iterdir() if path.is_dir() and path.name.isdigit()]


def _dims(tensor: Tensor, config: ModelConfig, *, per_prompt: bool) -> list[int]:
    if tensor.vector and not config.max_batch_size:
        return [-1, *tensor.dims]
    if per_prompt and not config.max_batch_size:
        return [-1, *tensor.dims[1:]]
    return list(tensor.dims)
