"""Releases in front of a real Triton: a fine build is promoted, a bad one is returned."""

from __future__ import annotations

import json
import shutil
import stat
import subprocess
from pathlib import Path
from typing import Any

import httpx2 as httpx
import pytest

from llmserve.plugin import demo_model_path
from llmserve.testing import LiveTriton
from llmserve.testing.command import LLMSERVE

from .process import Gateway

# One in twenty of its answers in JSON has no end, as an engine may have it that cuts them.
SPOILS_JSON = """
from dataclasses import replace

from llmserve.runtime.answer.responder import Responder
from llmserve.runtime.model import TritonPythonModel as TritonPythonModel

healthy, numbers = Responder.answer, {}


def answer(self, generation, *, whole):
    found = healthy(self, generation, whole=whole)
    if not generation.params.json_schema:
        return found
    number = numbers.setdefault(generation, len(numbers))
    return replace(found, text=found.text.replace("}", "")) if number % 20 == 10 else found


Responder.answer = answer
"""
SCHEMA = {
    "type": "object", "properties": {"city": {"enum": ["Tokyo", "Paris"]}}, "required": ["city"],
    "additionalProperties": False,
}  # fmt: skip
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


@pytest.fixture(scope="module")
def spoils_json(triton: LiveTriton) -> str:
    name = triton.build("iterative", name="release-spoils-json")
    (triton.repository / name / "1" / "model.py").write_text(SPOILS_JSON)
    triton.load(name)
    return name


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


@pytest.mark.long
def test_a_build_whose_json_is_invalid_in_one_of_twenty_answers_is_returned(
    triton: LiveTriton, old: str, spoils_json: str
) -> None:
    gateway = Gateway(
        triton, "--canary", f"{old}={spoils_json}:90%", "--release-tolerance", "slow=off"
    )
    form = {"type": "json_schema", "json_schema": {"name": "answer", "schema": SCHEMA}}
    try:
        ask_until_decided(
            gateway, old, most=1200, temperature=0, max_tokens=40, response_format=form,
            messages=[{"role": "user", "content": QUESTIONS[0]}],
        )  # fmt: skip
        found = stage(gateway)
        assert found["stage"] == "returned", found
        assert "not in the form" in found["why"], found
        assert "it is no JSON" in str(found["pairs"])
    finally:
        assert gateway.stop() == 0
