"""Quantised checkpoints: each says what it is, and is computed as it is or refused by name."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf as gguf_library
import numpy as np
import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file, save_file

import llmserve
from llmserve.builder.build import build_spec
from llmserve.builder.plan import BuildSpec
from llmserve.errors import ModelSourceError
from llmserve.graphs import Scratch, StoredWeights
from llmserve.plugin import quantised_in
from llmserve_cli.group import cli
from llmserve_openvino.compare import difference
from llmserve_openvino.quantised_weights import Loaded, load_quantised
from llmserve_openvino.trace import convert
from tests import quantised_files as files
from tests.gguf_files import make_model, write_model
from tests.support import edit_json


def gptq(bits: int = 4, group: int = 32, **more: Any) -> dict[str, Any]:
    return {"quant_method": "gptq", "bits": bits, "group_size": group, "desc_act": False, **more}


def compressed(form: str, bits: int, group: int | None = None, **more: Any) -> dict[str, Any]:
    weights = {"num_bits": bits, "type": "int", "group_size": group, "symmetric": True, **more}
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
        "ignore": ["lm_head"],
    }


def shuffled(width: int) -> Any:
    return np.random.default_rng(4).permutation(width) // 32


def uneven(width: int) -> Any:
    owner = np.arange(width) // 32
    owner[0] = 1
    return owner


AWQ = {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm", "zero_point": True}
FP8 = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [48, 40]}
KEPT: dict[str, tuple[dict[str, Any], files.Write]] = {
    "gptq": (gptq(), files.gptq(32)),
    "gptq-rows": (gptq(group=-1), files.gptq(1 << 20)),
    "gptq-8": (gptq(8), files.gptq(32, 8)),
    "gptq-v2": (gptq(checkpoint_format="gptq_v2"), files.gptq(32, form="gptq_v2")),
    "gptq-order": (gptq(desc_act=True), files.gptq(32, owner=shuffled)),
    "awq": (AWQ, files.awq(32)),
    "w4a16": (compressed("pack-quantized", 4, 32), files.pack_quantized(32)),
    "w4a16-zeros": (
        compressed("pack-quantized", 4, 32, symmetric=False),
        files.pack_quantized(32, symmetric=False),
    ),
    "w4a16-order": (
        compressed("pack-quantized", 4, 32, actorder="group"),
        files.pack_quantized(32, owner=shuffled),
    ),
    "w8a16-packed": (compressed("pack-quantized", 8), files.pack_quantized(0, 8)),
    "w8a16": (compressed("int-quantized", 8), files.int_quantized),
}
WIDENED: dict[str, tuple[dict[str, Any], files.Write]] = {
    "gptq-uneven": (gptq(desc_act=True), files.gptq(32, owner=uneven)),
    "fp8-blocks": (FP8, files.float8(48, 40)),
    "fp8-whole": ({"quant_method": "fp8"}, files.float8(0, 0, "weight_scale")),
    "w8a16-float": (compressed("float-quantized", 8), files.float8(1, 0, "weight_scale")),
}


def saved(folder: Path, kind: str) -> dict[str, torch.Tensor]:
    """Save a quantised llama, and return the weights that it stands for."""
    make_model("llama").save_pretrained(folder)
    described, write = {**KEPT, **WIDENED}[kind]
    return files.write_quantised(folder, described, write)


def load(folder: Path, scratch: Scratch) -> Loaded:
    found = quantised_in(folder)
    assert found is not None
    return load_quantised(folder, found, scratch)


def change(folder: Path, edit: Callable[[dict[str, torch.Tensor]], object]) -> None:
    tensors = load_file(folder / "model.safetensors")
    edit(tensors)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


SHORT = ("gptq-order", "awq", "fp8-blocks")
"""The others are marked ``long``."""


@pytest.mark.parametrize(
    "kind",
    [
        pytest.param(kind, marks=() if kind in SHORT else pytest.mark.long)
        for kind in (*KEPT, *WIDENED)
    ],
)
def test_a_model_answers_as_with_the_weights_that_are_meant(tmp_path: Path, kind: str) -> None:
    weights = saved(tmp_path, kind)
    if kind in WIDENED:
        weights = {n: w.bfloat16().float() if "_proj" in n else w for n, w in weights.items()}
    expected = make_model("llama")
    expected.load_state_dict(weights)
    ids = torch.arange(60)[None] * 7 % 1024
    with torch.inference_mode():
        wanted = expected(input_ids=ids).logits.log_softmax(-1)
    with Scratch(tmp_path) as scratch:
        model, packed, widened = load(tmp_path, scratch)
        products = sum("_proj" in name for name, _ in expected.named_parameters())
        assert (len(packed), widened) == ((products, 0) if kind in KEPT else (0, products))
        stored = StoredWeights(model, packed)
        with torch.inference_mode(), stored.computing():
            answers = model(input_ids=ids).logits.log_softmax(-1)
        torch.testing.assert_close(answers, wanted, atol=2e-3, rtol=0)
        assert difference(model, stored, convert(model, stored)) < 1e-3


NAME = "model.layers.0.mlp.up_proj"


def lose(end: str) -> Callable[[dict[str, torch.Tensor]], object]:
    return lambda tensors: tensors.pop(f"{NAME}.{end}")


def cut(end: str) -> Callable[[dict[str, torch.Tensor]], object]:
    def edit(tensors: dict[str, torch.Tensor]) -> None:
        tensors[f"{NAME}.{end}"] = tensors[f"{NAME}.{end}"][:-1].contiguous()

    return edit


def fill(end: str, value: float) -> Callable[[dict[str, torch.Tensor]], object]:
    return lambda tensors: tensors[f"{NAME}.{end}"].fill_(value)


def retype(end: str) -> Callable[[dict[str, torch.Tensor]], object]:
    def edit(tensors: dict[str, torch.Tensor]) -> None:
        tensors[f"{NAME}.{end}"] = tensors[f"{NAME}.{end}"].float()

    return edit


def add_bias(tensors: dict[str, torch.Tensor]) -> None:
    tensors[f"{NAME}.bias"] = torch.ones(3)


def lose_norm(tensors: dict[str, torch.Tensor]) -> None:
    del tensors["model.norm.weight"]


@pytest.mark.parametrize(
    ("kind", "edit", "said"),
    [
        ("gptq", lose("scales"), f"{NAME} has no scales"),
        ("gptq", lose("qzeros"), f"{NAME} has no qzeros"),
        ("gptq", cut("qweight"), rf"{NAME} has a qweight of \d+ x \d+, and not of"),
        ("gptq", cut("scales"), rf"{NAME} has a scales of \d+ x \d+, and not of"),
        ("gptq", retype("qweight"), f"{NAME} has a qweight of float32, and not of int32"),
        ("gptq", fill("scales", torch.nan), f"{NAME} has scales that are no numbers"),
        ("gptq", fill("g_idx", 1000), f"{NAME} has a g_idx that names groups which it does not"),
        ("gptq", fill("g_idx", -1), f"{NAME} has a g_idx that names groups which it does not"),
        ("gptq", add_bias, f"{NAME} has a bias of 3 for 128 outputs"),
        ("gptq", lose_norm, "the checkpoint has no model.norm.weight"),
        ("gptq", lose("qweight"), f"the checkpoint has no {NAME}.weight"),
        ("awq", cut("qzeros"), rf"{NAME} has a qzeros of \d+ x \d+, and not of"),
        ("awq", fill("scales", torch.inf), f"{NAME} has scales that are no numbers"),
        ("w4a16", cut("weight_packed"), f"{NAME} has a weight_packed of"),
        ("w4a16", lose("weight_scale"), f"{NAME} has no weight_scale"),
        ("w8a16", cut("weight"), f"{NAME} has a weight of"),
        ("fp8-blocks", cut("weight_scale_inv"), f"{NAME} has a weight_scale_inv of"),
        ("fp8-blocks", fill("weight_scale_inv", torch.nan), f"{NAME} has scales that are no"),
        ("fp8-blocks", fill("weight", torch.nan), f"{NAME} has values that are no finite"),
        ("fp8-blocks", retype("weight"), f"{NAME} is of float32 beside scales"),
        ("fp8-blocks", lose("weight_scale_inv"), f"{NAME} has no scales"),
    ],
)
def test_a_checkpoint_that_does_not_fit_together_is_refused_in_a_line(
    tmp_path: Path, kind: str, edit: Any, said: str
) -> None:
    saved(tmp_path, kind)
    change(tmp_path, edit)
    with Scratch(tmp_path) as scratch, pytest.raises(SystemExit, match=said) as caught:
        load(tmp_path, scratch)
    assert "\n" not in str(caught.value)


def test_groups_that_do_not_divide_the_inputs_are_refused(tmp_path: Path) -> None:
    saved(tmp_path, "gptq")
    edit_json(tmp_path / "config.json", quantization_config=gptq(group=48))
    with (
        Scratch(tmp_path) as scratch,
        pytest.raises(SystemExit, match="groups of 48 do not divide"),
    ):
        load(tmp_path, scratch)


def test_weights_without_their_method_are_refused_in_a_line(tmp_path: Path) -> None:
    """The configuration says FP8, and the file has what GPTQ stores."""
    saved(tmp_path, "gptq")
    edit_json(tmp_path / "config.json", quantization_config=FP8)
    with Scratch(tmp_path) as scratch, pytest.raises(SystemExit, match="is not stored as FP8"):
        load(tmp_path, scratch)


@pytest.mark.parametrize(
    ("described", "said"),
    [
        (gptq(3), "GPTQ, 3 bits, groups of 32"),
        (gptq("4"), "GPTQ, groups of 32"),  # type: ignore[arg-type]
        (gptq(checkpoint_format="marlin"), "GPTQ, marlin, 4 bits"),
        ({**AWQ, "version": "gemv"}, "AWQ, gemv, 4 bits"),
        (compressed("marlin-24", 4, 32), "compressed-tensors, marlin-24, 4 bits"),
        (compressed("int-quantized", 4, 32), "compressed-tensors, int-quantized, 4 bits"),
        (
            {**compressed("pack-quantized", 4), "transform_config": {"config_groups": {"a": 1}}},
            "compressed-tensors, transformed",
        ),
        (
            {**compressed("pack-quantized", 4), "sparsity_config": {"format": "24"}},
            "compressed-tensors, sparse",
        ),
        ({"quant_method": "compressed-tensors", "config_groups": [1]}, "mixed-precision"),
        ({"quant_method": "compressed-tensors", "config_groups": {"a": 1}}, "compressed-tensors"),
        ({"quant_method": ["x"]}, r"\['x'\]"),
        ({"quant_method": "quip"}, "'quip'"),
    ],
)
def test_what_openvino_does_not_keep_is_refused_with_who_takes_it(
    folder: Path, repo: Path, described: dict[str, Any], said: str
) -> None:
    edit_json(folder / "config.json", quantization_config=described)
    with pytest.raises(
        ModelSourceError, match=rf"is quantised \(.*{said}.*openvino does"
    ) as caught:
        llmserve.build("openvino", str(folder), output=repo)
    assert "--plugin trtllm or vllm" in (caught.value.hint or "")


@pytest.mark.parametrize("plugin", ["hf", "iterative", "gpt2-onnx", "gpt2-torchscript"])
def test_another_plugin_names_those_that_take_it(folder: Path, repo: Path, plugin: str) -> None:
    edit_json(folder / "config.json", quantization_config=gptq(desc_act=True))
    said = r"is quantised \(GPTQ, 4 bits, groups of 32, act order\), which " + plugin
    with pytest.raises(ModelSourceError, match=said) as caught:
        llmserve.build(plugin, str(folder), output=repo)
    assert "build it with --plugin openvino or" in (caught.value.hint or "")
    assert not list(repo.glob("*/config.pbtxt"))


@pytest.mark.long
def test_a_build_keeps_the_bits_and_says_so(folder: Path, repo: Path) -> None:
    saved(folder, "gptq")
    reports: list[str] = []
    spec = BuildSpec("openvino", str(folder), output=repo, name="m")
    built = build_spec(spec, report=lambda line: reports.append(str(line)))
    said = "is quantised (GPTQ, 4 bits, groups of 32): its quantised weights stay in their bits"
    assert any(said in line for line in reports)
    model = (built.folder / "1" / "openvino" / "openvino_model.xml").read_text()
    assert 'element_type="u4"' in model


def said_by(*words: str) -> tuple[int, str]:
    result = CliRunner().invoke(cli, [*words], env={"COLUMNS": "200"})
    return result.exit_code, result.output


@pytest.mark.parametrize(
    ("kind", "what", "treatment"),
    [
        ("gptq-order", "GPTQ, 4 bits, groups of 32, act order", "keeps its weights as they are"),
        ("fp8-blocks", "FP8, blocks of 48 x 40", "widens its weights to 16 bits"),
    ],
)
def test_check_says_what_a_checkpoint_is_and_who_takes_it(
    tmp_path: Path, kind: str, what: str, treatment: str
) -> None:
    saved(tmp_path, kind)
    code, said = said_by("check", str(tmp_path))
    assert code == 0
    assert f"{tmp_path}: {what}; 0.2 M weights in" in said
    assert re.search(rf"\n  openvino +{treatment}", said)
    assert re.search(r"\n  vllm +keeps its weights as they are", said)
    # Without gptqmodel, transformers loads none.
    assert ("\n  iterative" in said) == (kind == "fp8-blocks")
    code, said = said_by("check", str(tmp_path), "--json")
    takers = {each["plugin"]: each["treatment"] for each in json.loads(said)["takers"]}
    assert takers["openvino"] == ("widened" if kind == "fp8-blocks" else "kept")


def test_check_says_of_which_types_a_gguf_file_is(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    write_model(path, kind=gguf_library.GGMLQuantizationType.Q4_0)
    code, said = said_by("check", str(path))
    assert code == 0
    assert re.search(r"GGUF, Q4_0(?: \d+%, F32 \d+%)?; 0\.\d M weights in", said)
    assert re.search(r"\n  openvino +keeps its weights as they are", said)
    assert re.search(r"\n  iterative +widens its weights to 16 bits", said)


def test_check_says_that_nobody_takes_a_checkpoint(tmp_path: Path) -> None:
    saved(tmp_path, "gptq")

    def check() -> tuple[int, str]:
        found = subprocess.run(
            [sys.executable, "-m", "llmserve_cli", "check", str(tmp_path)],
            env={**os.environ, "LLMSERVE_PLUGINS": "hf,iterative"},
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        return found.returncode, found.stdout

    code, said = check()
    assert code == 3
    assert "GPTQ, 4 bits, groups of 32; 0.2 M weights in" in said
    assert "no installed plugin computes them" in said
    edit_json(tmp_path / "config.json", quantization_config={"quant_method": "quip"})
    code, said = check()
    assert code == 3
    assert "how its weights are stored cannot be read" in said


def test_plugins_says_which_checkpoints_are_kept_and_which_are_widened() -> None:
    code, said = said_by("plugins", "openvino")
    assert code == 0
    kept, widened = said.split("Quantised checkpoints that are ")[1:]
    assert "GPTQ, 4 bits, act order" in kept
    assert "FP8" in widened.partition("Options")[0]
    assert "MXFP4" not in said
    assert "Quantised" not in said_by("plugins", "gpt2-onnx")[1]
    taken = json.loads(said_by("plugins", "vllm", "--json")[1])["quantised"]
    assert "MXFP4" in taken["kept"]
