"""What is exported needs nothing of llmserve."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from llmserve import build
from llmserve.builder.server_file import ServerFile
from llmserve.errors import ConfigError, OutputError, UsageError
from llmserve.plugin import Repository, check_repository
from llmserve_cli.group import cli


def invoke(*words: str) -> Result:
    result = CliRunner().invoke(cli, [*words], standalone_mode=False)
    if result.exception is not None:
        raise result.exception
    return result


def export(name: str, folder: Path) -> Result:
    words = ["--repository", str(folder / "models"), "--out", str(folder / "plain")]
    return invoke("export", name, *words)


def holds_nothing_of_ours(folder: Path) -> None:
    texts = [path for path in folder.rglob("*") if path.suffix in (".pbtxt", ".json", ".py")]
    assert texts
    for path in texts:
        assert "llmserve" not in path.read_text(encoding="utf-8"), path


def test_a_model_of_vllm_becomes_one_of_its_own_backend(tmp_path: Path) -> None:
    engine_args = json.dumps({"seed": 0})
    build("vllm", "demo", name="writer", output=tmp_path / "models", max_model_len=64,
          engine_args=engine_args)  # fmt: skip
    result = export("writer", tmp_path)
    assert "lost: messages and tools" in result.stderr
    plain = tmp_path / "plain"
    holds_nothing_of_ours(plain)
    content = json.loads((plain / "writer/1/model.json").read_text(encoding="utf-8"))
    assert content == {
        "model": "/models/writer/1/model", "dtype": "float32", "max_model_len": 64, "seed": 0,
    }  # fmt: skip
    assert (plain / "writer/1/model/model.safetensors").is_file()
    with pytest.raises(OutputError, match="is there already"):
        export("writer", tmp_path)
    out = tmp_path / "llmserve.toml"
    invoke("adopt", str(plain), "--plugin", "vllm", "--model", "demo", "--out", str(out))
    spec = ServerFile.read(out).models["writer"]
    assert spec.options["max_model_len"] == 64, "and back"
    assert json.loads(str(spec.options["engine_args"])) == {"seed": 0}


def test_the_graph_of_a_model_is_written_and_what_is_lost_said(tmp_path: Path) -> None:
    build("gpt2-onnx", "demo", name="steps", output=tmp_path / "models")
    for folder in (tmp_path / "models").glob("steps*/"):
        # As serve --certify leaves it.
        (folder / "known-answers.json").write_text('{"llmserve": 1}')
    result = export("steps", tmp_path)
    assert "lost: the text" in result.stderr
    plain = tmp_path / "plain"
    holds_nothing_of_ours(plain)
    (model,) = Repository.open(plain)
    assert model.name == "steps_generator"
    assert model.config is not None
    assert model.config.backend == "onnxruntime"
    assert (model.folder / "1/model.onnx").is_file()
    assert not any(problem.fatal for problem in check_repository(plain, served_here=False))


def test_a_model_that_runs_with_our_code_is_refused(tmp_path: Path) -> None:
    build("hf", "demo", name="other", output=tmp_path / "models")
    with pytest.raises(ConfigError, match="hf cannot be exported"):
        export("other", tmp_path)
    with pytest.raises(ConfigError, match="there is no model gone"):
        export("gone", tmp_path)
    own = tmp_path / "models" / "own"
    own.mkdir()
    with pytest.raises(UsageError, match="it is plain already"):
        export("own", tmp_path)
    assert not (tmp_path / "plain").exists()
