"""Builds of models in either form, and errors of builds that fail."""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import Phi3Config, Phi3ForCausalLM

import llmserve
from llmserve.errors import IncompatibleError, ModelSourceError, OptionError
from llmserve.plugin import BuildSpec, PartDone, UnservedError, build_spec, demo_model_path
from llmserve.testing.memory import most_memory

pytestmark = pytest.mark.long


def model_folder(build: Any) -> Path:
    return Path(build.folder / "1" / "openvino")


def test_a_converted_model_is_copied_unchanged(converted: Path, tmp_path: Path) -> None:
    built = llmserve.build("openvino", str(converted), output=tmp_path)
    for name in ("openvino_model.xml", "openvino_model.bin"):
        assert (model_folder(built) / name).read_bytes() == (converted / name).read_bytes()
    settings = built.manifest.components["generator"]["settings"]
    assert (settings["context_length"], settings["eos_ids"]) == (512, [0])
    assert settings["precision"] == settings["kv_cache"] == "auto"
    assert "openvino" in built.manifest.packages


@pytest.mark.parametrize(("weights", "share"), [("bf16", 0.52), ("int8", 0.3), ("int4", 0.25)])
def test_weights_are_stored_in_the_requested_format(
    converted: Path, tmp_path: Path, weights: str, share: float
) -> None:
    options: dict[str, Any] = {"weight_format": weights}
    built = llmserve.build("openvino", "demo", output=tmp_path, **options)
    full_size = (converted / "openvino_model.bin").stat().st_size
    assert (model_folder(built) / "openvino_model.bin").stat().st_size < share * full_size
    assert sorted(path.name for path in model_folder(built).iterdir()) == [
        "openvino_model.bin",
        "openvino_model.xml",
    ]


