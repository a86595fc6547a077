"""The GPU path on the CPU: recorded passes are only repeated, and the kernel is replaced."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from llmserve.runtime import Engine
from llmserve.testing import ByteTokenizer, generation
from llmserve.testing.tiny_models import VOCAB, make_model
from llmserve_iterative import attention, runner
from llmserve_iterative.on_cpu import replaced

from .families import finish, same_as_alone


@pytest.fixture
def recorded() -> Iterator[list[int]]:
    with replaced() as counts:
        yield counts


@pytest.mark.parametrize("family", ["gpt2", "qwen2", "mistral"])
@pytest.mark.parametrize("with_graphs", [True, False])
def test_it_generates_the_tokens_of_generate(
    family: str, with_graphs: bool, recorded: list[int]
) -> None:
    model = make_model(family)
    flat = runner.FlatRunner(attention.FlashPlan, model, 24 * 16, graphs=with_graphs)
    engine = Engine(flat, ByteTokenizer(), max_sequences=11, prefill_chunk=24)
    requests = [generation([(7 * n + i) % VOCAB for i in range(3 * n + 1)], 24) for n in range(12)]
    for request in requests:
        engine.admit(request)
        engine.step()
    finish(engine)
    assert all(same_as_alone(family, request) for request in requests)
    assert (recorded[1] > recorded[0] > 0) == with_graphs
    assert recorded[0] <= 15, "passes are recorded for only a few sizes"
