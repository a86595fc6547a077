"""A checkpoint that is not the model of its configuration is refused, whatever the plugin."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import llmserve
from llmserve.builder.home import HOME
from llmserve.builder.weights.check import check_weights
from llmserve.errors import ModelSourceError, OutputError
from llmserve.repository.check import check_repository
from llmserve.repository.repository import Repository
from llmserve.testing.tiny_encoders import save_classifier, save_encoder
from llmserve.testing.tiny_models import make_model
from tests import gguf_files
from tests.support import edit_json

PLUGINS: dict[str, dict[str, Any]] = {
    "hf": {},
    "iterative": {},
    "openvino": {},
    "vllm": {},
    "gpt2-onnx": {},
    "gpt2-torchscript": {},
    "trtllm": {"layout": "llmapi"},
}
LONG = pytest.mark.long
LOST = "transformer.h.0.attn.c_attn.weight"


def change(folder: Path, edit: Callable[[dict[str, torch.Tensor]], object]) -> None:
    file = folder / "model.safetensors"
    tensors = load_file(file)
    edit(tensors)
    save_file(tensors, file, {"format": "pt"})


def lose(tensors: dict[str, torch.Tensor]) -> None:
    del tensors[LOST]


def reshape(tensors: dict[str, torch.Tensor]) -> None:
    tensors[LOST] = tensors[LOST][:, :-1].contiguous()


def make_nan(tensors: dict[str, torch.Tensor]) -> None:
    tensors[LOST].fill_(torch.nan)


FAULTS = {
    "lost": (lose, f"has no {LOST}"),
    "reshaped": (reshape, rf"has {LOST} of the shape \[.*\] instead of \["),
    "nan": (make_nan, rf"has not one number \(all is NaN\) in {LOST}"),
}


@pytest.mark.parametrize(
    ("plugin", "fault"),
    [
        pytest.param(plugin, fault, marks=() if fault == "lost" or plugin == "hf" else LONG)
        for plugin in PLUGINS
        for fault in FAULTS
    ],
)
def test_no_plugin_builds_it(plugin: str, fault: str, folder: Path, repo: Path) -> None:
    edit, message = FAULTS[fault]
    change(folder, edit)
    with pytest.raises(ModelSourceError, match=message):
        llmserve.build(plugin, str(folder), output=repo, **PLUGINS[plugin])
    assert not [*repo.glob("*/1")]


@pytest.mark.parametrize("plugin", ["embed", "rerank", "classify"])
def test_no_encoder_is_built_of_it(plugin: str, tmp_path: Path, repo: Path) -> None:
    save = save_encoder if plugin == "embed" else save_classifier
    model = save(tmp_path / "model")
    lost = next(n for n in load_file(model / "model.safetensors") if "query.weight" in n)
    change(model, lambda tensors: tensors.pop(lost))
    with pytest.raises(ModelSourceError, match=f"has no .*{lost}"):
        llmserve.build(plugin, str(model), output=repo)


def test_the_unused_pooler_of_an_encoder_may_be_missing(tmp_path: Path, repo: Path) -> None:
    model = save_encoder(tmp_path / "model")
    change(model, lambda t: [t.pop(name) for name in [*t] if name.startswith("pooler.")])
    llmserve.build("embed", str(model), output=repo, generator="encoder")


@LONG
def test_no_weights_of_a_gguf_file_are_all_nan(tmp_path: Path, repo: Path) -> None:
    model = gguf_files.make_model("llama")
    with torch.no_grad():
        model.model.layers[0].mlp.up_proj.weight.fill_(torch.nan)
    gguf_files.write_model(tmp_path / "tiny.gguf", model=model)
    with pytest.raises(ModelSourceError, match=r"NaN.* model\.layers\.0\.mlp\.up_proj\.weight"):
        llmserve.build("hf", str(tmp_path / "tiny.gguf"), output=repo)


@pytest.mark.parametrize("weights", ["copy", "reference"])
def test_check_names_it(weights: str, folder: Path, repo: Path) -> None:
    built = llmserve.build("hf", str(folder), output=repo, name="mine", weights=weights)
    assert not [p for p in check_repository(repo, models=["mine"]) if p.fatal]
    change(built.folder / "1/model" if weights == "copy" else folder, lose)
    problems = [p for p in check_repository(Repository.open(repo), models=["mine"]) if p.fatal]
    assert [str(problem) for problem in problems] == [
        f"mine: it has no {LOST}: download or save it again"
    ]


def check(folder: Path, **options: Any) -> None:
    check_weights(folder, asked="it", loader="AutoModelForCausalLM", **options)


# Nothing can be compared with this program in Python's place.
CHECK_WITHOUT_COMPARING = """
import sys
from pathlib import Path
from llmserve.builder.home import HOME
from llmserve.builder.weights.check import check_weights
sys.executable = "/bin/false"
check_weights(Path(sys.argv[1]), asked="it", loader="AutoModelForCausalLM", report=print)
"""


def test_what_was_compared_is_not_compared_by_the_next_process(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def printed(model: Path) -> str:
        words = [sys.executable, "-c", CHECK_WITHOUT_COMPARING, str(model)]
        ended = subprocess.run(words, text=True, capture_output=True, check=False)
        return ended.stdout + ended.stderr

    shutil.copytree(folder, tmp_path / "whole")
    change(folder, lose)
    check(tmp_path / "whole")
    with pytest.raises(ModelSourceError, match=f"has no {LOST}"):
        check(folder)
    assert printed(tmp_path / "whole") == "comparing its weights with its configuration\n"
    assert f"it has no {LOST}" in printed(folder)
    monkeypatch.setenv(HOME, str(tmp_path / "home"))
    assert "whether its weights are complete is not known" in printed(folder)


def test_extras_and_ties_are_no_fault(tmp_path: Path) -> None:
    model = make_model("llama", tie_word_embeddings=True)
    model.save_pretrained(tmp_path)
    names = ("model.layers.0.self_attn.rotary_emb.inv_freq", "classifier.weight")
    extras = {name: torch.zeros(4) for name in names}
    assert "lm_head.weight" not in load_file(tmp_path / "model.safetensors")
    change(tmp_path, lambda tensors: tensors.update(extras))
    check(tmp_path)
    edit_json(tmp_path / "config.json", tie_word_embeddings=False)
    with pytest.raises(ModelSourceError, match=r"it has no lm_head\.weight:"):
        check(tmp_path)


def test_shards_and_pickled_weights_are_compared_too(tmp_path: Path) -> None:
    model = make_model("qwen3")
    model.save_pretrained(tmp_path / "shards", max_shard_size="20KB")
    shards = sorted((tmp_path / "shards").glob("model-*.safetensors"))
    assert len(shards) > 2
    check(tmp_path / "shards")
    # Whoever removes a shard from the index as well has removed its weights.
    shards[1].unlink()
    with pytest.raises(ModelSourceError, match=rf"no {shards[1].name}, which model\.safetensors"):
        check(tmp_path / "shards")
    pickled = tmp_path / "pickled"
    model.config.save_pretrained(pickled)
    state = model.state_dict()
    torch.save(state, pickled / "pytorch_model.bin")
    check(pickled, pickle=True)
    lost = "model.layers.1.mlp.up_proj.weight"
    torch.save({n: t for n, t in state.items() if n != lost}, pickled / "pytorch_model.bin")
    with pytest.raises(ModelSourceError, match=f"it has no {lost}"):
        check(pickled, pickle=True)


def test_weights_beside_their_scales_are_there(tmp_path: Path) -> None:
    """A quantized model has other names and shapes, of which the module's name is the same."""
    model = make_model("llama")
    model.save_pretrained(tmp_path)
    name = "model.layers.0.mlp.up_proj"

    def quantize(tensors: dict[str, torch.Tensor]) -> None:
        weight = tensors.pop(f"{name}.weight")
        tensors[f"{name}.qweight"] = torch.zeros(weight.shape[0] // 8, 4, dtype=torch.int32)
        tensors[f"{name}.scales"] = torch.ones(4)

    change(tmp_path, quantize)
    with pytest.raises(ModelSourceError, match=f"has no {name}.weight"):
        check(tmp_path)
    edit_json(tmp_path / "config.json", quantization_config={"quant_method": "gptq", "bits": 4})
    check(tmp_path)
    change(tmp_path, lambda tensors: [tensors.pop(f"{name}.{n}") for n in ("qweight", "scales")])
    with pytest.raises(ModelSourceError, match=f"has no {name}.weight"):
        check(tmp_path)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64,
                                   torch.float8_e4m3fn, torch.float8_e5m2])  # fmt: skip
