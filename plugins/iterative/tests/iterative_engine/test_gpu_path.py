"""What a GPU would run, on the CPU: recorded passes that are only repeated, and its kernel by hand.

The kernel is replaced by a reference of what its documentation says. Nothing here has seen a GPU.
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
    most_queries: int,
    most_keys: int,
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
        assert count <= most_queries
        assert length <= most_keys
        own = [part[block_table[row].long()].flatten(0, 1)[:length] for part in (keys, values)]
        own = [part.repeat_interleave(query.shape[1] // part.shape[1], 1) for part in own]
        scores = torch.einsum("qhd,khd->hqk", query[start:stop], own[0]) * scale
        at = torch.arange(length - count, length)[:, None]
        seen = torch.arange(length)
        hidden = seen > at
        if window_size[0] >= 0:
            hidden |= seen < at - window_size[0]
        weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)
        out[start:stop] = torch.einsum("hqk,khd->qhd", weights, own[1])
    return out


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Let the path for GPUs run here; return how often a pass was recorded and played."""
    counts = [0, 0]

    def record(run: Callable[[], torch.Tensor]) -> Callable[[], torch.Tensor]:
        counts[0] += 1
        memory = run()

        def play() -> torch.Tensor:
            counts[1] += 1
            # A graph writes to the memory that it was recorded with.
            return memory.copy_(run())

        return play

    monkeypatch.setattr(attention, "varlen_attn", reference_kernel)
    monkeypatch.setattr(attention.FlashPlan, "page_size", 16)
    monkeypatch.setattr(graphs, "_record", record)
    return counts


@pytest.mark.parametrize("family", ["gpt2", "qwen2", "mistral"])
@pytest.mark.parametrize("with_graphs", [True, False])
def test_it_makes_what_generate_makes(
    family: str, with_graphs: bool, recorded: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make_model(family)
    made = runner.FlatRunner(attention.FlashPlan, model, 24 * 16, graphs=with_graphs)
    monkeypatch.setattr("llmserve_iterative.engine.engine.make_runner", lambda *_: made)
    engine = Engine(model, ByteTokenizer(), max_sequences=11, cache_tokens=0, prefill_chunk=24)
    several = [generation([(7 * n + i) % VOCAB for i in range(3 * n + 1)], 24) for n in range(12)]
    for one in several:
        engine.admit(one)
        engine.step()
    finish(engine)
    assert all(same_as_alone(family, one) for one in several)
    assert (recorded[1] > recorded[0] > 0) == with_graphs
    assert recorded[0] <= 15, "a pass is recorded for few sizes"
