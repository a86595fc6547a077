"""Models in repositories that others have written."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from llmserve.builder.server_file import ServerFile
from llmserve_cli.group import cli
from tests.unit.cli.adopting.repositories import (
    falcon,
    foreign,
    iterative,
    llama_python,
    sequences,
    tensorrt,
    vllm,
    write,
)


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "old").mkdir()
    return Path("old")


def adopt(*words: str) -> tuple[ServerFile, Result]:
    result = CliRunner().invoke(cli, ["adopt", "old", *words], standalone_mode=False)
    if result.exception is not None:
        raise result.exception
    return ServerFile.read(Path("llmserve.toml")), result


def test_a_pipeline_with_a_fixed_length(root: Path) -> None:
    falcon(root)
    file, result = adopt()
    spec = file.models["falcon7b"]
    assert (spec.plugin, spec.model) == ("hf", "tiiuae/falcon-7b")
    assert dict(spec.options) == {
        "layout": "tutorial-text", "max_batch_size": 0, "dtype": "float16", "max_tokens": 15,
    }  # fmt: skip
    assert "its length counts the prompt" in result.stderr
    text = Path("llmserve.toml").read_text(encoding="utf-8")
    assert "# old/falcon7b/config.pbtxt:3: huggingface_model tiiuae/falcon-7b" in text
    assert "# old/falcon7b/1/model.py:15: torch_dtype=torch.float16" in text


def test_a_pipeline_with_max_tokens(root: Path) -> None:
    llama_python(root)
    spec = adopt()[0].models["llama_python"]
    assert spec.model == "/workspace/meta/hf-weights/7B-chat"
    assert spec.options["layout"] == "tutorial"
    assert spec.options["device"] == "cuda"


def test_an_ensemble_of_tensorrt_llm_and_its_neighbour(root: Path) -> None:
    tensorrt(root)
    file, result = adopt()
    assert {*file.models} == {"ensemble", "llama_python"}, "parts belong to their ensemble"
    spec = file.models["ensemble"]
    assert (spec.plugin, spec.batching) == ("trtllm", "static")
    assert spec.model == "/workspace/meta/llama_models"
    assert spec.options["engine"] == "/engines/fp16-1gpu"
    assert spec.options["scheduler"] == "guaranteed_completion"
    assert spec.options["max_batch_size"] == "128" or spec.options["max_batch_size"] == 128
    assert "trtllm_version" in result.stderr


def test_iterative_scheduling(root: Path) -> None:
    iterative(root)
    file = adopt()[0]
    each, batch = file.models["iterative-gpt2"], file.models["simple-gpt2"]
    assert (each.plugin, each.model, each.options["layout"]) == ("iterative", "gpt2", "tutorial")
    assert (batch.plugin, batch.batching) == ("iterative", "static")
    assert batch.options["stream"] is True


def test_a_sequence_batcher_before_a_graph(root: Path) -> None:
    sequences(root)
    file, result = adopt()
    spec = file.models["ensemble_pipeline"]
    assert (spec.plugin, spec.batching) == ("gpt2-onnx", "sequence-direct")
    assert (spec.model, spec.options["layout"]) == ("gpt2", "tutorial")
    assert "does not say what it was exported from" in result.stderr


def test_vllms_backend(root: Path) -> None:
    vllm(root)
    file, result = adopt("--plugin", "vllm")
    spec = file.models["vllm_model"]
    assert (spec.plugin, spec.model) == ("vllm", "facebook/opt-125m")
    assert spec.options["gpu_memory_utilization"] == 0.1
    assert spec.options["enforce_eager"] is True
    assert json.loads(str(spec.options["engine_args"])) == {"max_logprobs": 7}
    assert "port" not in file.gateway, "Triton's ports stay"
    assert "sampling_parameters" in result.stderr


def test_a_foreign_model_goes_on_where_it_is(root: Path) -> None:
    foreign(root)
    file, result = adopt()
    assert "it goes on as it is" in result.stderr
    assert "its code names no model of transformers" in result.stderr
    assert file.repository == Path("old")
    assert file.models == {}
    assert file.texts == {"shouter": ("text_input", "text_output")}


def test_beside_models_that_are_built_a_foreign_one_is_told(root: Path) -> None:
    foreign(root)
    falcon(root)
    file, result = adopt()
    assert [*file.models] == ["falcon7b"]
    assert file.texts == {}
    assert "llmserve serve old" in result.stderr


def test_a_placeholder_that_was_not_filled_in_is_told(root: Path) -> None:
    falcon(root)
    write(root, "ensemble", 'platform: "ensemble"\nmax_batch_size: ${max_batch_size}\n')
    assert "a placeholder that was not filled in" in adopt()[1].stderr


def test_a_link_out_of_the_repository_is_not_followed(root: Path, tmp_path: Path) -> None:
    falcon(root)
    falcon(tmp_path / "elsewhere")
    (root / "linked").symlink_to(tmp_path / "elsewhere" / "falcon7b")
    file, result = adopt()
    assert [*file.models] == ["falcon7b"]
    assert "a link out of the repository" in result.stderr
