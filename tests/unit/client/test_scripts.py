"""The scripts that models are emitted with: each stands alone, and they have the same parts."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
from tritonclient.grpc import model_config_pb2

from llmserve.builder.client_script import client_script
from llmserve.client import messages, script, script_parts, value_script
from llmserve.contract import passport
from llmserve.contract.tensors import TYPES


@pytest.mark.parametrize("module", [script, value_script])
def test_an_emitted_client_stands_alone_and_has_nothing_that_it_does_not_use(
    module: ModuleType, tmp_path: Path
) -> None:
    path = tmp_path / "client.py"
    path.write_text(client_script(module.__name__), encoding="utf-8")
    tree = ast.parse(path.read_text(encoding="utf-8"))
    assert ast.get_docstring(tree) == module.__doc__.strip()  # type: ignore[union-attr]
    of = [node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    assert not [name for name in of if name and name.startswith("llmserve")]
    defined = [node.name for node in tree.body if isinstance(node, (ast.FunctionDef, ast.ClassDef))]
    assert len(defined) == len(set(defined))
    # Names that are missing, imports that are not used or sorted, and how it is laid out.
    for words in (["check", "--select", "F,I,E"], ["format", "--check"]):
        command = [sys.executable, "-m", "ruff", *words, "--line-length", "100", str(path)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout


def test_a_client_of_others_is_emitted_as_it_is() -> None:
    source = Path(str(messages.__file__)).read_text(encoding="utf-8")
    assert client_script("llmserve.client.messages") == source


@pytest.mark.parametrize("short", [name for name in TYPES if name != "TYPE_STRING"])
def test_numbers_of_every_type_are_read(short: str) -> None:
    values = np.array([0, 1, 1]).astype(TYPES[short])
    assert value_script._numbers(short.removeprefix("TYPE_"), values.tobytes()) == [0, 1, 1]


def test_options_are_sent_alike() -> None:
    options = {"a": 0.5, "b": True, "c": 3, "d": [1], "e": "x", "f": None, "g": 2**70}
    config: Any = SimpleNamespace(name="m", max_batch_size=8)
    ours = value_script._request(config, ["text"], None, options).parameters
    assert ours == script._request(config, "text", options).parameters
    assert ours["a"].double_param == 0.5


def test_a_line_of_values_is_json_and_cannot_control_the_terminal() -> None:
    values = {"label": ["b\x9b31mse", "del\x7f", "gr\u00fcn", "new\u2028line", "\x1b[1m"]}
    line = value_script._line(values)
    assert json.loads(line) == values
    assert "gr\u00fcn" in line
    assert line.removesuffix("\n").isprintable()


OWN = passport.Passport(*(f"{number:02x}" * 32 for number in range(6))).fingerprint


def config_with(fingerprint: str) -> Any:
    config = model_config_pb2.ModelConfig(name="m")
    if fingerprint:
        config.parameters[script_parts.FINGERPRINT].string_value = fingerprint
    return config


def test_a_pinned_model_is_the_one_of_its_fingerprint() -> None:
    assert script_parts.FINGERPRINT == passport.DECLARED
    assert tuple(part.replace("_", " ") for part in passport.PARTS) == script_parts.PARTS
    script_parts.check_pin(config_with(""), None)
    script_parts.check_pin(config_with(OWN), OWN)


@pytest.mark.parametrize("at", range(6))
def test_another_model_is_refused_with_what_has_changed(at: int) -> None:
    parts = OWN.split("-")
    parts[at] = parts[at][:-1] + "7"
    pinned = "-".join(parts)
    with pytest.raises(script_parts.RequestError) as refused:
        script_parts.check_pin(config_with(OWN), pinned)
    assert refused.value.exit_code == script_parts.INCOMPATIBLE
    (part,) = passport.changed_parts(pinned, OWN)
    assert f"it has other {part.replace('_', ' ')} (its own is {OWN})" in str(refused.value)


@pytest.mark.parametrize(
    ("pin", "own", "code"), [("demo", OWN, 2), ("fp_abc", OWN, 2), (OWN, "", 3)]
)
def test_a_pin_that_cannot_be_compared_is_no_match(pin: str, own: str, code: int) -> None:
    with pytest.raises(script_parts.RequestError) as refused:
        script_parts.check_pin(config_with(own), pin)
    assert refused.value.exit_code == code


def test_only_the_client_of_a_model_that_reads_images_takes_them(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    files = [tmp_path / "a.png", tmp_path / "b.jpg"]
    for file in files:
        file.write_bytes(file.name.encode())
    asked = ["What?", "--image", str(files[0]), "--image", str(files[1])]
    inputs = ["image_url", "max_tokens"]
    monkeypatch.setattr(script, "about_model", lambda: {"contract": {"inputs": inputs}})
    assert script._parser().parse_args(asked).images == [*map(str, files)]
    assert script._parser().parse_args(["What?"]).images == []
    for about in ({"contract": {"inputs": ["max_tokens"]}}, {"name": "m"}):
        monkeypatch.setattr(script, "about_model", lambda about=about: about)
        assert "--image" not in script._parser().format_help()
        assert "images" not in vars(script._parser().parse_args(["What?"]))
    sent = script._shown("What?", [files[0], b"b.jpg"])
    assert [url.partition(",")[2] for url in sent["image_url"]] == ["YS5wbmc=", "Yi5qcGc="]
    (message,) = json.loads(sent["messages"])
    assert message["role"] == "user"
    assert message["content"] == [{"type": "image"}] * 2 + [{"type": "text", "text": "What?"}]
    assert script._shown("What?", []) == {}
    with pytest.raises(script_parts.RequestError, match=r"c\.png cannot be read: No such file"):
        script._shown("What?", ["c.png"])
