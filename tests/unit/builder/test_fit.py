"""Whether a model fits is said before anything of it is read but headers."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from click.testing import CliRunner, Result
from safetensors.numpy import save_file

import llmserve
from llmserve.builder.fit import Left, fit_spec
from llmserve.builder.fit import needs_of as fit_needs
from llmserve.builder.plan import BuildSpec, make_plan
from llmserve.builder.size import size_of
from llmserve.builder.store import Store
from llmserve.errors import OutputError, PluginError, ShortageError
from llmserve.hardware import computes_in
from llmserve.plugins.registry import Registry
from llmserve.plugins.size import ModelSize, Needs
from llmserve.repository.needs import needs_of
from llmserve.repository.repository import Repository
from llmserve_cli.group import cli
from tests.gguf_files import write_model
from tests.loopback_hub import MODEL, Hub, point_to
from tests.support import edit_json

PLENTY = Left()
GB = 10**9


def sparse_llama(folder: Path, *, hidden: int, layers: int, context: int = 4096) -> Path:
    """Write a Llama whose weights take no space on the disk: a header, and nothing after it."""
    vocabulary, between = 32000, 3 * hidden
    shapes = {"model.embed_tokens.weight": (vocabulary, hidden), "model.norm.weight": (hidden,)}
    for layer in range(layers):
        prefix = f"model.layers.{layer}"
        shapes |= {f"{prefix}.self_attn.{name}_proj.weight": (hidden, hidden) for name in "qkvo"}
        shapes |= {f"{prefix}.mlp.{name}_proj.weight": (between, hidden) for name in ("up", "gate")}
        shapes[f"{prefix}.mlp.down_proj.weight"] = (hidden, between)
    shapes["lm_head.weight"] = (vocabulary, hidden)
    header: dict[str, Any] = {}
    end = 0
    for name, shape in shapes.items():
        size = 2 * (shape[0] * shape[1] if len(shape) == 2 else shape[0])
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [end, end + size]}
        end += size
    text = json.dumps(header).encode()
    folder.mkdir(parents=True)
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + end)
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "dtype": "bfloat16",
        "hidden_size": hidden, "intermediate_size": between, "num_hidden_layers": layers,
        "num_attention_heads": hidden // 128, "num_key_value_heads": 8, "head_dim": 128,
        "vocab_size": vocabulary, "max_position_embeddings": context,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture
def small(tmp_path: Path) -> Path:
    """Half a billion parameters."""
    return sparse_llama(tmp_path / "small", hidden=1024, layers=32)


@pytest.fixture
def halves(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the processor compute in 16 bits, as those of most servers do."""
    monkeypatch.setattr("llmserve.plugins.size.computes_in", lambda *_: True)


