"""The model ``postprocessing``: ids to text, and what there is to say of it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from llmserve.modelconfig import ModelConfig
from llmserve.runtime.contract import Tensor
from llmserve_trtllm.models.common import on_cpu, put_rows, row_of
from llmserve_trtllm.models.target import Target
from llmserve_trtllm.tables import client
from llmserve_trtllm.tables.row import Row

RUNTIME = "llmserve_trtllm.runtime.postprocessing:Postprocessing"


def told(target: Target, formatted: Iterable[Tensor]) -> list[Row]:
    """Return what the formatter says beside the text, under the client's names.

    Of a piece of a stream there is nothing to say: it is not known which request it is of.
    """
    if target.streams:
        return []
    return [row_of(tensor) for tensor in formatted if tensor.name != "text_output"]


def configure_postprocessing(
    config: ModelConfig, target: Target, formatted: Iterable[Tensor]
) -> dict[str, Any]:
    """Fill in the configuration and return the stage's settings."""
    inputs = [*target.write, *([] if target.streams else [client.REQUEST])]
    others = [replace(row, name=row.name.upper()) for row in told(target, formatted)]
    put_rows(config, inputs, [*target.written, *others])
    config.dynamic_batching.SetInParent()
    on_cpu(config, int(target.options["postprocessing_instance_count"]))
    return {"engine_echoes": target.engine_echoes, "nested": target.is_first}
