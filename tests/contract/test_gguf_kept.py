"""GGUF files whose weights stay as they are, in whole models of each family."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch

import llmserve
from llmserve.builder.build import build_spec
from llmserve.builder.gguf.convert import convert as convert_file
from llmserve.builder.plan import BuildSpec
from llmserve.errors import ModelSourceError
from llmserve.graphs import Scratch, StoredWeights, parts
from llmserve.plugin import KeptWeights
from llmserve_openvino.compare import difference
from llmserve_openvino.gguf_weights import load_kept
from llmserve_openvino.trace import convert
from tests.gguf_files import FAMILIES, make_model, quantized, write_model

pytestmark = pytest.mark.long


def read(path: Path, scratch: Scratch) -> tuple[Any, StoredWeights]:
    """Read a file as a build does, but for its processes."""
    folder = path.with_suffix("")
    folder.mkdir(exist_ok=True)
    result = convert_file(path, folder, "bfloat16", keeps=True)
    assert result["kept"], result["notes"]
    assert result["notes"] == []
    model, packed = load_kept(folder, KeptWeights.read(folder), scratch)
    return model, StoredWeights(model, packed)


def rounded(model: Any, kind: Any) -> Any:
    """Give a model the values that its matrices have in a file."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                own = parameter.numpy()
                # GPT-2 has the inputs first, and the file the outputs; its tables are as they are.
                turned = type(model).__name__ == "GPT2LMHeadModel" and 1024 not in own.shape
                turned = turned and own.shape != model.transformer.wpe.weight.shape
                values = np.ascontiguousarray(own.T if turned else own)
                values = gguf.dequantize(gguf.quantize(values, kind), kind)
                parameter.copy_(torch.from_numpy(values.T if turned else values))
    return model


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("family", "kind"),
    [*((family, "Q4_0") for family in FAMILIES), ("llama", "Q4_1"), ("llama", "Q8_0")],
)
def test_a_model_answers_as_with_the_widened_weights(
    tmp_path: Path, family: str, kind: str
) -> None:
    chosen = gguf.GGMLQuantizationType[kind]
    path = tmp_path / "m.gguf"
    model = rounded(write_model(path, family, kind=chosen), chosen)
    ids = torch.arange(60)[None] * 7 % 1024
    with torch.inference_mode():
        expected = model(input_ids=ids).logits.log_softmax(-1)
    with Scratch(tmp_path) as scratch:
        found, stored = read(path, scratch)
        assert len(stored.layers) > 8
        assert sum(layer.packed is not None for layer in stored.layers.values()) == len(
            stored.layers
        )
        with torch.inference_mode(), stored.computing():
            answers = found(input_ids=ids).logits.log_softmax(-1)
        torch.testing.assert_close(answers, expected, atol=2e-2 if kind == "Q4_1" else 2e-3, rtol=0)
        assert difference(found, stored, convert(found, stored)) < 1e-3
        shares = [
            difference(found, stored, convert(found, stored)) for _ in parts(found, stored, 1)
        ]
        assert max(shares) < 1e-3


