"""Tests of which models can be exported, and that a refused export leaves no files."""

from __future__ import annotations

import hashlib
import zipfile
from functools import partial
from pathlib import Path

import pytest
import torch

from llmserve.errors import ModelSourceError
from llmserve.testing import tiny_models
from llmserve_gpt2.export import names, torchscript_file
from llmserve_gpt2.export import run as run_module
from llmserve_gpt2.export.mapped import load
from llmserve_gpt2.export.model import Step, shape_of
from llmserve_gpt2.export.run import export

FAMILIES = ("falcon", "gemma2", "gpt2", "llama", "mistral", "opt", "qwen2")
make_model = partial(tiny_models.make_model, attn_implementation="eager")


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_exports_to_torchscript(family: str, tmp_path: Path) -> None:
    lines: list[str] = []
    model = make_model(family)
    exported = export(model, "torchscript", tmp_path, name=family, report=lines.append)
    assert exported.difference < 1e-4
    assert [line.split()[0] for line in lines] == ["exporting", "comparing", "model.pt"]


def test_the_same_model_gives_the_same_file_without_local_paths(tmp_path: Path) -> None:
    digests = set()
    for name in ("one", "two"):
        folder = tmp_path / name
        folder.mkdir()
        file = export(make_model(), "torchscript", folder, name="x", report=lambda _: None).file
        digests.add(hashlib.sha256(file.read_bytes()).hexdigest())
        assert [path.name for path in folder.iterdir()] == ["model.pt"]
        with zipfile.ZipFile(file) as archive:
            here = str(Path(__file__).parents[2]).encode()
            assert not any(here in archive.read(entry) for entry in archive.namelist())
    assert len(digests) == 1


def test_a_graph_that_differs_from_the_model_is_refused_and_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make_model()

    class WrongStep(torch.nn.Module):
        """A step with wrong weights, as from a faulty exporter."""

        def __init__(self, _: object) -> None:
            super().__init__()
            wrong = make_model()
            with torch.no_grad():
                wrong.transformer.ln_f.weight.mul_(1.01)
            self.step = Step(wrong)

        def forward(self, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
            outputs: tuple[torch.Tensor, ...] = self.step(*inputs)
            return outputs

    monkeypatch.setattr(run_module, "Step", WrongStep)
    with pytest.raises(ModelSourceError, match=r"exported to torchscript: .* off by"):
        export(model, "torchscript", tmp_path, name="demo", report=lambda _: None)
    assert list(tmp_path.iterdir()) == []


def test_a_large_file_in_torchscript_is_read_through_instead_of_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torchscript_file, "MOST_READ", 0)
    exported = export(make_model(), "torchscript", tmp_path, name="x", report=lambda _: None)
    assert exported.difference < 1e-4
    assert torch.jit.load(str(exported.file)) is not None  # type: ignore[no-untyped-call]

    with zipfile.ZipFile(exported.file) as archive:
        weight = max(archive.infolist(), key=lambda entry: entry.file_size)
    with exported.file.open("r+b") as stream:
        stream.seek(weight.header_offset + weight.file_size)
        stream.write(b"another weight")
    with pytest.raises(ValueError, match=r"model/constants/\d+ in it is not what was written"):
        torchscript_file.read_through(exported.file)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("size", ["5GB", "20KB"])
def test_a_model_in_16_bits_is_mapped_in_32(dtype: torch.dtype, size: str, tmp_path: Path) -> None:
    stored = make_model("llama").to(dtype)
    source, scratch = tmp_path / "model", tmp_path / "scratch"
    scratch.mkdir()
    stored.save_pretrained(source, max_shard_size=size)
    with load(source, scratch, pickle=False, trust_remote_code=False) as model:
        weights = dict(model.named_parameters())
        assert {weight.dtype for weight in weights.values()} == {torch.float32}
        for name, weight in stored.named_parameters():
            assert torch.equal(weight.float(), weights[name]), name
        files = [path.name for path in scratch.rglob("*.safetensors")]
        assert files == (["model.safetensors"] if dtype is torch.bfloat16 else [])
    assert list(scratch.iterdir()) == []


def test_a_cache_of_another_kind_is_refused_with_the_reason(tmp_path: Path) -> None:
    model = make_model("opt")
    model.forward = lambda **_: None
    with pytest.raises(ModelSourceError, match="does not consist of the keys and values"):
        export(model, "onnx", tmp_path, name="odd", report=lambda _: None)


def test_the_shape_is_read_from_the_cache() -> None:
    shape = shape_of(make_model("llama"))
    assert (shape.layers, shape.heads, shape.key_width, shape.value_width) == (2, 2, 8, 8)
    assert shape.slot == 2 * 2 * 16


@pytest.mark.parametrize("layers", [1, 2, 12, 120])
def test_states_pair_up_in_alphabetical_order(layers: int) -> None:
    """Triton pairs them in this way, whatever the configuration is."""
    pairs = names.states(layers)
    inputs, outputs = zip(*pairs, strict=True)
    assert list(zip(sorted(inputs), sorted(outputs), strict=True)) == sorted(pairs)
