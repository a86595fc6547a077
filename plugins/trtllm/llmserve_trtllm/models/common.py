"""What several of the configurations share."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from tritonclient.grpc import model_config_pb2 as pb

from llmserve.modelconfig import ModelConfig
from llmserve.runtime.contract import Tensor
from llmserve_trtllm.models.target import Target
from llmserve_trtllm.tables.row import Row


def put_rows(config: ModelConfig, inputs: Iterable[Row], outputs: Iterable[Row]) -> None:
    """Declare a model's tensors."""
    for row in inputs:
        row.put(config.input, inputs=True)
    for row in outputs:
        row.put(config.output, inputs=False)


def on_cpu(config: ModelConfig, count: int = 1) -> None:
    """Run a model without a GPU of its own, so many times."""
    config.instance_group.add(count=count, kind=pb.ModelInstanceGroup.KIND_CPU)


def queue(config: ModelConfig, target: Target) -> None:
    """Say how requests wait, as the version's template does."""
    batching = config.dynamic_batching
    batching.SetInParent()
    if target.is_first:
        return
    batching.preferred_batch_size.append(config.max_batch_size)
    delay = int(target.options["max_queue_delay_microseconds"])
    batching.max_queue_delay_microseconds = delay
    batching.default_queue_policy.SetInParent()
    batching.default_queue_policy.max_queue_size = int(target.options["max_queue_size"])


def row_of(tensor: Tensor) -> Row:
    """Return a tensor of the contract as a row."""
    return Row(
        tensor.name,
        tensor.data_type.removeprefix("TYPE_"),
        tuple(tensor.dims),
        optional=tensor.optional,
        ragged=tensor.ragged,
    )


def no_end(target: Target) -> int:
    """The id that no engine ever makes: what ``end_id`` is where nothing ends an answer."""
    return 2**32 - 1 if target.is_first else -1


def shared_settings(target: Target) -> dict[str, Any]:
    """Return what preprocessing and the orchestrator both have to know."""
    return {
        "wishes": {row.name: row.kind for row in target.wishes},
        "no_end": no_end(target),
        "streams": target.streams,
    }
