"""``exact_batches``: the scores of a sequence do not depend on what else is in its passes."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from llmserve.graphs import StoredWeights, WeightFormat, openvino, write
from llmserve.plugin import IncompatibleError
from llmserve.runtime import Chunk, Engine, Lora, LoraError, PromptLookup
from llmserve.testing import ByteTokenizer, fake
from llmserve.testing.tiny_models import VOCAB, make_model
from llmserve_openvino.exact import check_config, check_runner
from llmserve_openvino.importance import importance
from llmserve_openvino.passes import PAGE_SIZE, Pass
from llmserve_openvino.runner import OpenVinoRunner, make_runner
from llmserve_openvino.trace import convert

pytestmark = pytest.mark.filterwarnings("ignore")
SIZES: dict[str, Any] = {
    "hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 2,
    "num_key_value_heads": 1, "head_dim": 64,
}  # fmt: skip
COMPUTED = [
    ("fp32", "f32", 32), ("bf16", "bf16", 32), ("int8", "f32", 32), ("int8", "bf16", 32),
    ("int4", "bf16", 32), ("int4", "f32", 32),
]  # fmt: skip
if "BF16" not in openvino.Core().get_property("CPU", "OPTIMIZATION_CAPABILITIES"):
    COMPUTED = [each for each in COMPUTED if each[1] == "f32"]
PAGES = 12


@cache
def model(weights: str, family: str = "llama") -> Path:
    made = make_model(family, **(SIZES if family == "llama" else {})).requires_grad_(False)
    made.set_attn_implementation("sdpa")
    stored = StoredWeights(made)
    path = Path(mkdtemp(prefix="llmserve-exact-")) / "model.xml"
    important = importance(made, stored) if weights == "int4" else None
    write(convert(made, stored), path, WeightFormat(weights, 32), important)
    return path


@cache
def runner(weights: str, computed: str, group: int, *, exact: bool = True) -> OpenVinoRunner:
    properties = {
        "INFERENCE_PRECISION_HINT": computed,
        "KV_CACHE_PRECISION": computed,
        "DYNAMIC_QUANTIZATION_GROUP_SIZE": group,
        "INFERENCE_NUM_THREADS": 2,
    }
    tokens = PAGES * PAGE_SIZE
    return make_runner(model(weights), properties, cache_tokens=tokens, exact=exact)


class Text:
    """A sequence that is computed piece by piece, in pages of its own."""

    def __init__(self, ids: Sequence[int], pages: list[int]) -> None:
        self.ids, self.pages, self.rows = list(ids), pages, list[Any]()

    @property
    def left(self) -> int:
        return len(self.ids) - len(self.rows)

    def chunk(self, count: int) -> Chunk:
        start = len(self.rows)
        return Chunk(self.ids[start : start + count], start, self.pages, count)


def texts(pages: Sequence[int] = range(PAGES)) -> list[Text]:
    rng, free = random.Random(3), iter(pages)
    lengths = (70, 33, 64, 5)
    return [
        Text(
            [rng.randrange(VOCAB) for _ in range(length)],
            [next(free) for _ in range(-(-length // PAGE_SIZE))],
        )
        for length in lengths
    ]


def compute(runner: OpenVinoRunner, planned: Sequence[tuple[Text, int]]) -> None:
    """Compute the next tokens of some texts in a pass, and keep all scores."""
    chunks = [(text, text.chunk(count)) for text, count in planned]
    chunks.sort(key=lambda each: not each[1].single)
    logits, row = runner.run([chunk for _, chunk in chunks]), 0
    for text, chunk in chunks:
        text.rows += [logits.row(row + each).copy() for each in range(chunk.rows)]
        row += chunk.rows


@cache
def alone(weights: str, computed: str, group: int) -> list[Any]:
    """Return the scores of each text alone, in one piece."""
    found = texts()
    for text in found:
        compute(runner(weights, computed, group), [(text, text.left)])
    return [np.stack(text.rows) for text in found]


@pytest.mark.parametrize(("weights", "computed", "group"), COMPUTED)
@settings(max_examples=3, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.randoms(use_true_random=False))
def test_any_mix_has_the_same_bits(
    weights: str, computed: str, group: int, rng: random.Random
) -> None:
    order = list(range(PAGES))
    rng.shuffle(order)
    found = texts(order)
    while waiting := [text for text in found if text.left]:
        some = rng.sample(waiting, rng.randint(1, len(waiting)))
        most = rng.choice([1, 1, 3, 40])
        compute(
            runner(weights, computed, group),
            [(text, rng.randint(1, min(most, text.left))) for text in some],
        )
    for text, expected in zip(found, alone(weights, computed, group), strict=True):
        np.testing.assert_array_equal(np.stack(text.rows), expected)


def test_without_it_a_score_depends_on_the_others() -> None:
    found = []
    for others in (0, 3):
        first, *rest = texts()
        plain = runner("int8", "f32", 32, exact=False)
        compute(plain, [(first, 60)])
        while first.left:
            compute(plain, [(text, 1) for text in (first, *rest[:others]) if text.left])
        found.append(np.stack(first.rows))
    assert not np.array_equal(*found)
    with pytest.raises(IncompatibleError, match="differently in other company"):
        check_runner(plain, VOCAB)


def answers(arrivals: Iterator[int], **options: Any) -> tuple[list[Any], int]:
    """Return the tokens of requests that come before these steps, with log-probabilities, and how
    many more were guessed."""
    engine = Engine(runner("int8", "f32", 32), ByteTokenizer(), **options)
    rng = random.Random(7)
    beginning = [rng.randrange(VOCAB) for _ in range(40)]
    prompts = [[*beginning, *range(n)] for n in (1, 2, 9, 30)]
    requests = [
        fake.generation(prompt, 40, decode=lambda ids: "x" * len(ids), logprobs=2)
        for prompt in prompts
    ]
    for request, steps in zip(requests, arrivals, strict=False):
        engine.admit(request)
        for _ in range(steps):
            assert not engine.step().failed
    while engine.busy:
        assert not engine.step().failed
    found = [(request.token_ids, request.logprobs) for request in requests]
    return found, engine.guessed_tokens


def test_an_engine_answers_the_same_in_any_order_of_arrival(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Shared pages, pieces of prompts, guesses, and pages that are lost and computed again."""
    monkeypatch.setattr("llmserve.runtime.engine.guessing.Price.of_guess", lambda *_: 0.2)
    expected, _ = answers(iter([50] * 4), max_sequences=1, share_prefixes=False)
    for seed in range(4):
        rng = random.Random(seed)
        arrivals = iter([rng.randrange(20) for _ in range(4)])
        found, guessed = answers(
            arrivals,
            max_sequences=4,
            prefill_chunk=rng.choice([1, 7, 64]),
            guesser=PromptLookup(3) if seed % 2 else None,
        )
        assert found == expected
        # Whether an answer repeats anything is a matter of the processor's rounding.
        assert seed % 2 or not guessed


