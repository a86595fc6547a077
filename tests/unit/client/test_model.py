from __future__ import annotations

from typing import Any

import pytest
from google.protobuf import text_format
from tritonclient.grpc import model_config_pb2

from llmserve.client.model import read_config

TEXT = """
    input { name: "text_input" data_type: TYPE_STRING dims: [1] }
    output { name: "text_output" data_type: TYPE_STRING dims: [1] }
"""
DECOUPLED = "model_transaction_policy { decoupled: true }"
OURS = 'parameters { key: "llmserve.exchange" value { string_value: "%s" } }'
OVERRIDE = "allow_timeout_override: true"
TIMEOUT = "default_timeout_microseconds: 5"


def config(text: str) -> Any:
    return text_format.Parse(f'name: "m" {text}', model_config_pb2.ModelConfig())


@pytest.mark.parametrize(
    ("text", "exchange"),
    [
        ("", "unary"),
        ("max_batch_size: 8 dynamic_batching { }", "unary"),
        (DECOUPLED, "stream"),
        ("sequence_batching { oldest { } }", "sequence"),
        ("sequence_batching { direct { } }", "sequence"),
        ("sequence_batching { iterative_sequence: true }", "unary"),
        (f"sequence_batching {{ iterative_sequence: true }} {DECOUPLED}", "stream"),
        (f"sequence_batching {{ oldest {{ }} }} {DECOUPLED}", "stream"),
        (f"{OURS % 'sequence'} {DECOUPLED}", "sequence"),
        (f"{OURS % 'stream'}", "stream"),
        (f"{OURS % 'unary'} {DECOUPLED}", "unary"),
        (f"{OURS % 'telepathy'} {DECOUPLED}", "stream"),
    ],
)
def test_the_config_decides_the_exchange(text: str, exchange: str) -> None:
    assert read_config(config(text + TEXT)).exchange == exchange


@pytest.mark.parametrize(
    ("text", "rows"),
    [
        ("max_batch_size: 8 input { name: 'text_input' dims: [1] }", 8),
        ("max_batch_size: 8 sequence_batching { } input { name: 'text_input' dims: [1] }", 1),
        ("input { name: 'text_input' dims: [-1] }", None),
        ("input { name: 'text_input' dims: [1] }", 1),
        ("", 1),
    ],
)
def test_how_many_prompts_fit_into_a_request(text: str, rows: int | None) -> None:
    assert read_config(config(text)).rows == rows


def test_the_config_names_the_llmserve_that_built_the_model() -> None:
    assert read_config(config(TEXT)).made_by_llmserve is None
    version = 'parameters { key: "llmserve.version" value { string_value: "0.1.0" } }'
    assert read_config(config(TEXT + version)).made_by_llmserve == "0.1.0"
    assert read_config(config(TEXT + OURS % "unary")).made_by_llmserve == "unknown"


@pytest.mark.parametrize(
    ("text", "allowed"),
    [
        ("dynamic_batching { }", False),
        ("dynamic_batching { default_queue_policy { allow_timeout_override: true } }", False),
        (f"dynamic_batching {{ default_queue_policy {{ {TIMEOUT} }} }}", False),
        (f"dynamic_batching {{ default_queue_policy {{ {TIMEOUT} {OVERRIDE} }} }}", True),
        (
            "dynamic_batching { priority_levels: 2 priority_queue_policy { key: 2 value { "
            f"{TIMEOUT} {OVERRIDE} }} }} }}",
            True,
        ),
        ("sequence_batching { oldest { } }", False),
    ],
)
def test_whether_a_request_may_set_its_own_queue_timeout(text: str, allowed: bool) -> None:
    assert read_config(config(text + TEXT)).queue_timeout == allowed
