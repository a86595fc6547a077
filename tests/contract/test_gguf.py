"""Models in GGUF files: what a build makes of them, and what it refuses."""

from __future__ import annotations

import errno
import json
import os
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gguf
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

import llmserve
from llmserve.builder.build import build_spec
from llmserve.builder.gguf.convert import Refused, convert, end_ids, main
from llmserve.builder.gguf.header import read_header
from llmserve.builder.gguf.rope import rope_parameters
from llmserve.builder.plan import BuildSpec
from llmserve.builder.programs import Ended
from llmserve.demo import demo_model_path
from llmserve.errors import LLMServeError, ModelSourceError, OutputError
from llmserve.names import model_name_from
from llmserve.plugin import PartDone
from llmserve.testing.command import run
from tests.gguf_files import CHAT_TEMPLATE, FAMILIES, make_model, write_model
from tests.loopback_hub import COMMIT, Hub

pytestmark = pytest.mark.long

Q8_0, F16 = gguf.GGMLQuantizationType.Q8_0, gguf.GGMLQuantizationType.F16


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "tiny.gguf"
    write_model(path)
    return path


def logits_of(model: Any, length: int = 60) -> torch.Tensor:
    torch.manual_seed(7)
    ids = torch.randint(0, 1024, (2, length))
    with torch.inference_mode():
        logits: torch.Tensor = model(input_ids=ids).logits
    return logits


def converted(path: Path) -> tuple[Any, dict[str, Any]]:
    """Convert a file here, without the checks and the process of a build."""
    result = convert(path, path.with_suffix(""), "float32")
    loaded = AutoModelForCausalLM.from_pretrained(path.with_suffix(""), dtype=torch.float32)
    return loaded.eval(), result


@pytest.mark.parametrize("family", FAMILIES)
def test_a_converted_model_is_the_model(tmp_path: Path, family: str) -> None:
    path = tmp_path / f"{family}.gguf"
    original = write_model(path, family)
    model, result = converted(path)
    torch.testing.assert_close(logits_of(model), logits_of(original))
    assert result["notes"] == []
    assert model.config.max_position_embeddings == original.config.max_position_embeddings


ROPES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "linear": ({"factor": 4.0}, {"factor": 4.0}),
    "yarn": (
        {"factor": 4.0, "original_max_position_embeddings": 64},
        {"factor": 4.0, "original_context_length": 64},
    ),
    "llama3": (
        {
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
        {},
    ),
}


@pytest.mark.parametrize("kind", ROPES)
def test_a_stretched_context_stays_stretched(tmp_path: Path, kind: str) -> None:
    parameters, facts = ROPES[kind]
    rope = {"rope_type": kind, "rope_theta": 10000.0, **parameters}
    original = make_model("llama", rope_parameters=rope)
    scaling = {"type": kind, **facts} if facts else {}
    path = tmp_path / "m.gguf"
    # Llama 3's is a tensor, by which the frequencies are divided.
    unstretched = 10000.0 ** -(torch.arange(0, 16, 2) / 16)
    divisors = (unstretched / original.model.rotary_emb.inv_freq).numpy()
    write_model(
        path,
        model=original,
        facts={f"llama.rope.scaling.{name}": value for name, value in scaling.items()},
        extra=None if facts else {"rope_freqs.weight": divisors},
    )
    model, result = converted(path)
    torch.testing.assert_close(logits_of(model, 200), logits_of(original, 200), atol=1e-4, rtol=0)
    assert result["notes"] == []


