"""Releases in front of a real Triton: a fine build is promoted, and bad ones are returned."""

from __future__ import annotations

import json
import os
import shutil
import stat
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2 as httpx
import pytest

from llmserve.demo import demo_model_path
from llmserve.testing import LiveTriton
from llmserve.testing.command import LLMSERVE

from .process import Gateway
from .scripted.scripted_model import END, START

QUESTIONS = ("What is the capital of Japan?", "What is the capital of France?", "Who are you?")


@pytest.fixture(scope="module")
def old(triton: LiveTriton) -> str:
    return triton.build("hf", name="release-old")


@pytest.fixture(scope="module")
def wrong(triton: LiveTriton, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The same weights, with a template that loses the roles."""
    folder = tmp_path_factory.mktemp("wrong") / "model"
    shutil.copytree(demo_model_path(), folder)
    (folder / "chat_template.jinja").unlink(missing_ok=True)
    config = folder / "tokenizer_config.json"
    fields = json.loads(config.read_text())
    fields["chat_template"] = "{% for m in messages %}{{ m['content'] }} {% endfor %}"
    config.write_text(json.dumps(fields))
    return triton.build("hf", str(folder), name="release-wrong")


def command(gateway: Gateway, *words: str) -> str:
    done = subprocess.run(
        [*LLMSERVE, "release", *words, "--openai", gateway.url],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    return done.stdout + done.stderr


def stage(gateway: Gateway) -> dict[str, Any]:
    (found,) = httpx.get(f"{gateway.root}/releases").json()["releases"]
    return dict(found)


def ask_until_decided(gateway: Gateway, model: str, most: int = 400, **fields: Any) -> None:
    """Ask as many users do; every one of them has a whole answer."""
    for number in range(most):
        body = {"model": model, "user": f"user {number}", "max_tokens": 12, **fields}
        body.setdefault("messages", [{"role": "user", "content": QUESTIONS[number % 3]}])
        answer = gateway.post("/v1/chat/completions", body)
        assert answer.status_code == 200, answer.text
        assert answer.json()["model"] == model
        if number % 20 == 19 and stage(gateway)["stage"] != "watched":
            return


@pytest.mark.long
def test_a_fine_build_is_promoted_and_one_with_a_wrong_template_returned(
    triton: LiveTriton, old: str, wrong: str, tmp_path: Path
) -> None:
    fine = triton.build("iterative", name="release-fine")
    for new, expected in ((fine, "promoted"), (wrong, "returned")):
        gateway = Gateway(
            triton, "--canary", f"{old}={new}:90%", "--keep-texts", "1",
            # Two engines, on a machine that does other things too.
            "--release-tolerance", "slow=off",
        )  # fmt: skip
        try:
            ask_until_decided(gateway, old, temperature=0)
            found = stage(gateway)
            assert found["stage"] == expected, found
            words = command(gateway, "status")
            assert f"{new} beside {old} (canary) is {expected}" in words
            page = tmp_path / f"{new}.html"
            command(gateway, "report", old, str(page))
            for file in (page, page.with_suffix(".json")):
                assert stat.S_IMODE(file.stat().st_mode) == 0o600
            assert "What is the capital of Japan?" in page.read_text()
        finally:
            assert gateway.stop() == 0
    assert "its prompt has" in str(found["pairs"])


@pytest.fixture(scope="module")
def scripted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveTriton]:
    """A Triton with the scripted plugin, which only this module installs."""
    folder = tmp_path_factory.mktemp("site")
    info = folder / "scripted_model-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: scripted-model\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[llmserve.api3]\nscripted = scripted_model\n")
    with pytest.MonkeyPatch.context() as patch:
        for entry in (folder, Path(__file__).with_name("scripted")):
            patch.syspath_prepend(entry)
            path = os.pathsep.join(filter(None, [str(entry), os.environ.get("PYTHONPATH")]))
            patch.setenv("PYTHONPATH", path)
        with LiveTriton.start(tmp_path_factory.mktemp("triton") / "models") as live:
            yield live


@pytest.mark.long
def test_a_build_with_invalid_json_is_returned(scripted: LiveTriton, tmp_path: Path) -> None:
    """It cannot end the objects of one function in five."""
    from transformers import AutoTokenizer

    for name, script in (("json-old", "{}"), ("json-new", "{{ '{' }}")):
        tokenizer = AutoTokenizer.from_pretrained(demo_model_path())
        tokenizer.chat_template = (
            "{% set said = messages[-1]['content'] %}" + START
            + "{% if 'broken' in said %}" + script + "{% else %}{}{% endif %}" + END
        )  # fmt: skip
        tokenizer.save_pretrained(tmp_path / name)
        scripted.build("scripted", str(tmp_path / name), name=name, decoupled=True)
    gateway = Gateway(scripted, "--shadow", "json-old=json-new:100%")
    try:
        for number in range(300):
            body = {
                "model": "json-old", "max_tokens": 12,
                "response_format": {"type": "json_object"},
                "messages": [{"role": "user", "content": "broken" if number % 5 == 0 else "fine"}],
            }  # fmt: skip
            answer = gateway.post("/v1/chat/completions", body)
            assert answer.status_code == 200, answer.text
            assert answer.json()["choices"][0]["message"]["content"] == "{}"
            if number % 20 == 19 and stage(gateway)["stage"] != "watched":
                break
        found = stage(gateway)
        assert found["stage"] == "returned", found
        assert "not in the form" in found["why"]
        assert command(gateway, "abort", "json-old").count("is aborted") == 1
    finally:
        assert gateway.stop() == 0