def test_a_single_token_has_two_rows_of_which_the_second_is_nobodys() -> None:
    chunks = [Chunk([5], 31, [3]), Chunk([6], 32, [4, 2]), Chunk([7, 8], 0, [1])]
    found = Pass(chunks, spare=9)
    assert found.rows == 3
    given = {name: values.tolist() for name, values in found.inputs.items()}
    assert given["input_ids"] == [5, 5, 6, 6, 7, 8]
    assert given["position_ids"] == [31, 31, 32, 32, 0, 1]
    assert given["llmserve_needed_rows"] == [0, 2, 5]
    assert given["block_indices"] == [3, 9, 4, 2, 1]
    assert given["block_indices_begins"] == [0, 2, 4, 5]
    assert given["max_context_len"] == 34
    # The product of the scores has two rows as well.
    assert Pass(chunks[2:], spare=9).inputs["llmserve_needed_rows"].tolist() == [1, 1]
    assert Pass(chunks[2:]).inputs["llmserve_needed_rows"].tolist() == [1]


@pytest.mark.parametrize(
    ("config", "options", "reason"),
    [
        ({"num_local_experts": 8}, {}, "mixture of experts"),
        ({}, {"kv_cache": "u8"}, "cache in 8 bits"),
        ({"ffn_config": {"moe_num_experts": 8}}, {}, "mixture of experts"),
        ({}, {"dynamic_quantization": 0}, "dynamic_quantization=0"),
        ({}, {"adapters": "a=b"}, "adapters"),
    ],
)
def test_what_cannot_be_exact_is_refused(
    config: dict[str, Any], options: dict[str, Any], reason: str
) -> None:
    plain = {"kv_cache": "auto", "adapters": "", "dynamic_quantization": 32, "dtype": "auto"}
    check_config({"num_experts_per_tok": 1}, plain, "m")
    check_config({}, {**plain, "dynamic_quantization": 0, "dtype": "float32"}, "m")
    with pytest.raises(IncompatibleError, match=reason):
        check_config(config, {**plain, **options}, "m")


def test_a_model_with_states_is_refused_and_so_are_adapters(tmp_path: Path) -> None:
    with pytest.raises(IncompatibleError, match="keeps a state"):
        make_runner(model("fp32", "lfm2"), {}, cache_tokens=64, exact=True)
    lora = Lora(tmp_path, 1, 1.0, {}, "")
    with pytest.raises(LoraError, match="exact_batches"):
        runner("fp32", "f32", 32).adapters.fits(lora)