K_QUANTS = {
    "Q4_K": {"": "Q4_K"},
    "Q5_K": {"": "Q5_K"},
    "Q6_K": {"": "Q6_K"},
    # As llama.cpp mixes them.
    "Q4_K_M": {"attn_v": "Q6_K", "ffn_down": "Q6_K", "token_embd": "Q6_K", "": "Q4_K"},
    "Q5_K_M": {"attn_v": "Q6_K", "ffn_down": "Q6_K", "token_embd": "Q6_K", "": "Q5_K"},
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("mix", K_QUANTS)
def test_blocks_of_256_answer_as_their_widened_weights(tmp_path: Path, mix: str) -> None:
    model = make_model("llama", hidden_size=256, intermediate_size=512, head_dim=64)
    with torch.no_grad():
        for parameter in model.parameters():
            # As small as a real model's: the last digit of a weight does not choose the token.
            parameter.mul_(1 / 3 if parameter.ndim > 1 else 1)
    kinds = {part: gguf.GGMLQuantizationType[kind] for part, kind in K_QUANTS[mix].items()}
    path = tmp_path / "m.gguf"
    write_model(path, model=model, kinds=kinds)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim > 1:
                part = {"v_proj": "attn_v", "down_proj": "ffn_down", "embed_tokens": "token_embd"}
                own = next((part[each] for each in part if each in name), "")
                kind = kinds.get(own, kinds[""])
                values = gguf.dequantize(quantized(parameter.numpy(), kind), kind)
                off = np.abs(values - parameter.numpy()).max() / np.abs(parameter.numpy()).max()
                assert off < 0.1, "the blocks are not those of the weights"
                parameter.copy_(torch.from_numpy(values))
    ids = torch.arange(60)[None] * 7 % 1024
    with torch.inference_mode():
        expected = model(input_ids=ids).logits.log_softmax(-1)
    with Scratch(tmp_path) as scratch:
        found, stored = read(path, scratch)
        with torch.inference_mode(), stored.computing():
            answers = found(input_ids=ids).logits.log_softmax(-1)
        # Of Q5_K, zero points are rounded to a sixteenth of a step.
        assert (answers - expected).abs().max() < (0.1 if "Q5_K" in mix else 1e-2)
        assert difference(found, stored, convert(found, stored)) < 1e-3


def test_what_is_in_other_types_is_widened_alone(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    kinds = {"attn_v": gguf.GGMLQuantizationType.F16, "ffn_up": gguf.GGMLQuantizationType.Q5_1}
    write_model(path, kind=gguf.GGMLQuantizationType.Q8_0, kinds=kinds)
    with Scratch(tmp_path) as scratch:
        model, stored = read(path, scratch)
        layer = model.model.layers[0]
        attention, product = layer.self_attn, layer.mlp.up_proj
        packed = [stored.layers[m].packed for m in (attention.v_proj, attention.q_proj, product)]
        assert [each and each.kind for each in packed] == [None, "i8", "u8"]
        assert layer.input_layernorm.weight.dtype == torch.float32


def test_a_build_keeps_a_file_and_says_so(tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    write_model(path, kind=gguf.GGMLQuantizationType.Q4_0)
    reports: list[str] = []
    repository = tmp_path / "repository"
    built = build_spec(BuildSpec("openvino", str(path), output=repository), report=reports.append)
    assert "its Q4_0 weights are kept as they are: 0 MB" in reports
    folder = built.folder / "1" / "openvino"
    names = {file.name for file in folder.iterdir()}
    assert names == {"openvino_model.bin", "openvino_model.xml"}
    # A table has a byte for each number, all others half of one.
    assert (folder / "openvino_model.bin").stat().st_size < 2 * path.stat().st_size
    settings = built.manifest.components["generator"]["settings"]
    assert settings["half_weights"]
    reports.clear()
    spec = BuildSpec(
        "openvino", str(path), output=repository, name="wide", options={"weight_format": "bf16"}
    )
    build_spec(spec, report=reports.append)
    assert "its Q4_0 weights are widened to bfloat16: 0 MB" in reports


def test_a_damaged_weight_is_named_in_one_line(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    write_model(path, kind=gguf.GGMLQuantizationType.Q8_0)
    tensor = next(t for t in gguf.GGUFReader(path).tensors if t.name == "blk.1.ffn_up.weight")
    with path.open("r+b") as file:
        file.seek(int(tensor.data_offset))
        file.write(np.array([np.nan], "<f2").tobytes())
    with pytest.raises(ModelSourceError) as error:
        llmserve.build("openvino", str(path), output=tmp_path / "repository")
    assert "the file is damaged: model.layers.1.mlp.up_proj.weight has blocks" in str(error.value)
    assert "\n" not in str(error.value)
    assert not (tmp_path / "repository").exists()
