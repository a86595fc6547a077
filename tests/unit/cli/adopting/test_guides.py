"""The commands of the guides for those who come from another server do what they say."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest
from click.testing import CliRunner

from llmserve.builder.server_file import ServerFile
from llmserve_cli.group import cli
from tests.site.blocks import blocks
from tests.site.pages import ROOT
from tests.unit.cli.adopting.command_lines import LINES
from tests.unit.cli.adopting.repositories import iterative

PAGES = sorted((ROOT / "docs/guides").glob("from-*.md"))
COMMANDS = [
    (page.name, line)
    for page in PAGES
    for block in blocks(page.read_text(encoding="utf-8"), page.name)
    for line in block.commands()
    if line.startswith("llmserve adopt ")
]


def test_each_guide_has_commands() -> None:
    names = {page for page, _ in COMMANDS}
    assert names == {f"from-{name}.md" for name in ("ollama", "ovms", "tgi", "triton", "vllm")}


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder with the files that the guides name."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    texts = {line.file: line.text for line in LINES}
    start = next(line.text for line in LINES if "start-tgi-qwen" in line.cited)
    for name in ("compose.yaml", "deployment.yaml", "Modelfile"):
        Path(name).write_text(texts[name], encoding="utf-8")
    Path("start-tgi.sh").write_text(start, encoding="utf-8")
    Path("models").mkdir()
    iterative(Path("models"))
    Path("llama").mkdir()
    Path("llama/graph.pbtxt").write_text(
        'node { calculator: "HttpLLMCalculator" node_options: {\n'
        '[type.googleapis.com / mediapipe.LLMCalculatorOptions]: { models_path: "./" } } }',
        encoding="utf-8",
    )
    config = {"mediapipe_config_list": [{"name": "llama", "base_path": "llama"}]}
    Path("config.json").write_text(json.dumps(config), encoding="utf-8")
    blobs, manifests = Path(".ollama/models/blobs"), Path(".ollama/models/manifests/r/library/m")
    blobs.mkdir(parents=True)
    manifests.mkdir(parents=True)
    (blobs / f"sha256-{'0' * 64}").write_bytes(b"GGUF")
    layer = {"mediaType": "application/vnd.ollama.image.model", "digest": f"sha256:{'0' * 64}"}
    (manifests / "latest").write_text(json.dumps({"layers": [layer]}), encoding="utf-8")


@pytest.mark.parametrize(("page", "line"), COMMANDS)
def test_a_command_of_a_guide_writes_a_file(page: str, line: str) -> None:
    words = shlex.split(line.replace("~", str(Path.cwd())), comments=True)[2:]
    if "--compare" in words:
        # The server that it names does not run; tests/live/test_adopt.py compares two that do.
        at = words.index("--compare")
        words = words[:at]
    result = CliRunner().invoke(cli, ["adopt", *words], standalone_mode=False)
    assert result.exception is None, result.exception
    if "--dry-run" in words:
        assert "[models." in result.stdout
        return
    out = words[words.index("--out") + 1] if "--out" in words else "llmserve.toml"
    assert ServerFile.read(Path(out)).models