@pytest.fixture
def left(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a function that says what this machine has left."""

    def have(**values: float) -> None:
        monkeypatch.setattr(Left, "here", lambda _: replace(PLENTY, **values))

    return have


def fitted(model: Path, plugin: str, *, change: bool | None = False, **options: object) -> Any:
    said: list[str] = []
    spec = BuildSpec(plugin, str(model), options=options)
    return fit_spec(spec, Registry.load(), serves=True, change=change, report=said.append), said


def test_the_size_of_a_model_is_read_from_its_headers(small: Path) -> None:
    size = size_of(str(small))
    matrices = 32 * (4 + 3 * 3) * 1024**2
    assert size is not None
    assert size.parameters == matrices + 2 * 32000 * 1024 + 1024
    assert (size.dtype, size.ends, size.largest) == ("bfloat16", 2 * 32000 * 1024, 32000 * 1024)
    assert (size.layers, size.cache, size.context) == (32, 2 * 32 * 8 * 128, 4096)
    assert size.bytes == (small / "model.safetensors").stat().st_size


def test_weights_for_another_program_are_not_counted(small: Path) -> None:
    """Mistral's own programs read ``consolidated.safetensors``."""
    before = size_of(str(small))
    whole, other = small / "model.safetensors", small / "consolidated.safetensors"
    with whole.open("rb") as file:
        length = file.read(8)
        header = file.read(int.from_bytes(length, "little")).replace(b"model.", b"mine..")
    other.write_bytes(length + header)
    os.truncate(other, whole.stat().st_size)
    size = size_of(str(small))
    assert before is not None
    assert size == replace(before, bytes=2 * before.bytes)
    whole.rename(small / "model-00001-of-00001.safetensors")
    index = {"weight_map": {"lm_head.weight": "model-00001-of-00001.safetensors"}}
    (small / "model.safetensors.index.json").write_text(json.dumps(index))
    assert size_of(str(small)) == size


@pytest.mark.parametrize("plugin", ["openvino", "iterative"])
def test_a_draft_model_is_counted_with_its_model(small: Path, left: Any, plugin: str) -> None:
    left()
    alone = fitted(small, plugin)[0].needs
    both = fitted(small, plugin, draft_model=str(small))[0].needs
    assert both.weights == 2 * alone.weights
    assert both.cache == 2 * alone.cache
    assert both.disk == 2 * alone.disk
    # One is converted after the other, and both are served by one process.
    assert (both.build, both.process) == (alone.build, alone.process)


def test_the_size_of_a_draft_model_is_kept(small: Path) -> None:
    size = size_of(str(small))
    assert size is not None
    assert "draft" not in size.content()
    both = replace(size, draft=size)
    assert ModelSize.read(json.loads(json.dumps(both.content()))) == both


def write_adapter(folder: Path, *, rank: int = 16, modules: int = 32) -> Path:
    """Write an adapter of the queries of the small model, of 65,536 numbers a module."""
    weights: dict[str, Any] = {}
    for layer in range(modules):
        name = f"base_model.model.model.layers.{layer}.self_attn.q_proj"
        weights[f"{name}.lora_A.weight"] = np.ones((rank, 1024), np.float32)
        weights[f"{name}.lora_B.weight"] = np.ones((1024, rank), np.float32)
    folder.mkdir(parents=True)
    save_file(weights, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": rank}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


ADAPTER_BYTES = {
    # Of 16 bits: their own, and their place beside those of others.
    "hf": 2 * 2,
    "iterative": 2 * 2,
    "openvino": 2,
}
"""What a number of an adapter takes."""


@pytest.mark.parametrize("plugin", ADAPTER_BYTES)
def test_adapters_are_counted_within_their_budget(
    small: Path, left: Any, tmp_path: Path, plugin: str
) -> None:
    left()
    folder = write_adapter(tmp_path / "sql")
    each = ADAPTER_BYTES[plugin] * 16 * 2048 * 32
    fixed = 130_000 * 32 if plugin == "openvino" else 0
    alone = fitted(small, plugin, dtype="bfloat16")[0].needs
    assert alone.adapters == 0
    for count, megabytes, taken in ((1, 100, each), (3, 100, 3 * each), (3, 6, 6 * 10**6)):
        named = ",".join(f"a{number}={folder}" for number in range(count))
        options: dict[str, Any] = {
            "dtype": "bfloat16", "adapters": named, "adapter_mb": megabytes,
        }  # fmt: skip
        needs = fitted(small, plugin, **options)[0].needs
        # One is loaded whatever the budget.
        assert needs.adapters == max(taken, each) + fixed
        assert needs.served == alone.served + needs.adapters


def test_what_vllm_has_for_adapters_are_places_of_the_highest_rank(
    small: Path, left: Any, tmp_path: Path
) -> None:
    left()
    folder = write_adapter(tmp_path / "sql", rank=12)
    alone = fitted(small, "vllm")[0].needs
    needs = fitted(small, "vllm", adapters=f"sql={folder}")[0].needs
    assert needs.adapters == 2 * 8 * 16 * 2048 * 32
    assert needs.process - alone.process == 2 * 12 * 2048 * 32
    fewer = fitted(small, "vllm", adapters=f"sql={folder}", max_loras=2, max_lora_rank=32)[0].needs
    assert fewer.adapters == 2 * 2 * 32 * 2048 * 32


def test_a_model_that_fits_without_its_adapters_is_refused_with_them(
    small: Path, left: Any, tmp_path: Path
) -> None:
    left()
    folder = write_adapter(tmp_path / "sql")
    named = ",".join(f"a{number}={folder}" for number in range(300))
    alone = fitted(small, "iterative")[0].needs.served
    with_them = fitted(small, "iterative", adapters=named)[0].needs.served
    assert with_them - alone > 10**9
    left(free=(alone + with_them) / 2)
    fitted(small, "iterative")
    with pytest.raises(ShortageError, match=r"its adapters 1\.0 GB"):
        fitted(small, "iterative", adapters=named)


def test_an_adapter_that_came_to_a_built_model_is_counted(tmp_path: Path) -> None:
    llmserve.build("iterative", "demo", output=tmp_path, name="mine")

    def needs() -> Needs:
        found = needs_of(Repository.open(tmp_path).model("mine"), Registry.load())
        assert found is not None
        return found

    before = needs()
    assert before.adapters == 0
    adapters = tmp_path / "mine" / "1" / "adapters"
    write_adapter(adapters / "sql")
    # What is no adapter has no size, and is told where it is asked for.
    (adapters / "broken").mkdir()
    width = 4 if before.instead else 2
    assert needs().adapters == 2 * width * 16 * 2048 * 32
    assert needs().served == before.served + needs().adapters


def test_a_build_from_python_is_refused_as_the_command_refuses_it(
    small: Path, left: Any, tmp_path: Path
) -> None:
    left(free=10**6)
    for fit in (None, True):
        with pytest.raises(ShortageError, match=r"building it needs .* and 1 MB are free"):
            llmserve.build("openvino", str(small), output=tmp_path / "repository", fit=fit)
    assert not (tmp_path / "repository").exists()


def test_what_quantized_weights_take_is_not_known_of_other_methods(small: Path, left: Any) -> None:
    edit_json(small / "config.json", quantization_config={"quant_method": "bitsandbytes"})
    assert size_of(str(small)) is None
    left(free=0)
    choice, _ = fitted(small, "hf")
    assert choice.spec.options == {}


def quantised_llama(folder: Path, described: dict[str, Any], products: Any) -> Path:
    """Write a Llama whose products have tensors of these types and shapes, and no numbers."""
    sparse_llama(folder, hidden=1024, layers=32)
    file = folder / "model.safetensors"
    with file.open("rb") as stream:
        header = json.loads(stream.read(int.from_bytes(stream.read(8), "little")))
    sizes = {"I32": 4, "F16": 2, "BF16": 2, "I8": 1, "F8_E4M3": 1, "F32": 4}
    tensors: dict[str, Any] = {}
    for name, tensor in header.items():
        module = name.removesuffix(".weight")
        stored = {"weight": ("BF16", tensor["shape"])}
        if module.endswith("_proj"):
            stored = products(*tensor["shape"])
        tensors |= {f"{module}.{end}": each for end, each in stored.items()}
    content, end = {}, 0
    for name, (dtype, shape) in tensors.items():
        size = sizes[dtype] * prod(shape)
        content[name] = {"dtype": dtype, "shape": shape, "data_offsets": [end, end + size]}
        end += size
    text = json.dumps(content).encode()
    with file.open("wb") as stream:
        stream.write(len(text).to_bytes(8, "little") + text)
        stream.truncate(8 + len(text) + end)
    edit_json(folder / "config.json", quantization_config=described)
    return folder


def _gptq(rows: int, width: int) -> dict[str, Any]:
    return {
        "qweight": ("I32", (width // 8, rows)), "qzeros": ("I32", (width // 128, rows // 8)),
        "scales": ("F16", (width // 128, rows)), "g_idx": ("I32", (width,)),
    }  # fmt: skip


def _packed(rows: int, width: int) -> dict[str, Any]:
    return {"weight_packed": ("I32", (rows, width // 8)), "weight_scale": ("BF16", (rows, 1))}


def _float8(rows: int, width: int) -> dict[str, Any]:
    return {"weight": ("F8_E4M3", (rows, width)), "weight_scale_inv": ("F32", (1, 1))}


QUANTISED: dict[str, tuple[dict[str, Any], Any, float]] = {
    "gptq": ({"quant_method": "gptq", "bits": 4, "group_size": 128}, _gptq, 0.5 + 2.5 / 128),
    "w4a16": (
        {
            "quant_method": "compressed-tensors",
            "format": "pack-quantized",
            "config_groups": {"a": {"weights": {"num_bits": 4}}},
        },
        _packed,
        0.5,
    ),
    "fp8": ({"quant_method": "fp8", "weight_block_size": [1024, 3072]}, _float8, 1),
}


@pytest.mark.parametrize("kind", QUANTISED)
def test_a_quantised_checkpoint_takes_what_its_numbers_and_the_others_take(
    tmp_path: Path, left: Any, kind: str
) -> None:
    described, products, width = QUANTISED[kind]
    model = quantised_llama(tmp_path / "model", described, products)
    size = size_of(str(model))
    assert size is not None
    assert size.packed is not None
    packed, ends = 32 * (4 + 3 * 3) * 1024**2, 2 * 32000 * 1024
    assert (size.packed.parameters, size.parameters) == (packed, packed + ends + 1024)
    assert size.packed.bytes == pytest.approx(width * packed, rel=0.02)
    assert (size.dtype, size.ends, size.largest) == ("bfloat16", ends, ends // 2)
    assert ModelSize.read(json.loads(json.dumps(size.content()))) == size
    left()
    needs = {name: fitted(model, name)[0].needs for name in ("openvino", "vllm")}
    others = size.parameters - packed
    assert needs["vllm"].weights == size.packed.bytes + 2 * others
    # OpenVINO has no numbers of 8 bits with an exponent.
    kept = 2 * packed if kind == "fp8" else size.packed.bytes
    if group := described.get("group_size", 0):
        # Each has a scale of 32 bits and a zero point of 8; in the file it had 16 and 4.
        kept += packed // group * 20 / 8
    table = ends // 2
    if computes_in("bfloat16"):
        assert needs["openvino"].weights == pytest.approx(kept + 2 * (others - table), rel=0.01)
    assert needs["openvino"].mapped == pytest.approx(kept + 2 * others, rel=0.01)


def test_a_quantised_checkpoint_that_does_not_fit_is_refused(
    tmp_path: Path, left: Any, halves: None
) -> None:
    model = quantised_llama(tmp_path / "model", QUANTISED["gptq"][0], _gptq)
    left(free=0.5 * GB)
    with pytest.raises(ShortageError, match=r"serving it \(weights 302 MB"):
        fitted(model, "openvino")


def test_what_would_be_smaller_is_said_where_a_model_is_served(small: Path, left: Any) -> None:
    left(free=8 * GB)
    said = fitted(small, "openvino")[1]
    assert "of memory, and with --set weight_format=int8 " in said[-1]
    assert f"llmserve compare --model {small}" in said[-1]


@pytest.mark.parametrize(
    ("described", "openvino", "hf"),
    [
        ({"sliding_window": 4096}, 131072, 4096),
        ({"sliding_window": 4096, "use_sliding_window": False}, 131072, 131072),
        ({"sliding_window": 4096, "sliding_window_pattern": 4}, 131072, 4096 * 3 / 4 + 131072 / 4),
        (
            {
                "sliding_window": 4096,
                "layer_types": ["sliding_attention"] * 8 + ["full_attention"] * 24,
            },
            131072,
            4096 / 4 + 131072 * 3 / 4,
        ),
        (
            {"layer_types": ["linear_attention"] * 24 + ["full_attention"] * 8},
            131072 / 4,
            131072 / 4,
        ),
        (
            {
                "rope_scaling": {"type": "longrope"},
                "original_max_position_embeddings": 4096,
            },
            4096,
            131072,
        ),
    ],
)
def test_only_tokens_that_are_served_take_memory(
    tmp_path: Path, described: dict[str, Any], openvino: float, hf: float
) -> None:
    model = sparse_llama(tmp_path / "long", hidden=1024, layers=32, context=131072)
    edit_json(model / "config.json", **described)
    size, registry = size_of(str(model)), Registry.load()
    assert size is not None
    for plugin, tokens in (("openvino", openvino), ("hf", hf)):
        options = {"dtype": "float32", "device": "cpu"}
        plan = make_plan(BuildSpec(plugin, str(model), options=options), registry)
        needs = fit_needs(plan, size)
        assert needs is not None
        assert needs.cache == tokens * 2 * 32 * 8 * 128 * 4, plugin


_LATENT = {
    "kv_lora_rank": 512, "q_lora_rank": None, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64,
    "v_head_dim": 128, "num_key_value_heads": 8,
}  # fmt: skip


@pytest.mark.parametrize(
    ("described", "openvino", "hf"),
    [
        # transformers writes the width of a part of the heads.
        ({**_LATENT, "head_dim": 64}, 32 * 8 * (128 + 64 + 128), 32 * (512 + 64)),
        ({**_LATENT, "head_dim": None}, 32 * 8 * (128 + 64 + 128), 32 * (512 + 64)),
        # What a layer has is read in float32 beside the cache, and put in order.
        ({"attn_logit_softcapping": 50.0}, (32 + 2) * 2 * 8 * 128, 32 * 2 * 8 * 128),
        ({"attn_logit_softcapping": None}, 32 * 2 * 8 * 128, 32 * 2 * 8 * 128),
    ],
)
def test_a_token_takes_what_a_plugin_keeps_and_reads_of_it(
    tmp_path: Path, described: dict[str, Any], openvino: int, hf: int
) -> None:
    model = sparse_llama(tmp_path / "model", hidden=1024, layers=32)
    edit_json(model / "config.json", **described)
    size, registry = size_of(str(model)), Registry.load()
    assert size is not None
    assert ModelSize.read(size.content()) == size
    for plugin, numbers in (("openvino", openvino), ("hf", hf)):
        options = {"dtype": "float32", "device": "cpu"}
        needs = fit_needs(make_plan(BuildSpec(plugin, str(model), options=options), registry), size)
        assert needs is not None
        assert needs.cache == 4096 * numbers * 4, plugin


_MAMBA_2 = {"conv_kernel": 4, "state_size": 128, "n_groups": 8, "expand": 2}
_JAMBA = {"mamba_d_conv": 4, "mamba_d_state": 16, "mamba_expand": 2}
_QWEN3_NEXT = {
    "linear_conv_kernel_dim": 4, "linear_key_head_dim": 128, "linear_value_head_dim": 128,
    "linear_num_key_heads": 16, "linear_num_value_heads": 32,
}  # fmt: skip
_KIMI = {"head_dim": 128, "num_heads": 32, "short_conv_kernel_size": 4}


@pytest.mark.parametrize(
    ("described", "attending", "with_state", "state"),
    [
        ({**_QWEN3_NEXT, "full_attention_interval": 4}, 8, 24, 8192 * 4 + 32 * 128 * 128),
        ({"full_attn_idxs": [2, 5, 31], "conv_L_cache": 3}, 3, 29, 1024 * 3),
        ({**_JAMBA, "attn_layer_period": 8, "attn_layer_offset": 4}, 4, 28, 2048 * (4 + 16)),
        (
            {
                **_MAMBA_2,
                "hybrid_override_pattern": "M-M*" * 8,
                "mamba_num_heads": 64,
                "mamba_head_dim": 64,
            },
            8,
            16,
            (4096 + 2 * 8 * 128) * 4 + 4096 * 128,
        ),
        ({**_JAMBA, "attn_layer_indices": [9, 18], "mamba_n_groups": 1}, 2, 30, 2080 * 4 + 2**15),
        ({**_JAMBA, "layer_types": ["mamba", "attention"] * 16}, 16, 16, 2048 * 20),
        ({**_JAMBA, "layers_block_type": ["mamba", "hybrid"] * 16}, 16, 32, 2048 * 20),
        ({**_JAMBA, "mamba_d_ssm": 1536, "mamba_n_groups": 1}, 32, 32, (1536 + 32) * 4 + 1536 * 16),
        (
            {"linear_attn_config": {**_KIMI, "full_attn_layers": [4, 8, 32]}},
            3,
            29,
            32 * 128 * (3 * 4 + 128),
        ),
        ({**_MAMBA_2, "num_attention_heads": None, "head_dim": 64, "num_heads": 32}, 0, 32, 278528),
        ({"layer_types": ["of_tomorrow"] * 32}, 32, 0, 0),
    ],
)
def test_a_state_takes_the_same_for_every_length(
    tmp_path: Path, described: dict[str, Any], attending: int, with_state: int, state: int
) -> None:
    """As released checkpoints say it, which transformers itself writes otherwise today."""
    model = sparse_llama(tmp_path / "hybrid", hidden=1024, layers=32)
    edit_json(model / "config.json", **described)
    size = size_of(str(model))
    assert size is not None
    assert size.cache == attending * 2 * 8 * 128
    assert size.state == 4 * with_state * state


def test_with_little_memory_fewer_sequences_have_a_state(tmp_path: Path, left: Any) -> None:
    """Each has one, with attention or without, and they are not taken away."""
    model = sparse_llama(tmp_path / "hybrid", hidden=1024, layers=32)
    edit_json(model / "config.json", **{**_QWEN3_NEXT, "full_attention_interval": 4})
    for plugin, option in (("iterative", "max_batch_size"), ("openvino", "max_sequences")):
        left()
        needs = fitted(model, plugin, device="cpu")[0].needs if plugin == "iterative" else None
        needs = needs or fitted(model, plugin)[0].needs
        left(free=needs.served - GB)
        choice, said = fitted(model, plugin, change=True)
        assert choice.changes == {option: 8}
        assert "states of 8 sequences" in said[-1]


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    hub = Hub({})
    with hub.serving() as url:
        point_to(url, tmp_path / "home", monkeypatch)
        yield hub


@pytest.mark.parametrize(
    ("file", "bits"),
    [
        ("m-Q8_0.gguf", 8.5), ("m.F16.gguf", 16), ("m-BF16.gguf", 16), ("m-f32.gguf", 32),
        ("m-Q4_K_M.gguf", 4.5), ("m-UD-IQ2_M.gguf", 4.5), ("m-MXFP4.gguf", 4.5),
        ("a-Q4B-model.gguf", None),
    ],
)  # fmt: skip
def test_a_file_on_the_hub_has_the_type_of_its_name(
    hub: Hub, file: str, bits: float | None
) -> None:
    hub.files, hub.listed = {file: b"GGUF"}, {file: 17_000_000}
    size = size_of(f"{MODEL}:{file}")
    assert (size and size.parameters) == (bits and int(17_000_000 * 8 / bits))
    assert hub.downloaded == []


def test_what_is_loaded_from_the_hub_is_what_counts(hub: Hub) -> None:
    config: dict[str, Any] = {"dtype": "bfloat16", "vocab_size": "many", "hidden_size": 64}
    shards = [f"model-0000{i}-of-00002.safetensors" for i in (1, 2)]
    index = {"weight_map": {str(i): shard for i, shard in enumerate(shards)}}
    others = ["consolidated.safetensors", "original/model.safetensors", "pytorch_model.bin"]
    hub.files = {
        "config.json": json.dumps(config).encode(),
        "model.safetensors.index.json": json.dumps(index).encode(),
        **dict.fromkeys([*shards, *others], b""),
    }
    hub.listed = {shards[0]: 200, shards[1]: 100, **dict.fromkeys(others, 300)}
    size = size_of(MODEL)
    assert size is not None
    assert (size.bytes, size.parameters, size.ends) == (300, 150, 0)
    hub.commit = hub.commit[::-1]
    config["quantization_config"] = {"quant_method": "awq"}
    hub.files["config.json"] = json.dumps(config).encode()
    assert size_of(MODEL) is None
    hub.commit = f"{hub.commit[1:]}0"
    config["quantization_config"] |= {"bits": 4, "group_size": 128}
    hub.files["config.json"] = json.dumps(config).encode()
    size = size_of(MODEL)
    assert size is not None
    assert size.packed is not None
    assert (size.packed.bytes, size.packed.parameters) == (300, int(300 * 8 / (4 + 20 / 128)))


def test_what_fits_is_built_as_it_was_asked_for(small: Path, left: Any, halves: None) -> None:
    left(free=8 * GB)
    choice, said = fitted(small, "hf")
    assert choice.spec.options == {}
    assert len(said) == 1
    assert "8.0 GB are free" in said[0]


@pytest.mark.skipif(not computes_in("bfloat16"), reason="its weights are widened here")
def test_what_does_not_fit_is_refused_with_what_would(small: Path, left: Any) -> None:
    left(free=1.5 * GB)
    with pytest.raises(ShortageError) as caught:
        fitted(small, "openvino")
    problem, hint = caught.value.problem, str(caught.value.hint)
    assert "needs 1.8 GB, and 1.5 GB are free" in problem
    assert hint.startswith("--set weight_format=int8 takes 1.4 GB, or --set weight_format=int4")
    assert hint.endswith("--fit takes the first, and --no-fit tries it as it is")
    choice, said = fitted(small, "openvino", change=True)
    assert choice.spec.options == {"weight_format": "int8"}
    assert choice.chosen() == {"weight_format": "int8"}
    assert said[0].startswith("chosen: --set weight_format=int8, since otherwise serving it")
    choice, said = fitted(small, "openvino", change=None)
    assert choice.spec.options == {}
    assert said == [f"note: {problem.partition(': ')[2]}: it may fail, or be killed"]


def test_another_plugin_is_named_if_it_is_the_one_that_fits(
    small: Path, left: Any, halves: None
) -> None:
    left(free=1.3 * GB)
    choice, _ = fitted(small, "hf", change=True)
    assert choice.plugin == choice.spec.plugin == "openvino"
    assert choice.chosen()["plugin"] == "openvino"


def test_what_a_user_has_chosen_stays(small: Path, left: Any) -> None:
    left(free=1.3 * GB)
    with pytest.raises(ShortageError, match="no option makes it fit: use a larger machine or a"):
        fitted(small, "openvino", change=True, weight_format="bf16", device="cpu")


def test_a_long_context_is_what_takes_the_memory(tmp_path: Path, left: Any) -> None:
    model = sparse_llama(tmp_path / "long", hidden=1024, layers=32, context=131072)
    left(free=6 * GB)
    with pytest.raises(ShortageError) as caught:
        fitted(model, "iterative", dtype="float32")
    assert "a cache of 131072 tokens 34.4 GB" in caught.value.problem
    assert "--set cache_tokens=" in str(caught.value.hint)


def test_a_gpu_has_to_have_it(small: Path, left: Any) -> None:
    left(of_gpu=1.6 * GB)
    with pytest.raises(ShortageError, match=r"are free on the GPU: --set cache_tokens=4096 "):
        fitted(small, "iterative", device="cuda")
    left(free=1 * GB, of_gpu=80 * GB)
    choice, _ = fitted(small, "iterative", device="cuda")
    assert choice.needs.of_gpu > 1 * GB > choice.needs.served


def test_the_disk_is_looked_at_before_it_is_filled(small: Path, left: Any) -> None:
    left(on_disk=0.9 * GB)
    with pytest.raises(OutputError, match=r"takes 1\.0 GB of the disk of model_repository, which"):
        fitted(small, "hf")
    choice, said = fitted(small, "hf", change=None)
    assert choice.spec.options == {}
    assert "takes 1.0 GB of the disk" in said[0]
    assert Left.here(Path("x" * 300)).on_disk > 0


def test_a_copy_on_all_gpus_takes_of_each(small: Path, left: Any) -> None:
    left(of_gpu=0.9 * GB, of_gpus=1.8 * GB)
    fitted(small, "hf", device="balanced")
    left(of_gpu=0.9 * GB, of_gpus=1.2 * GB)
    with pytest.raises(ShortageError, match="are free on all GPUs"):
        fitted(small, "hf", device="balanced")


def test_each_copy_has_addresses_of_its_own(small: Path, left: Any) -> None:
    left(addressable=6 * GB)
    fitted(small, "hf", dtype="float32", device="cpu")
    fitted(small, "hf", dtype="float32", device="cpu", instances=4)


def test_the_hub_is_not_asked_for_a_generator_that_does_not_say_what_it_needs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("llmserve.builder.fit.size_of", lambda *_, **__: pytest.fail("asked"))
    choice, _ = fitted(Path("owner/name"), "trtllm")
    assert choice.spec.model == "owner/name"


def test_graphs_and_vllm_say_what_they_need(small: Path) -> None:
    size, registry = size_of(str(small)), Registry.load()
    assert size is not None

    def needs(plugin: str, **options: object) -> Needs:
        found = fit_needs(make_plan(BuildSpec(plugin, str(small), options=options), registry), size)
        assert found is not None
        return found

    onnx, script = needs("gpt2-onnx"), needs("gpt2-torchscript")
    assert onnx.weights == script.weights == 4 * size.parameters
    # What is compared is the largest weight, or a file that is read as a whole.
    assert onnx.build - 4 * size.largest == script.build - min(script.weights, 1 << 30) > 0
    assert script.disk == onnx.disk + script.weights
    whole, short = needs("vllm", device="cuda"), needs("vllm", device="cuda", max_model_len=1024)
    assert whole.of_gpu == 2 * (size.parameters + size.cache * 4096)
    assert short.cache == whole.cache // 4
    assert whole.instead == ({"max_model_len": 1024},)
    assert needs("vllm", tensor_parallel_size=2).on_all_gpus


def test_what_a_plugin_gets_wrong_is_named(small: Path) -> None:
    plan = make_plan(BuildSpec("hf", str(small)), Registry.load())
    size = size_of(str(small))
    assert size is not None
    with pytest.raises(PluginError, match="needs of generator 'transformers' of plugin"):
        fit_needs(replace(plan, options={}), size)


def test_as_it_is_means_that_whatever_was_chosen_before(
    tmp_path: Path, left: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("llmserve.plugins.size.computes_in", lambda *_: False)
    store, registry = Store(tmp_path), Registry.load()
    spec = BuildSpec("hf", "demo", options={"device": "cpu"})
    left(free=0.416 * GB)
    first = store.build(spec, registry, change=True)
    assert first.record is not None
    assert first.record.fitted == {"dtype": "bfloat16"}
    assert not store.build(spec, registry, change=True).is_new
    second = store.build(spec, registry, change=None)
    assert second.is_new
    assert second.model.manifest is not None
    assert second.model.manifest.options["dtype"] == "auto"
    assert not store.build(spec, registry, change=True).is_new


def test_what_a_file_says_is_built_also_where_it_cannot_be_served(
    tmp_path: Path, left: Any
) -> None:
    file = tmp_path / "llmserve.toml"
    file.write_text("[models.mine]\nsource = 'demo'\nplugin = 'hf'\n")

    def run(*words: str) -> Result:
        return CliRunner().invoke(cli, [*words, "--config", str(file)])

    left(free=0.3 * GB)
    assert isinstance(run("build").exception, ShortageError)
    left(free=0.38 * GB)
    assert run("build").exit_code == 0
    left(free=0.3 * GB)
    assert run("build", "--force", "--no-fit").exit_code == 0
    assert isinstance(run("build", "--force").exception, ShortageError)


def test_a_gguf_file_is_widened_first(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    model = write_model(path)
    size = size_of(str(path))
    assert size is not None
    assert size.is_gguf
    assert size.parameters == sum(each.numel() for each in model.parameters())
    assert size.context == model.config.max_position_embeddings
    plain = fit_needs(make_plan(BuildSpec("hf", str(path)), Registry.load()), size)
    assert plain is not None
    # The repository has it by links.
    assert plain.disk == 2 * size.parameters


def test_a_gguf_file_that_is_kept_takes_what_it_takes(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    write_model(path, kind=gguf.GGMLQuantizationType.Q4_0)
    size = size_of(str(path))
    assert size is not None
    assert set(size.kinds) == {"Q4_0", "F32"}
    kept = fit_needs(make_plan(BuildSpec("openvino", str(path)), Registry.load()), size)
    options = {"weight_format": "bf16"}
    plan = make_plan(BuildSpec("openvino", str(path), options=options), Registry.load())
    widened = fit_needs(plan, size)
    assert kept is not None
    assert widened is not None
    assert kept.weights == pytest.approx(path.stat().st_size, rel=0.25)
    assert widened.disk > kept.disk + size.parameters


def test_a_built_model_knows_what_it_takes(tmp_path: Path) -> None:
    for plugin in ("hf", "iterative"):
        llmserve.build(plugin, "demo", output=tmp_path, name=plugin)
        model = Repository.open(tmp_path).model(plugin)
        assert model.manifest is not None
        size, needs = ModelSize.read(model.manifest.size), needs_of(model, Registry.load())
        assert needs is not None
        assert needs.weights in (2 * size.parameters, 4 * size.parameters)


def test_a_model_that_is_far_too_large_is_refused_before_anything_is_copied(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LLMSERVE_HOME", str(tmp_path / "home"))
    model = sparse_llama(tmp_path / "huge", hidden=16384, layers=100)
    assert (model / "model.safetensors").stat().st_size > 600 * GB
    result = CliRunner().invoke(cli, ["run", str(model), "hello"])
    assert isinstance(result.exception, (ShortageError, OutputError)), result.output
    assert not list((tmp_path / "home").rglob("*.safetensors"))


def test_a_limit_of_the_shell_counts(small: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "llmserve_cli", "build", "--plugin", "hf", "--model"]
    run = subprocess.run(
        [*command, str(small), "--output", str(tmp_path / "repository")],
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, (2 * GB, 2 * GB)),
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert run.returncode == 3, run.stderr
    assert "and 2.0 GB is what ulimit -v allows" in run.stderr