def test_longrope_is_served_up_to_its_original_length(tmp_path: Path) -> None:
    shutil.copytree(demo_model_path(), tmp_path / "long", ignore=lambda *_: ["model.safetensors"])
    rope = {"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [2.0] * 4}
    config = Phi3Config(
        **{"vocab_size": 1024, "hidden_size": 32, "intermediate_size": 48, "pad_token_id": 0},
        **{"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2},
        **{"max_position_embeddings": 128, "original_max_position_embeddings": 100},
        rope_parameters={**rope, "rope_theta": 1e4, "original_max_position_embeddings": 100},
    )
    Phi3ForCausalLM(config).save_pretrained(tmp_path / "long")
    reports: list[str] = []
    spec = BuildSpec("openvino", str(tmp_path / "long"), output=tmp_path / "new")
    built = build_spec(spec, report=reports.append)
    assert built.manifest.components["generator"]["settings"]["context_length"] == 100
    assert any("of its context of 128 tokens, 100 are served" in line for line in reports)


def test_a_draft_model_must_have_the_same_tokens(converted: Path, tmp_path: Path) -> None:
    other = Path(shutil.copytree(converted, tmp_path / "other"))
    tokenizer = json.loads((other / "tokenizer.json").read_text())
    tokenizer["model"]["vocab"].popitem()
    (other / "tokenizer.json").write_text(json.dumps(tokenizer))
    options: dict[str, Any] = {"draft_model": str(other)}
    reports: list[str] = []
    spec = BuildSpec("openvino", "demo", output=tmp_path / "new", options=options)
    with pytest.raises(OptionError, match="have different vocabularies"):
        build_spec(spec, report=reports.append)
    # Without a report, the model was not converted, which takes minutes.
    assert not reports
    options |= {"output": tmp_path / "repository", "prompt_lookup": 3}
    with pytest.raises(OptionError, match="leave one of them out"):
        llmserve.build("openvino", str(converted), **options)


def test_half_a_model_is_refused(converted: Path, tmp_path: Path) -> None:
    model = Path(shutil.copytree(converted, tmp_path / "model"))
    (model / "openvino_model.bin").unlink()
    with pytest.raises(ModelSourceError, match=r"without openvino_model\.bin"):
        llmserve.build("openvino", str(model), output=tmp_path / "repository")


def test_a_converted_model_without_attention_is_refused(converted: Path, tmp_path: Path) -> None:
    from llmserve.graphs import openvino

    model = Path(shutil.copytree(converted, tmp_path / "model"))
    ops = openvino.opset13
    ids = ops.parameter([-1, -1], openvino.Type.i64, name="input_ids")
    scores = ops.one_hot(ids, ops.constant(9), ops.constant(1.0), ops.constant(0.0), -1)
    openvino.save_model(openvino.Model([scores], [ids]), str(model / "openvino_model.xml"))
    with pytest.raises(IncompatibleError, match="cannot read this model's cache in pages") as error:
        llmserve.build("openvino", str(model), output=tmp_path / "repository")
    assert "\n" not in str(error.value)
    assert not (tmp_path / "repository").exists()
    (model / "openvino_model.xml").write_text("<net/>")
    with pytest.raises(ModelSourceError, match="cannot be read"):
        llmserve.build("openvino", str(model), output=tmp_path / "repository")


def test_options_of_a_conversion_are_refused_for_a_converted_model(
    converted: Path, tmp_path: Path
) -> None:
    with pytest.raises(OptionError, match="is already converted"):
        llmserve.build("openvino", str(converted), output=tmp_path, weight_format="int8")
    with pytest.raises(OptionError, match="int4_group"):
        llmserve.build("openvino", "demo", output=tmp_path, int4_group=0)


def small_model(folder: Path, family: str, **settings: Any) -> Path:
    """Write a tiny random model with the demo model's tokenizer."""
    import torch
    import transformers

    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    config = getattr(transformers, f"{family}Config")(
        vocab_size=1024, num_attention_heads=4, max_position_embeddings=256, bos_token_id=0,
        eos_token_id=0, **sizes, **settings,
    )  # fmt: skip
    model = getattr(transformers, f"{family}ForCausalLM")(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(6)
    model.save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(demo_model_path() / name, folder / name)
    return folder


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_weights_keep_their_size_and_their_values(tmp_path: Path, dtype: str) -> None:
    import openvino
    import torch
    from transformers import AutoModelForCausalLM

    source = small_model(tmp_path / "model", "Llama")
    model = AutoModelForCausalLM.from_pretrained(source).to(getattr(torch, dtype))
    model.save_pretrained(source)
    built = llmserve.build("openvino", str(source), output=tmp_path / "repository")
    written = (model_folder(built) / "openvino_model.bin").stat().st_size
    assert written == pytest.approx((source / "model.safetensors").stat().st_size, rel=0.05)
    compiled = openvino.Core().compile_model(
        model_folder(built) / "openvino_model.xml", "CPU", {"INFERENCE_PRECISION_HINT": "f32"}
    )
    ids = np.arange(20)[None]
    inputs = {
        "input_ids": ids,
        "attention_mask": np.ones_like(ids),
        "position_ids": ids,
        "beam_idx": np.zeros(1, np.int32),
    }
    logits = compiled.create_infer_request().infer(inputs)["logits"]
    with torch.no_grad():
        expected = model.float()(torch.tensor(ids)).logits
    np.testing.assert_allclose(logits, expected, atol=1e-3)


def test_a_conversion_reports_how_much_of_it_is_done(tmp_path: Path) -> None:
    reports: list[str] = []
    model = tmp_path / "a folder" / "small"
    shutil.copytree(demo_model_path(), model)
    build_spec(BuildSpec("openvino", str(model), output=tmp_path / "r"), report=reports.append)
    shares = [report.share for report in reports if isinstance(report, PartDone)]
    assert shares == sorted(shares)
    assert len(shares) > 10
    assert (shares[0], shares[-1]) == (0, 1)
    first, *rest = [share for share in shares if share < 0.75]
    gaps = [later - earlier for earlier, later in zip([first, *rest], rest, strict=False)]
    assert max(gaps) < 0.2, "it moves while the model is read and compared"
    assert "converting small to OpenVINO" in reports, "a path leaves no room for a bar"


def test_a_conversion_takes_the_memory_of_a_few_layers(tmp_path: Path) -> None:
    """With copies of all weights in float32, it would take three times as much."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=8192, hidden_size=1024, intermediate_size=4096, num_hidden_layers=16,
        num_attention_heads=8, num_key_value_heads=8, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(tmp_path / "model")
    size = (tmp_path / "model" / "model.safetensors").stat().st_size
    for weight_format in ("auto", "int8"):
        settings = {
            "weight_format": weight_format,
            "int4_group": 32,
            "int4_ratio": 1.0,
            "pickle": False,
            "trust_remote_code": False,
            "in_gguf": False,
            "sees": False,
            "images": "",
        }
        module = ["-m", "llmserve_openvino.convert", str(tmp_path / "model")]
        target = [str(tmp_path / weight_format), json.dumps(settings)]
        most = most_memory([sys.executable, *module, *target])
        assert most < 1.5e9 < 0.45e9 + 3 * 2 * size


def test_a_model_with_a_sliding_window_is_served_beyond_it(tmp_path: Path) -> None:
    model = small_model(tmp_path / "model", "Mistral", sliding_window=40, num_key_value_heads=2)
    built = llmserve.build("openvino", str(model), output=tmp_path / "repository")
    assert built.manifest.components["generator"]["settings"]["context_length"] == 256


@pytest.mark.parametrize("weight_format", ["auto", "int8", "int4"])
def test_experts_are_stored_in_the_requested_format(tmp_path: Path, weight_format: str) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    sizes = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "head_dim": 8}
    source = small_model(tmp_path / "model", "Qwen3Moe", **sizes)
    AutoModelForCausalLM.from_pretrained(source).to(torch.bfloat16).save_pretrained(source)
    options: dict[str, Any] = {"weight_format": weight_format}
    built = llmserve.build("openvino", str(source), output=tmp_path / "repository", **options)
    written = (model_folder(built) / "openvino_model.bin").stat().st_size
    stored = (source / "model.safetensors").stat().st_size
    assert 0.3 * stored < written < (1.05 if weight_format == "auto" else 0.75) * stored


@pytest.mark.parametrize(
    ("family", "settings", "words"),
    [
        ("Falcon", {"alibi": True, "multi_query": False}, "ALiBi in a mask of its own"),
        ("Rwkv", {"attention_hidden_size": 32}, "keep a state"),
    ],
)
def test_a_model_that_cannot_be_computed_is_refused(
    tmp_path: Path, family: str, settings: dict[str, Any], words: str
) -> None:
    """Before its weights are read, with the part that it is because of."""
    model = small_model(tmp_path / "model", family, **settings)
    with pytest.raises(UnservedError, match=words) as caught:
        llmserve.build("openvino", str(model), output=tmp_path / "repository")
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "repository").exists()


def test_a_capped_model_with_a_cache_in_8_bits_is_refused(tmp_path: Path) -> None:
    model = small_model(tmp_path / "model", "Gemma2", head_dim=8)
    with pytest.raises(OptionError, match="caps its attention scores"):
        llmserve.build("openvino", str(model), output=tmp_path / "repository", kv_cache="u8")
    assert not (tmp_path / "repository").exists()


def test_a_converted_model_with_states_is_placed(tmp_path: Path) -> None:
    from llmserve.graphs import StoredWeights, openvino
    from llmserve.testing.tiny_models import make_model
    from llmserve_openvino.trace import convert

    model = make_model("lfm2", vocab_size=1024)
    model.config.architectures = [type(model).__name__]
    model.config.save_pretrained(tmp_path)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(demo_model_path() / name, tmp_path / name)
    openvino.save_model(convert(model, StoredWeights(model)), tmp_path / "openvino_model.xml")
    # A process that has loaded no plugin for CPUs knows no operation on states.
    code = "import sys, llmserve; llmserve.build('openvino', sys.argv[1], output=sys.argv[2])"
    command = [sys.executable, "-c", code, str(tmp_path), str(tmp_path / "repository")]
    ended = subprocess.run(command, capture_output=True, encoding="utf-8", check=False)
    assert not ended.returncode, ended.stderr[-300:]
    with pytest.raises(IncompatibleError, match="exact_batches cannot be had: the model keeps"):
        llmserve.build("openvino", str(tmp_path), output=tmp_path / "exact", exact_batches=True)


def test_what_cannot_be_exact_is_refused_before_it_is_converted(tmp_path: Path) -> None:
    options: dict[str, Any] = {"exact_batches": True, "kv_cache": "u8"}
    with pytest.raises(IncompatibleError, match="exact_batches cannot be had: demo would have"):
        llmserve.build("openvino", "demo", output=tmp_path, **options)


def test_pickled_weights_are_not_read_unasked(tmp_path: Path) -> None:
    import torch
    from safetensors.torch import load_file

    model = Path(shutil.copytree(demo_model_path(), tmp_path / "model"))
    torch.save(load_file(model / "model.safetensors"), model / "pytorch_model.bin")
    (model / "model.safetensors").rename(model / "adapter.safetensors")
    with pytest.raises(ModelSourceError, match=r"no file named model\.safetensors"):
        llmserve.build("openvino", str(model), output=tmp_path / "refused")
    llmserve.build("openvino", str(model), output=tmp_path / "allowed", pickle=True)


def test_a_full_disk_is_no_fault_of_the_model(tmp_path: Path) -> None:
    """Files that reach a limit fail as those on a full disk do."""
    script = (
        "import resource, sys, llmserve; "
        "resource.setrlimit(resource.RLIMIT_FSIZE, (500_000,) * 2); "
        "llmserve.build('openvino', 'demo', output=sys.argv[1])"
    )
    command = [sys.executable, "-c", script, str(tmp_path / "repository")]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    assert "OutputError: the converted model cannot be written, with " in run.stderr
    assert not (tmp_path / "repository").exists()


def test_nothing_is_reported_over_the_network(tmp_path: Path) -> None:
    """By default OpenVINO reports every import, and stores an id in HOME."""
    code = (
        "import socket; calls = []; socket.getaddrinfo = lambda *a, **k: calls.append(a) or []; "
        "socket.socket.connect = lambda *a: calls.append(a); "
        "import llmserve_openvino.engine, llmserve_openvino.convert; assert not calls, calls"
    )
    assert socket.getaddrinfo is not None
    subprocess.run(
        [sys.executable, "-c", code],
        env={"PATH": "/usr/bin:/bin", "HOME": str(tmp_path)},
        check=True,
    )
    assert not any(tmp_path.iterdir())
