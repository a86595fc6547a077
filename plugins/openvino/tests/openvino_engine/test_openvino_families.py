"""Families of models, converted in process: the tokens of the original, whatever runs together."""

from __future__ import annotations

import random
from collections.abc import Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any

import numpy as np
import openvino
import pytest
import torch
import transformers

from llmserve.graphs import StoredWeights, parts
from llmserve.plugin import IncompatibleError, UnservedError
from llmserve.runtime import (
    ArrayLogits,
    Chunk,
    Engine,
    PageFiles,
    Runner,
    StatePageRunner,
    StateRunner,
    WarmPages,
    run_batch,
)
from llmserve.runtime.causal import off_by, scores
from llmserve.testing import ByteTokenizer
from llmserve.testing.fake import generation
from llmserve.testing.needs import read_size
from llmserve.testing.tiny_models import VOCAB, make_model, with_cache_called
from llmserve_openvino.compare import difference
from llmserve_openvino.passes import PAGE_SIZE
from llmserve_openvino.runner import make_runner
from llmserve_openvino.trace import convert
from llmserve_openvino.trial import Trial, try_small

# Tracing warns of what the comparison with the original would show.
pytestmark = pytest.mark.filterwarnings("ignore")
FAMILIES = ("falcon", "gemma", "gpt2", "gpt_neox", "llama", "opt", "phi3", "qwen2", "qwen3")
EXACT = {"INFERENCE_PRECISION_HINT": "f32", "KV_CACHE_PRECISION": "f32"}
PARAMS: list[dict[str, Any]] = [
    {},
    {"temperature": 1.3, "seed": 5},
    {"temperature": 0.9, "top_p": 0.8, "seed": 6, "logprobs": 2},
    {"repetition_penalty": 1.4, "logit_bias": {7: 2.0}},
    {"prompt_logprobs": 1, "min_tokens": 3},
    {"frequency_penalty": 0.7, "temperature": 0.7, "seed": 9},
]


