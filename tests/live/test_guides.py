"""The code of the guides, and their requests, run as they stand there."""

from __future__ import annotations

import json
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from llmserve.demo import demo_model_path
from llmserve.testing import LiveTriton
from llmserve.testing.tiny_encoders import save_classifier, save_encoder
from tests.live.gateway import gateway_of
from tests.site.blocks import RUN_BY, Block, blocks
from tests.support import ROOT

pytestmark = pytest.mark.long

PAGES = [page for page, test in RUN_BY.items() if test == "tests/live/test_guides.py"]
FINE_TUNED = "docs/guides/fine-tuned.md"
TEXTS = ("The cats sleep on the sofa.", "Bread is made of flour.", "It rains.", "Dogs bark.")


@pytest.fixture(scope="module")
def gateway(triton: LiveTriton, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    batches = str(tmp_path_factory.mktemp("batches"))
    with gateway_of(triton, "--batches", batches) as gateway:
        yield gateway.root.removeprefix("http://")


def _blocks(page: str) -> list[Block]:
    return [*blocks((ROOT / page).read_text(encoding="utf-8"), page)]


@pytest.fixture(scope="module")
def names(triton: LiveTriton, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The models that the guides name, as they are called here."""
    folder = tmp_path_factory.mktemp("models")
    embedder = save_encoder(folder / "embedder", pooling="mean_tokens")
    ranker = save_classifier(folder / "ranker", num_labels=1)
    moods = save_classifier(folder / "moods", num_labels=3)
    demo = triton.build("hf", "demo")
    own = folder / "my-model"
    shutil.copytree(demo_model_path(), own)
    (template,) = (block for block in _blocks(FINE_TUNED) if block.title.endswith(".jinja"))
    (own / "chat_template.jinja").write_text(template.text, encoding="utf-8")
    return {
        "demo": demo,
        "writer": demo,
        "mine": triton.build("hf", str(own)),
        "minilm": triton.build("embed", str(embedder), generator="encoder"),
        "ranker": triton.build("rerank", str(ranker), generator="classifier"),
        "moods": triton.build("classify", str(moods), generator="classifier"),
    }


def test_the_guides_are_found() -> None:
    assert len(PAGES) > 7


@pytest.mark.parametrize("page", PAGES)
def test_what_a_guide_has_runs(
    page: str,
    gateway: str,
    triton: LiveTriton,
    names: dict[str, str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    prepare(tmp_path, names["demo"])
    monkeypatch.setattr(sys, "argv", ["ask.py", "texts", "Where do the cats sleep?"])
    # The blocks of a page belong together.
    space: dict[str, Any] = {"__name__": "page"}
    printed = 0
    for block in _blocks(page):
        if block.why_not:
            continue
        if block.language == "python":
            code = adapted(block.text, gateway, triton, names)
            exec(compile(code, str(block), "exec", dont_inherit=True), space)
        for command in block.commands():
            if command.startswith("curl "):
                print(answer(adapted(command, gateway, triton, names)))
        printed += bool(capsys.readouterr().out.strip())
    # This one shows a class of tests.
    assert printed or page.endswith("plugin.md")


def test_a_template_of_ones_own_makes_the_prompt(
    triton: LiveTriton, names: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    (code,) = (block.text for block in _blocks(FINE_TUNED) if block.language == "python")
    exec(compile(adapted(code, "", triton, names), FINE_TUNED, "exec", dont_inherit=True), {})
    assert capsys.readouterr().out == "user: Hello\nassistant:\n"


def prepare(folder: Path, model: str) -> None:
    """Write the files that guides read."""
    (folder / "texts").mkdir()
    for number, text in enumerate(TEXTS):
        (folder / "texts" / f"{number}.txt").write_text(text, encoding="utf-8")
    body = {"model": model, "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4}
    line = {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": body}
    (folder / "requests.jsonl").write_text(json.dumps(line) + "\n", encoding="utf-8")


def adapted(text: str, gateway: str, triton: LiveTriton, names: dict[str, str]) -> str:
    """Replace addresses and names of models by those of the test; nothing waits for long."""
    for host in ("127.0.0.1", "localhost"):
        text = text.replace(f"{host}:8080", gateway).replace(f"{host}:8001", triton.server.grpc_url)
    text = text.replace("connect()", f'connect("{triton.server.grpc_url}")')
    for name, here in names.items():
        text = text.replace(f'"{name}"', f'"{here}"')
    return text.replace("time.sleep(5)", "time.sleep(0.1)")


def answer(command: str) -> str:
    done = subprocess.run(shlex.split(command), capture_output=True, text=True, check=True)
    assert "error" not in done.stdout, done.stdout
    return done.stdout