def test_one_number_is_enough(tmp_path: Path, dtype: torch.dtype) -> None:
    from llmserve.builder.weights.stored import read_stored

    nan = torch.full((3, 500_000), torch.nan).to(dtype)
    last, infinite = nan.clone(), nan.clone()
    last[-1, -1] = -1
    infinite[0, 0] = torch.tensor(torch.inf).to(dtype) if dtype != torch.float8_e4m3fn else 448
    save_file({"nan": nan, "last": last, "inf": infinite}, tmp_path / "w.safetensors")
    stored = read_stored(tmp_path / "w.safetensors")
    assert [n for n, t in stored.items() if t.is_nowhere_a_number()] == ["nan"]


@pytest.mark.parametrize("plugin", PLUGINS)
def test_a_model_of_no_known_type_is_refused_in_one_sentence(
    plugin: str, folder: Path, repo: Path
) -> None:
    edit_json(folder / "config.json", model_type="nonesuch")
    with pytest.raises(ModelSourceError) as caught:
        llmserve.build(plugin, str(folder), output=repo, **PLUGINS[plugin])
    message = str(caught.value)
    assert "is of the type 'nonesuch', which transformers " in message
    assert caught.value.hint == (
        "build it where a version of transformers that knows it is installed"
    )


@pytest.mark.parametrize("plugin", PLUGINS)
def test_a_shard_outside_the_folder_is_refused(plugin: str, folder: Path, repo: Path) -> None:
    Path(folder / "model.safetensors").rename(folder.parent / "outside.safetensors")
    index = {"weight_map": {LOST: "../outside.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")
    # A file that the patterns match, so that the folder has weights.
    save_file({"x": torch.zeros(1)}, folder / "model-00001-of-00002.safetensors")
    with pytest.raises(ModelSourceError, match=r"names '\.\./outside\.safetensors', which is no"):
        llmserve.build(plugin, str(folder), output=repo, **PLUGINS[plugin])


@pytest.mark.parametrize("plugin", PLUGINS)
@pytest.mark.parametrize("kind", ["pipe", "link", "dangling"])
def test_weights_that_are_no_file_of_the_folder_are_refused(
    plugin: str, kind: str, folder: Path, repo: Path
) -> None:
    file = folder / "model.safetensors"
    Path(file).rename(folder.parent / "outside.safetensors")
    if kind == "pipe":
        os.mkfifo(file)
    else:
        file.symlink_to(folder.parent / ("outside.safetensors" if kind == "link" else "nothing"))
    expected = {"pipe": "is no file", "dangling": "is a link to nothing", "link": "is a link to .*"}
    with pytest.raises(ModelSourceError, match=f"model.safetensors {expected[kind]}"):
        llmserve.build(plugin, str(folder), output=repo, **PLUGINS[plugin])


def test_what_the_disk_cannot_hold_is_refused_before_anything_is_copied(
    folder: Path, repo: Path
) -> None:
    # It is as large as it says, and takes no space: no disk holds a copy of it.
    file = folder / "model-extra.safetensors"
    save_file({"x": torch.zeros(1)}, file)
    os.truncate(file, 8 << 40)
    for fit, words in ((None, "which has .* GB free"), (False, r"take \d{7} MB, and the disk")):
        with pytest.raises(OutputError, match=words):
            llmserve.build("hf", str(folder), output=repo, fit=fit)
    assert not [*repo.rglob("*.safetensors")]