def test_an_unknown_stretch_is_reported(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    unknown = {"rope_freqs.weight": torch.linspace(1, 3, 8).numpy()}
    write_model(path, extra=unknown)
    assert rope_parameters(read_header(path)) == {}
    assert "its context is stretched" in converted(path)[1]["notes"][0]


def test_the_tokenizer_template_and_end_tokens_are_the_files(tmp_path: Path, file: Path) -> None:
    _, _ = converted(file)
    tokenizer = AutoTokenizer.from_pretrained(file.with_suffix(""))
    demo = AutoTokenizer.from_pretrained(demo_model_path())
    for text in ("Programming in C++ is like  12 things.\n\n ünï 語", " <|endoftext|> a"):
        assert tokenizer.encode(text) == demo.encode(text)
    assert tokenizer.chat_template == CHAT_TEMPLATE
    generation = json.loads((file.with_suffix("") / "generation_config.json").read_text())
    assert generation["eos_token_id"] == 0
    assert "bos_token_id" not in generation
    # A second end of a turn is named by the file, a third by its template.
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_end|>", "<|eot_id|>"]})
    path = tmp_path / "ends.gguf"
    template = "{{ '<|im_end|>' }}"
    write_model(path, facts={"tokenizer.chat_template": template, "tokenizer.ggml.eot_token_id": 5})
    config = make_model("llama").config
    assert end_ids(read_header(path), tokenizer, config) == [0, 5, 1024]


def test_weights_are_widened_once_and_the_build_says_so(tmp_path: Path, repo: Path) -> None:
    path = tmp_path / "Tiny.Q8_0.gguf"
    original = write_model(path, kind=Q8_0)
    reports: list[str] = []
    result = build_spec(BuildSpec("hf", str(path), output=repo), report=reports.append)
    assert "its Q8_0 weights are widened to bfloat16: 0 MB" in reports
    assert result.name == "Tiny.Q8_0"
    assert result.manifest.source == {"kind": "local", "file": "Tiny.Q8_0.gguf"}
    folder = result.folder / "1" / "model"
    loaded = AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
    assert loaded.dtype == torch.bfloat16
    expected, given = original.state_dict(), loaded.state_dict()
    for name, weights in expected.items():
        # An eighth bit of a weight, and as much again from the widening.
        torch.testing.assert_close(given[name].float(), weights, atol=0.03, rtol=0.01)
    modes = {file.stat().st_mode & 0o777 for file in folder.iterdir()}
    assert len(modes) == 1
    # Nothing of the conversion stays behind.
    assert {entry.name for entry in tmp_path.iterdir()} == {"repo", path.name}
    assert str(tmp_path) not in "".join(file.read_text() for file in folder.glob("*.json"))


def test_two_conversions_of_a_file_are_the_same(tmp_path: Path, file: Path) -> None:
    first, second = tmp_path / "a", tmp_path / "b"
    for target in (first, second):
        convert(file, target, "float32")
    files = [path.name for path in first.iterdir()]
    assert len(files) > 4
    assert all((first / name).read_bytes() == (second / name).read_bytes() for name in files)


def test_a_folder_with_one_gguf_file_is_that_model(file: Path, repo: Path) -> None:
    result = llmserve.build("iterative", str(file.parent), output=repo, name="tiny")
    assert result.manifest.source == {"kind": "local", "file": file.name}
    shutil.copyfile(file, file.with_name("other.gguf"))
    with pytest.raises(ModelSourceError, match=r"has 2 GGUF files: name one: \S+other"):
        llmserve.build("hf", str(file.parent), output=repo, name="tiny")


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        (
            {"facts": {"general.architecture": "frobnicate"}},
            "is of the architecture 'frobnicate', of which transformers .* cannot read",
        ),
        (
            {"facts": {"tokenizer.ggml.model": "frobnicate"}},
            "has a tokenizer, 'frobnicate', that transformers cannot read",
        ),
        (
            {"facts": {"general.architecture": "t5encoder"}},
            "'t5encoder', which is no causal language model",
        ),
        ({"left_out": "ffn_up"}, r"lacks 2 of the model's weights, such as model\.layers\.0\.mlp"),
        ({"facts": {"llama.embedding_length": "wide"}}, "architecture 'llama', of which transf"),
    ],
)
def test_what_transformers_cannot_read_is_refused(
    tmp_path: Path, changes: dict[str, Any], why: str
) -> None:
    path = tmp_path / "m.gguf"
    write_model(path, **changes)
    with pytest.raises(Refused, match=why) as refused:
        converted(path)
    assert "\n" not in str(refused.value)
    # Nothing but the header has been read by then.
    assert "left_out" in changes or not any(path.with_suffix("").glob("*"))


def test_a_build_refuses_in_one_line_and_leaves_nothing(tmp_path: Path, repo: Path) -> None:
    path = tmp_path / "m.gguf"

    def refused(**options: Any) -> str:
        with pytest.raises(LLMServeError) as error:
            llmserve.build("hf", str(path), output=repo, **options)
        assert "\n" not in str(error.value)
        assert [*tmp_path.iterdir()] == [path]
        return str(error.value)

    # Twice as many tokens as there are rows for.
    write_model(path, facts={"llama.vocab_size": 2048})
    assert "m.gguf cannot be read by transformers" in refused()
    assert "is converted, so its weights cannot stay" in refused(weights="reference")
    with path.open("r+b") as content:
        content.truncate(path.stat().st_size - 1)
    assert "bytes of at least" in refused()