class WholeTexts:
    """A runner that computes every sequence from its beginning with the original model."""

    page_size, page_count, accepts_runs = PAGE_SIZE, 64, True

    def __init__(self, model: Any) -> None:
        self._model = model
        self._ids = np.zeros((self.page_count, self.page_size), np.int64)

    def run(self, chunks: Sequence[Chunk]) -> ArrayLogits:
        rows = []
        for chunk in chunks:
            for position, token in enumerate(chunk.ids, chunk.start):
                page = chunk.pages[position // self.page_size]
                self._ids[page, position % self.page_size] = token
            ids = torch.tensor(self._ids[chunk.pages].reshape(1, -1)[:, : chunk.stop])
            with torch.inference_mode():
                logits = self._model(input_ids=ids).logits[0].numpy()
            rows += list(logits[len(logits) - chunk.rows :])
        return ArrayLogits(np.array(rows, np.float32).reshape(-1, VOCAB))


def answers(runner: Runner, seed: int) -> list[tuple[list[int], list[float]]]:
    """Return the tokens and log-probabilities of requests that arrive one after another."""
    rng = random.Random(seed)
    engine = Engine(runner, ByteTokenizer(), max_sequences=4, prefill_chunk=20)
    beginning = [rng.randrange(VOCAB) for _ in range(40)]
    requests = []
    for number, params in enumerate(PARAMS):
        own = [rng.randrange(VOCAB) for _ in range(rng.randrange(1, 30))]
        requests.append(generation([*beginning, *own] if number % 2 else own, 12, **params))
        engine.admit(requests[-1])
        assert not engine.step().failed
    while engine.busy:
        assert not engine.step().failed
    return [
        (
            request.token_ids,
            [one.value for one in (*request.logprobs, *request.prompt_logprobs[1:])],
        )
        for request in requests
    ]


# Beyond every window, beside others, and to more than one expert.
_SIZES: dict[str, Any] = {
    "hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
    "intermediate_size": 48, "moe_intermediate_size": 32, "num_hidden_layers": 4,
    "sliding_window": 16, "num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2,
    "max_position_embeddings": 256,
}  # fmt: skip
# They compute their attention themselves: with slopes, with windows, with a scale of their own.
OWN: dict[str, dict[str, Any]] = {
    "bloom": {"n_head": 6, "n_layer": 2, "hidden_size": 48},
    "gpt_neo": {
        "num_layers": 2, "attention_types": [[["global", "local"], 1]], "num_heads": 4,
        "window_size": 16,
    },
    "gptj": {"n_embd": 32, "n_head": 4, "n_layer": 2, "rotary_dim": 4, "n_positions": 256},
    "codegen": {"n_embd": 32, "n_head": 4, "n_layer": 2, "rotary_dim": 4, "n_positions": 256},
    "mpt": {"d_model": 32, "n_heads": 4, "n_layers": 2, "max_seq_len": 256},
    "xglm": {"d_model": 32, "attention_heads": 4, "num_layers": 2, "ffn_dim": 48},
}  # fmt: skip
_MAMBA2: dict[str, Any] = {
    "mamba_n_heads": 4,
    "mamba_d_head": 16,
    "mamba_d_state": 8,
    "mamba_n_groups": 2,
    "mamba_chunk_size": 8,
}
# They keep a state for each sequence, in layers of all kinds that OpenVINO has an operation for.
STATES: dict[str, dict[str, Any]] = {
    "lfm2": {"layer_types": ["conv", "full_attention"] * 2, "block_ff_dim": 48},
    "qwen3_next": {
        "layer_types": ["linear_attention", "full_attention"] * 2, "linear_num_key_heads": 2,
        "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 16,
        "shared_expert_intermediate_size": 32,
    },
    "granitemoehybrid": {
        **_MAMBA2, "layer_types": ["linear_attention", "full_attention"] * 2,
        "shared_intermediate_size": 32,
    },
    "mamba": {"state_size": 8, "time_step_rank": 4},
    "zamba": {
        "attn_layer_period": 2, "attn_layer_offset": 1, "n_mamba_heads": 2, "mamba_d_state": 4,
        "mamba_dt_rank": 4, "attention_head_dim": 16, "attention_hidden_size": 64,
        "num_hidden_layers": 6,
    },
}  # fmt: skip
OTHERS: dict[str, dict[str, Any]] = {
    "gemma3_text": {"layer_types": ["sliding_attention", "full_attention"] * 2},
    "gpt_oss": {"layer_types": ["sliding_attention", "full_attention"] * 2},
    # Caps that most of its scores reach.
    "gemma2": {
        "layer_types": ["sliding_attention", "full_attention"] * 2, "attn_logit_softcapping": 2.0,
        "final_logit_softcapping": 8.0, "query_pre_attn_scalar": 8,
    },
    "vaultgemma": {
        "layer_types": ["sliding_attention", "full_attention"] * 2, "attn_logit_softcapping": 2.0,
        "query_pre_attn_scalar": 8,
    },
    "mistral": {}, "qwen3_moe": {}, "mixtral": {},
    "dbrx": {
        "d_model": 32, "n_heads": 4, "n_layers": 2, "max_seq_len": 256,
        "attn_config": {"kv_n_heads": 2, "clip_qkv": 8, "rope_theta": 1e4},
        "ffn_config": {"ffn_hidden_size": 48, "moe_num_experts": 4, "moe_top_k": 2},
    },
    "gemma3n_text": {
        "layer_types": ["sliding_attention", "full_attention"] * 2, "num_kv_shared_layers": 2,
        "activation_sparsity_pattern": [0.9, 0.9, 0.0, 0.0], "laurel_rank": 8,
        "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": VOCAB,
        "intermediate_size": [48] * 4,
    },
    "deepseek_v3": {
        "kv_lora_rank": 16, "q_lora_rank": 24, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8,
        "v_head_dim": 4, "n_routed_experts": 4, "n_group": 2, "topk_group": 1, "head_dim": 8,
        "num_key_value_heads": 4, "first_k_dense_replace": 1, "num_attention_heads": 4,
    },
    **OWN,
    **STATES,
}  # fmt: skip


def other_model(family: str) -> Any:
    """Return a random model of a family that is not among the small models of all tests."""
    kind = transformers.CONFIG_MAPPING[family]
    known = kind().to_dict()
    sizes = {name: value for name, value in _SIZES.items() if name in known}
    config = kind(**{**sizes, **OTHERS[family], "vocab_size": VOCAB, "pad_token_id": 0})
    torch.manual_seed(3)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    for parameter in model.parameters():
        if parameter.ndim > 1:
            parameter.data.mul_(6)
    return model.requires_grad_(False)


@pytest.mark.parametrize("family", ["bloom", "gpt_neo", "lfm2", "gemma2"])
def test_what_is_told_to_openvino_is_in_the_file(family: str, tmp_path: Path) -> None:
    model = other_model(family)
    openvino.save_model(convert(own := deepcopy(model), StoredWeights(own)), tmp_path / "model.xml")
    runner = make_runner(tmp_path / "model.xml", EXACT, cache_tokens=64 * PAGE_SIZE, sequences=4)
    for found, expected in zip(answers(runner, 4), answers(WholeTexts(model), 4), strict=True):
        assert found[0] == expected[0]


def test_a_capped_model_generates_as_the_original_does() -> None:
    """Longer than its windows, in pieces, and beside others that began before."""
    model = other_model("gemma2")
    uncapped = other_model("gemma2")
    for layer in uncapped.model.layers:
        layer.self_attn.attn_logit_softcapping = None
    rng = random.Random(8)
    prompts = [[rng.randrange(3, VOCAB) for _ in range(length)] for length in (70, 9, 45, 100)]
    expected, others = (
        [
            each.generate(
                torch.tensor([ids]), max_new_tokens=20, min_new_tokens=20, do_sample=False
            )[0, len(ids) :].tolist()
            for ids in prompts
        ]
        for each in (model, uncapped)
    )
    assert expected != others
    converted = convert(other := deepcopy(model), StoredWeights(other))
    for chunk, sequences in ((16, 4), (100, 2)):
        runner = make_runner(converted, EXACT, cache_tokens=64 * PAGE_SIZE, sequences=4)
        engine = Engine(runner, ByteTokenizer(), max_sequences=sequences, prefill_chunk=chunk)
        found = [generation(ids, 20, min_tokens=20) for ids in prompts]
        for request in found:
            engine.admit(request)
            assert not engine.step().failed
        while engine.busy:
            assert not engine.step().failed
        assert [request.token_ids for request in found] == expected


def test_a_plan_counts_what_pages_have_of_a_latent(tmp_path: Path) -> None:
    """The keys and values of all heads, and not the latent that they are made from."""
    model = other_model("deepseek_v3")
    model.save_pretrained(tmp_path)
    size = read_size(tmp_path)
    assert size.of_heads
    converted = convert(model, StoredWeights(model))
    page = size.of_heads * PAGE_SIZE * 4
    for limit, pages in ((10 * page, 10), (10 * page - 1, 9)):
        runner = make_runner(converted, EXACT, cache_tokens=99, cache_bytes=limit, sequences=1)
        assert runner.page_count == pages


@pytest.mark.parametrize(("kind", "near"), [("f16", 0.02), ("bf16", 0.1), ("u8", None)])
def test_a_capped_model_has_its_cache_in_16_bits_but_not_in_8(
    kind: str, near: float | None
) -> None:
    model = other_model("gemma2")
    converted = convert(other := deepcopy(model), StoredWeights(other))
    properties = {**EXACT, "KV_CACHE_PRECISION": kind}
    if kind == "bf16":
        # It is computed in the cache's type; transformers' own answers are as far off in it.
        if "BF16" not in openvino.Core().get_property("CPU", "OPTIMIZATION_CAPABILITIES"):
            pytest.skip("this processor has no instructions for bfloat16")
        properties["INFERENCE_PRECISION_HINT"] = kind
    if near is None:
        with pytest.raises(IncompatibleError, match="cannot have its cache in 8 bits"):
            make_runner(converted, properties, cache_tokens=99, sequences=1)
        return
    text = list(range(60))
    runner = make_runner(converted, properties, cache_tokens=99, sequences=1)
    with torch.inference_mode():
        expected = model(input_ids=torch.tensor([text])).logits[0]
    assert off_by(scores(runner, [text])[0], expected) < near


def test_caps_of_a_model_that_attends_itself_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also those that are far from most of its scores."""
    model = other_model("gptj")

    def attend(own: Any, query: Any, key: Any, value: Any, mask: Any = None) -> Any:
        scores = 50 * torch.tanh(query @ key.transpose(-1, -2) / own.scale_attn / 50)
        shares = (scores if mask is None else scores + mask).softmax(-1)
        return shares @ value, shares

    monkeypatch.setattr(type(model.transformer.h[0].attn), "_attn", attend)
    with pytest.raises(UnservedError, match="caps its attention scores"):
        convert(model, StoredWeights(model))


# All sequences of the test are within the original length, where a build ends the context.
_ROPE = {"rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 90}
LONGROPE = {
    "rope_parameters": {**_ROPE, "short_factor": [1.0] * 4, "long_factor": [2.0] * 4},
    "original_max_position_embeddings": 90,
}


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        *((family, {}) for family in FAMILIES),
        *(pytest.param(family, {}, marks=pytest.mark.long) for family in OTHERS),
        pytest.param("phi3", LONGROPE, id="longrope"),
    ],
)
def test_its_answers_are_those_of_the_original(family: str, changes: dict[str, Any]) -> None:
    model = other_model(family) if family in OTHERS else make_model(family, **changes)
    converted = convert(other := deepcopy(model), StoredWeights(other))
    sizes = {"cache_tokens": 64 * PAGE_SIZE, "sequences": 4, "copies_bytes": 1 << 20}
    runner = make_runner(converted, EXACT, **sizes)
    for found, expected in zip(answers(runner, 3), answers(WholeTexts(model), 3), strict=True):
        assert found[0] == expected[0]
        assert found[1] == pytest.approx(expected[1], abs=1e-3)


@pytest.mark.parametrize("family", ["llama", "mamba"])
@pytest.mark.parametrize("name", ["cache", "past_key_values"])
def test_a_model_may_call_its_cache_as_another_version_of_transformers_does(
    family: str, name: str
) -> None:
    model = with_cache_called(make_model(family), name)
    converted = convert(model, stored := StoredWeights(model))
    assert difference(model, stored, converted, lengths=(40, 20)) < 1e-3


@pytest.mark.parametrize(
    "family",
    ["lfm2", *(pytest.param(name, marks=pytest.mark.long) for name in STATES if name != "lfm2")],
)
def test_prompts_that_begin_alike_share_states(family: str) -> None:
    model = other_model(family)
    graph = convert(other := deepcopy(model), StoredWeights(other))
    beginning = [random.Random(5).randrange(VOCAB) for _ in range(2 * PAGE_SIZE + 6)]
    prompts = [[*beginning, *own] for own in ([1], [5, 6, 7], [9] * 10, [2, 3])]
    expected = [generation(prompt, 12) for prompt in prompts]
    run_batch(Engine(WholeTexts(model), ByteTokenizer(), max_sequences=4), expected)
    plenty = make_runner(graph, EXACT, cache_tokens=999, sequences=2, copies_bytes=1 << 20)
    assert isinstance(plenty, StateRunner)
    assert plenty.most_copies > len(prompts)
    one = make_runner(
        graph, EXACT, cache_tokens=999, sequences=2,
        copies_bytes=(1 << 20) // plenty.most_copies,
    )  # fmt: skip
    assert isinstance(one, StateRunner)
    assert one.most_copies == 1
    for runner in (plenty, one):
        engine = Engine(runner, ByteTokenizer(), max_sequences=2, prefill_chunk=PAGE_SIZE)
        found = [generation(prompt, 12) for prompt in prompts]
        # One by one, so that the first is read before the next begins; then all at once.
        # Answers are too short to take the place of the one copy.
        for request in found:
            run_batch(engine, [request])
        again = [generation(prompt, 12) for prompt in prompts]
        run_batch(engine, again)
        for each in (found, again):
            assert [r.token_ids for r in each] == [r.token_ids for r in expected]
        assert found[0].cached_tokens == 0
        assert found[-1].cached_tokens == 2 * PAGE_SIZE


@pytest.mark.parametrize(
    "family",
    ["lfm2", *(pytest.param(name, marks=pytest.mark.long) for name in STATES if name != "lfm2")],
)
def test_states_are_read_from_disk_after_a_restart(family: str, tmp_path: Path) -> None:
    model = other_model(family)
    graph = convert(other := deepcopy(model), StoredWeights(other))
    beginning = [random.Random(5).randrange(VOCAB) for _ in range(2 * PAGE_SIZE + 6)]
    found = []
    for own in ([1], [1], [5, 6, 7]):
        expected = generation([*beginning, *own], 12)
        run_batch(Engine(WholeTexts(model), ByteTokenizer(), max_sequences=1), [expected])
        runner = make_runner(graph, EXACT, cache_tokens=999, sequences=2, copies_bytes=1 << 20)
        assert isinstance(runner, StatePageRunner)
        assert runner.page_form
        warm = WarmPages(runner, PageFiles(tmp_path / "pages", 100_000_000), b"model", family)
        engine = Engine(runner, ByteTokenizer(), max_sequences=2, warm=warm)
        run_batch(engine, [request := generation([*beginning, *own], 12)])
        engine.close()
        assert request.token_ids == expected.token_ids
        found.append((request.cached_tokens, engine.warm_tokens))
    assert found == [(0, 0), (2 * PAGE_SIZE,) * 2, (2 * PAGE_SIZE,) * 2]


@pytest.mark.parametrize("family", FAMILIES)
def test_a_large_model_is_compared_layer_by_layer(family: str) -> None:
    model = make_model(family)
    original = deepcopy(model)
    stored = StoredWeights(model.to(torch.bfloat16))
    layers = original.config.num_hidden_layers
    found = [difference(model, stored, convert(model, stored)) for _ in parts(model, stored, 1)]
    assert len(found) == layers > 1
    assert max(found) < 1e-3
    # Afterwards it is whole again, and computes what it computed.
    ids = torch.arange(20)[None]
    with torch.inference_mode(), stored.computing():
        logits = model(input_ids=ids).logits
        expected = original.to(torch.bfloat16).float()(input_ids=ids).logits
    torch.testing.assert_close(logits, expected, atol=1e-3, rtol=0)


@pytest.mark.long
@pytest.mark.parametrize(
    ("config", "served"),
    [
        (transformers.Gemma3TextConfig(), None),
        (transformers.Gemma2Config(), None),
        (transformers.DeepseekV3Config(), None),
        (transformers.GptOssConfig(), None),
        # Its router's weights are read without their module, and some experts have none.
        (transformers.LongcatFlashConfig(), None),
        (transformers.Llama4TextConfig(), 8192),
    ],
    ids=lambda value: getattr(value, "model_type", value),
)
def test_a_small_model_shows_how_far_a_kind_is_exact(config: Any, served: int | None) -> None:
    assert try_small(config) == Trial(served, is_done=True)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (transformers.RwkvConfig(hidden_size=32, num_hidden_layers=2), "keep a state"),
        (transformers.OpenAIGPTConfig(), "no cache of keys and values"),
        (transformers.CpmAntConfig(), "more to its attention scores"),
        (transformers.FalconConfig(alibi=True), "ALiBi in a mask of its own"),
        (transformers.MiniMaxConfig(), "keep a state"),
        (transformers.KimiLinearConfig(), "keep a state"),
        (transformers.xLSTMConfig(), "keep a state"),
        (transformers.RecurrentGemmaConfig(), "keep a state"),
        (transformers.JetMoeConfig(), "sorts tokens by their experts"),
        (transformers.GPTNeoXJapaneseConfig(), "attention of a kind that OpenVINO cannot read"),
        (transformers.DogeConfig(), "cannot read: DogeAttention"),
        # Computed, it would write beyond its memory.
        (
            transformers.LagunaConfig(num_attention_heads_per_layer=[48, 64] * 20),
            "different numbers of heads",
        ),
    ],
    ids=lambda value: getattr(value, "model_type", "part"),
)
def test_a_small_model_shows_what_cannot_be_computed(config: Any, words: str) -> None:
    with pytest.raises(UnservedError, match=words):
        try_small(config)
