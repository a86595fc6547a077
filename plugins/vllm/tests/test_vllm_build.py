"""What a build writes, and which options it refuses."""

from __future__ import annotations

import json
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

import llmserve
import llmserve_vllm
from llmserve.errors import OptionError
from llmserve.plugin import Recipe, Registry, check_repository
from llmserve.testing import read_config
from llmserve_vllm import prepare


def settings_of(folder: Path) -> dict[str, Any]:
    manifest = json.loads((folder / "llmserve.json").read_text(encoding="utf-8"))
    found: dict[str, Any] = manifest["components"]["generator"]["settings"]
    return found


def built(output: Path, **options: Any) -> Path:
    return llmserve.build("vllm", "demo", output=output, **options).folder


def test_a_build_is_for_one_process_that_drives_all_gpus_and_nvidias_image(tmp_path: Path) -> None:
    folder = built(tmp_path, tensor_parallel_size=2, gpu_memory_utilization=0.8, max_num_seqs=16)
    config = read_config(folder)
    (group,) = config.instance_group
    assert (group.count, group.kind) == (1, group.KIND_MODEL)
    assert config.model_transaction_policy.decoupled
    settings = settings_of(folder)
    assert settings["engine_args"] == {
        "tensor_parallel_size": 2, "gpu_memory_utilization": 0.8, "max_num_seqs": 16,
    }  # fmt: skip
    # vLLM opens weights, configuration and tokenizer in one folder.
    files = {path.name for path in (folder / "1" / settings["path"]).iterdir()}
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= files
    dockerfile = (tmp_path / "Dockerfile").read_text(encoding="utf-8")
    assert f"FROM {prepare.IMAGE}" in dockerfile
    assert "llmserve-vllm==" in dockerfile
    assert "torch==" not in dockerfile, "the image has its own"
    assert "transformers==" not in dockerfile


def test_options_that_are_left_out_are_vllms_own(tmp_path: Path) -> None:
    assert settings_of(built(tmp_path))["engine_args"] == {}
    folder = built(
        tmp_path, name="other", enable_prefix_caching="false", kv_cache_dtype="fp8",
        speculative_config='{"method": "ngram", "num_speculative_tokens": 4}', enforce_eager=True,
    )  # fmt: skip
    assert settings_of(folder)["engine_args"] == {
        "enable_prefix_caching": False,
        "kv_cache_dtype": "fp8",
        "speculative_config": {"method": "ngram", "num_speculative_tokens": 4},
        "enforce_eager": True,
    }


def test_a_checkpoint_in_float32_is_not_rounded(tmp_path: Path) -> None:
    assert settings_of(built(tmp_path))["dtype"] == "float32"
    assert settings_of(built(tmp_path, name="half", dtype="bfloat16"))["dtype"] == "bfloat16"
    assert prepare._dtype("auto", {"dtype": "bfloat16"}) == "auto"
    assert prepare._dtype("auto", {"text_config": {"torch_dtype": "float32"}}) == "float32"


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"engine_args": "{"}, "engine_args is not JSON"),
        ({"engine_args": "[]"}, "engine_args takes a JSON object"),
        ({"engine_args": '{"max_num_seqs": 4}'}, "engine_args cannot set max_num_seqs: use --set"),
        ({"engine_args": '{"model": "x"}'}, "engine_args cannot set model: use --model"),
        ({"engine_args": '{"logprobs_mode": "x"}'}, "engine_args cannot set logprobs_mode: log-"),
        ({"engine_args": '{"enable_lora": true}'}, "cannot set enable_lora: it is so for a model"),
        ({"engine_args": '{"max_loras": 2}'}, "cannot set max_loras: use --set max_loras"),
        ({"adapters": "a:b=x"}, "an adapter cannot be called 'a:b'"),
        ({"max_lora_rank": 513}, "max_lora_rank must be at most 512"),
        ({"speculative_config": "4"}, "speculative_config takes a JSON object"),
        ({"enable_chunked_prefill": "maybe"}, "choose one of auto, true, false"),
        ({"gpu_memory_utilization": 1.5}, "gpu_memory_utilization must be at most 1"),
        ({"max_sequences": 3}, "no option 'max_sequences' here"),
    ],
)
def test_other_options_are_refused_by_name(
    tmp_path: Path, options: dict[str, Any], error: str
) -> None:
    with pytest.raises(OptionError) as refused:
        built(tmp_path, **options)
    assert error in str(refused.value)


@pytest.mark.skipif(find_spec("vllm") is not None, reason="vLLM is installed")
def test_arguments_are_checked_with_the_installed_vllm(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The installed one is a folder of this test, imported by a process of its own."""
    module = tmp_path / "site" / "vllm" / "engine" / "arg_utils.py"
    module.parent.mkdir(parents=True)
    for folder in (module.parent, module.parent.parent):
        (folder / "__init__.py").touch()
    module.write_text(
        "import dataclasses\n@dataclasses.dataclass\nclass EngineArgs:\n    block_size: int = 1\n",
        encoding="utf-8",
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "site"))
    monkeypatch.setattr(sys, "path", [str(tmp_path / "site"), *sys.path])
    folder = built(tmp_path / "models", engine_args='{"block_size": 32}')
    assert settings_of(folder)["engine_args"] == {"block_size": 32}
    with pytest.raises(OptionError) as refused:
        built(tmp_path / "models", engine_args='{"blok_size": 32}')
    assert "has no blok_size: did you mean 'block_size'?" in str(refused.value)


@pytest.mark.skipif(find_spec("vllm") is not None, reason="vLLM is installed")
def test_a_model_that_sees_is_placed_with_its_processor_and_takes_images(tmp_path: Path) -> None:
    from llmserve.testing.tiny_seeing import save_seeing

    source = save_seeing("idefics3", tmp_path / "model")
    output = tmp_path / "models"
    folder = llmserve.build(
        "vllm", str(source), output=output, name="seeing", max_images=3
    ).folder  # fmt: skip
    assert "image_url" in [tensor.name for tensor in read_config(folder).input]
    settings = settings_of(folder)
    assert settings["image_limits"] == {"images": 3, "megabytes": 20, "megapixels": 25}
    files = {path.name for path in (folder / "1" / settings["path"]).iterdir()}
    assert {"processor_config.json", "tokenizer.json", "model.safetensors"} <= files
    assert "pillow==" not in (output / "Dockerfile").read_text(encoding="utf-8"), "the image has it"


def test_where_there_is_no_vllm_a_check_says_where_to_find_it(tmp_path: Path) -> None:
    built(tmp_path)
    (problem,) = check_repository(tmp_path)
    assert "vLLM is not installed here: it is in the image" in str(problem)


def test_it_is_the_first_choice_for_a_gpu_where_vllm_is_installed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def chosen() -> dict[str, int]:
        (recipe,) = llmserve_vllm.llmserve_register_recipes()
        return dict(recipe.suits)

    recipes = [recipe for recipe in Registry.load().all(Recipe) if recipe.name != "vllm"]
    others = max(recipe.suits.get("cuda", 0) for recipe in recipes)
    monkeypatch.setattr(llmserve_vllm, "find_spec", lambda _: object())
    assert chosen()["cuda"] > others
    monkeypatch.setattr(llmserve_vllm, "find_spec", lambda _: None)
    assert chosen() == {}, "what would be built could not be served here"
