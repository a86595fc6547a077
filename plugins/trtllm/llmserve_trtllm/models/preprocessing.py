"""The model ``preprocessing``: text to ids, wishes to the engine's words."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from llmserve.modelconfig import ModelConfig
from llmserve_trtllm.models.common import on_cpu, put_rows, queue, shared_settings
from llmserve_trtllm.models.target import Target
from llmserve_trtllm.tables import client
from llmserve_trtllm.tables.row import Row

RUNTIME = "llmserve_trtllm.runtime.preprocessing:Preprocessing"


def taken(target: Target) -> list[Row]:
    """Return what preprocessing takes of a client, under the client's names."""
    return [*target.text, *target.wishes, *target.bias, *client.OURS, client.STREAM]


def passed_on(target: Target) -> list[Row]:
    """Return what it hands on to a decoupled engine, which alone can act on it."""
    has = {row.name for row in target.engine_inputs}
    rows = (client.STREAM, client.EXCLUDE) if target.streams else ()
    return [row for row in rows if client.engine_name(row.name) in has]


def made(target: Target) -> list[Row]:
    """Return what it makes."""
    wishes = [
        replace(row, name=client.made_name(row.name), optional=False)
        for row in (*target.wishes, *passed_on(target))
    ]
    return [*target.read, *wishes, *([] if target.streams else [client.REQUEST])]


def configure_preprocessing(config: ModelConfig, target: Target) -> dict[str, Any]:
    """Fill in the configuration and return the stage's settings."""
    rows = taken(target)
    inside = [replace(row, name=client.read_name(row.name)) for row in rows]
    put_rows(config, inside, made(target))
    queue(config, target)
    on_cpu(config, int(target.options["preprocessing_instance_count"]))
    return {
        **shared_settings(target),
        "names": {client.read_name(row.name): row.name for row in rows},
        "kinds": {row.name: row.kind for row in made(target)},
    }