@pytest.mark.parametrize(
    ("failure", "words"),
    [
        (OSError(errno.ENOSPC, "No space left"), "No space left: make some space"),
        (RuntimeError("it was not written (os error 28)"), "error 28\\): make some space"),
        (RuntimeError("these tensors share memory"), "share memory: build from the model that"),
    ],
)
def test_a_full_disk_is_told_from_other_failures(
    tmp_path: Path, repo: Path, monkeypatch: pytest.MonkeyPatch, failure: Exception, words: str
) -> None:
    path = tmp_path / "m.gguf"
    write_model(path)

    def here(arguments: list[str], **_: object) -> Ended:
        main(Path(arguments[-3]), Path(arguments[-2]), arguments[-1])
        return Ended(0)

    def full(*_: object, **__: object) -> None:
        raise failure

    with monkeypatch.context() as patch:
        patch.setattr("llmserve.builder.gguf.conversion.run_program", here)
        patch.setattr(PreTrainedModel, "save_pretrained", full)
        with pytest.raises(OutputError, match=f"cannot be written as a folder: .*{words}"):
            llmserve.build("hf", str(path), output=repo)
    assert [*tmp_path.iterdir()] == [path]


def test_a_disk_with_too_little_space_is_refused_first(
    tmp_path: Path, repo: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "m.gguf"
    write_model(path)
    monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=1000))
    with pytest.raises(OutputError, match=r"its weights take \S+ MB in float32, and the disk of "):
        llmserve.build("hf", str(path), output=repo, fit=False)
    assert [*tmp_path.iterdir()] == [path]


def test_an_unexpected_bias_is_reported(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    write_model(path, extra={"blk.0.attn_q.bias": torch.ones(64).numpy()})
    assert converted(path)[1]["notes"][0].startswith("64 of its ")


def test_without_the_package_the_command_that_installs_it_is_named(
    file: Path, repo: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("llmserve.builder.gguf.admission._READERS", ("gguf", "no_such_package"))
    with pytest.raises(ModelSourceError, match=r"are not installed: .* install .*\[gguf\]"):
        llmserve.build("hf", str(file), output=repo)


@pytest.mark.parametrize(
    ("model", "name"),
    [
        ("acme/tiny-GGUF:tiny.Q4_K_M.gguf", "tiny.Q4_K_M"),
        ("acme/tiny-GGUF:quants/tiny.gguf", "tiny"),
        ("models/tiny.gguf", "tiny"),
        ("TINY.GGUF", "TINY"),
        (".gguf", "model"),
    ],
)
def test_a_model_is_named_after_its_file(model: str, name: str) -> None:
    assert model_name_from(model) == name


def test_one_file_of_a_model_on_the_hub(file: Path, repo: Path) -> None:
    hub = Hub({"quants/tiny.gguf": file.read_bytes()})
    clean = {key: value for key, value in os.environ.items() if not key.startswith("HF_")}
    command = ["build", "--plugin", "hf", "--output", str(repo), "--model"]
    with hub.serving() as url:
        env = {**clean, "HF_HOME": str(repo.parent / "home"), "HF_ENDPOINT": url}
        done = run(*command, "acme/tiny:quants/tiny.gguf", env=env)
        missing = run(*command, "acme/tiny:other.gguf", env=env)
    assert done.returncode == 0, done.stderr
    manifest = json.loads((repo / "tiny" / "llmserve.json").read_text())
    assert manifest["source"] == {
        "kind": "hub", "id": "acme/tiny", "file": "tiny.gguf", "revision": COMMIT
    }  # fmt: skip
    assert "path" in manifest["components"]["generator"]["settings"]
    assert missing.returncode == 3
    assert "acme/tiny has no file other.gguf: see its page" in missing.stderr


def test_a_file_that_is_not_there(repo: Path) -> None:
    with pytest.raises(ModelSourceError, match=r"no file at ./m\.gguf: name a local"):
        llmserve.build("hf", "./m.gguf", output=repo)


def test_a_conversion_says_how_much_is_done(tmp_path: Path, repo: Path) -> None:
    path = tmp_path / "m.gguf"
    write_model(path)
    said: list[str] = []
    build_spec(BuildSpec("hf", str(path), output=repo), report=said.append)
    shares = [part.share for part in said if isinstance(part, PartDone)]
    assert len(shares) > 3
    assert shares == sorted(shares)
    assert shares[-1] > 0.4
