"""The GPU path on the CPU: recorded passes are only repeated, and the kernel is replaced.

The replacement implements what the kernel's documentation says. Nothing here has run on a GPU.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
import torch

from llmserve.testing import ByteTokenizer
from llmserve_iterative.engine import attention, graphs, runner
from llmserve_iterative.engine.engine import Engine
from tests.support import generation
from tests.tiny_models import VOCAB, make_model

from .families import finish, same_as_alone

CPU = torch.device("cpu")


def reference_kernel(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    query_starts: torch.Tensor,
    _key_starts: None,
    max_queries: int,
    max_keys: int,
    *,
    scale: float,
    window_size: tuple[int, int],
    enable_gqa: bool,
    seqused_k: torch.Tensor,
    block_table: torch.Tensor,
) -> torch.Tensor:
    """Do what ``torch.nn.attention.varlen.varlen_attn`` is documented to do."""
    assert keys.is_contiguous()
    assert window_size[1] == 0
    assert enable_gqa == (query.shape[1] != keys.shape[2])
    assert {t.dtype for t in (query_starts, seqused_k, block_table)} == {torch.int32}
    out = torch.empty_like(query)
    for row, (start, stop) in enumerate(itertools.pairwise(query_starts)):
        length, count = int(seqused_k[row]), int(stop - start)
        assert count <= max_queries
        assert length <= max_keys
        own = [part[block_table[row].long()].flatten(0, 1)[:length] for part in (keys, values)]
        own = [part.repeat_interleave(query.shape[1] // part.shape[1], 1) for part in own]
        scores = torch.einsum("qhd,khd->hqk", query[start:stop], own[0]) * scale
        query_positions = torch.arange(length - count, length)[:, None]
        key_positions = torch.arange(length)
        hidden = key_positions > query_positions
        if window_size[0] >= 0:
            hidden |= key_positions < query_positions - window_size[0]
        weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)
        out[start:stop] = torch.einsum("hqk,khd->qhd", weights, own[1])
    return out


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Make the GPU path run here; return how often passes were recorded and replayed."""
    counts = [0, 0]

    def record(run: Callable[[], torch.Tensor]) -> Callable[[], torch.Tensor]:
        counts[0] += 1
        memory = run()

        def replay() -> torch.Tensor:
            counts[1] += 1
            # A graph writes to the memory that it was recorded with.
            return memory.copy_(run())

        return replay

    monkeypatch.setattr(attention, "varlen_attn", reference_kernel)
    monkeypatch.setattr(attention.FlashPlan, "page_size", 16)
    monkeypatch.setattr(graphs, "_record", record)
    return counts


@pytest.mark.parametrize("family", ["gpt2", "qwen2", "mistral"])
@pytest.mark.parametrize("with_graphs", [True, False])
def test_it_generates_the_tokens_of_generate(
    family: str, with_graphs: bool, recorded: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make_model(family)
    flat = runner.FlatRunner(attention.FlashPlan, model, 24 * 16, graphs=with_graphs)
    monkeypatch.setattr("llmserve_iterative.engine.engine.make_runner", lambda *_: flat)
    engine = Engine(model, ByteTokenizer(), max_sequences=11, cache_tokens=0, prefill_chunk=24)
    requests = [generation([(7 * n + i) % VOCAB for i in range(3 * n + 1)], 24) for n in range(12)]
    for request in requests:
        engine.admit(request)
        engine.step()
    finish(engine)
    assert all(same_as_alone(family, request) for request in requests)
    assert (recorded[1] > recorded[0] > 0) == with_graphs
    assert recorded[0] <= 15, "passes are recorded for only a few sizes"
