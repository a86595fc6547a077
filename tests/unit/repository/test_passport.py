"""Whatever a model's answers depend on changes its fingerprint, in its place; nothing else does."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from hypothesis import given
from hypothesis import strategies as st

from llmserve.contract.passport import PARTS, Passport, changed_parts, is_fingerprint
from llmserve.plugin import Manifest, differences
from llmserve.repository.passport import built_files, passport_of
from llmserve_cli.group import cli

FILES: dict[str, Any] = {
    "config.pbtxt": "name",
    "client.py": "client",
    "1/model.py": "code",
    "1/model/config.json": {"hidden_size": 8, "transformers_version": "5.0"},
    "1/model/generation_config.json": {"eos_token_id": 2, "transformers_version": "5.0"},
    "1/model/model.safetensors": "weights",
    "1/tokenizer/tokenizer.json": {"version": "1.0"},
    "1/tokenizer/tokenizer_config.json": {"chat_template": "{{ messages }}", "eos": "</s>"},
    "1/adapters/sql/adapter_config.json": {"r": 8},
}
COMPONENTS = {
    "generator": {"name": "engine", "runtime": "a:B", "settings": {"path": "model", "dtype": "fp"}},
    "tokenizer": {"name": "fast", "runtime": "a:C", "settings": {"path": "tokenizer"}},
}


def make(folder: Path) -> Path:
    for path, content in FILES.items():
        write(folder / path, content)
    Manifest(
        name=folder.name, recipe="ours", plugin="ours", exchange="stream", source={}, options={},
        components=COMPONENTS, contract={"defaults": {"max_tokens": 0}, "inputs": ["text_input"]},
        packages={"torch": "2.0"}, trust_remote_code=False, llmserve="1",
    ).write(folder)  # fmt: skip
    return folder


def write(path: Path, content: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    text = content if isinstance(content, str) else json.dumps(content)
    path.write_text(text, encoding="utf-8")


def fingerprint(folder: Path) -> str:
    return passport_of(built_files(folder)).fingerprint


def edit(path: str, content: Any) -> Callable[[Path], None]:
    return lambda folder: write(folder / path, content)


def say(**changes: Any) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        manifest = Manifest.read(folder)
        assert manifest
        replace(manifest, **changes).write(folder)

    return change


BFLOAT = {**COMPONENTS["generator"], "settings": {"path": "model", "dtype": "bf"}}
CHANGES = {
    "weights": [
        edit("1/model/model.safetensors", "other"),
        edit("1/model/config.json", {"hidden_size": 9}),
        edit("1/model/more.bin", "more"),
    ],
    "tokenizer": [
        edit("1/tokenizer/tokenizer.json", {"version": "1.1"}),
        edit("1/tokenizer/tokenizer_config.json", {"chat_template": "{{ messages }}", "eos": "."}),
    ],
    "chat_template": [
        edit("1/tokenizer/tokenizer_config.json", {"chat_template": "{{ m }}", "eos": "</s>"}),
        edit("1/tokenizer/tokenizer_config.json", {"eos": "</s>"}),
        edit("1/tokenizer/chat_template.jinja", "{{ messages }}"),
    ],
    "defaults": [
        edit("1/model/generation_config.json", {"eos_token_id": 3}),
        say(contract={"defaults": {"max_tokens": 9}, "inputs": ["text_input"]}),
    ],
    "settings": [say(components={**COMPONENTS, "generator": BFLOAT})],
    "engine": [
        edit("1/model.py", "other code"),
        say(packages={"torch": "2.1"}),
        say(contract={"defaults": {"max_tokens": 0}, "inputs": ["text_input", "seed"]}),
    ],
}
NO_CHANGES = [
    edit("config.pbtxt", "other"),
    edit("client.py", "other"),
    edit("1/model/config.json", {"hidden_size": 8, "transformers_version": "5.1"}),
    edit("1/adapters/sql/adapter_config.json", {"r": 9}),
    edit("1/adapters/other/adapter_model.safetensors", "other"),
    say(source={"kind": "hub"}),
]


@pytest.mark.parametrize(
    ("part", "change"), [(part, change) for part in CHANGES for change in CHANGES[part]]
)
def test_each_change_is_seen_in_its_part(
    tmp_path: Path, part: str, change: Callable[[Path], None]
) -> None:
    old, new = make(tmp_path / "old" / "m"), make(tmp_path / "new" / "m")
    assert fingerprint(old) == fingerprint(new)
    change(new)
    assert changed_parts(fingerprint(old), fingerprint(new)) == [part]
    assert [*differences(old, new)] == [part]
    assert all(differences(old, new).values()), "it says what differs"


@pytest.mark.parametrize("change", NO_CHANGES)
def test_what_makes_no_answers_is_none_of_it(
    tmp_path: Path, change: Callable[[Path], None]
) -> None:
    model = make(tmp_path / "m")
    before = fingerprint(model)
    change(model)
    assert fingerprint(model) == before


def test_a_model_is_the_same_by_another_name(tmp_path: Path) -> None:
    def assembled(folder: Path) -> Path:
        stage = {"name": f"{folder.name}_stage", "runtime": "a:D", "settings": {"path": ""}}
        engine = {"engine_model": f"{folder.name}_engine"}
        whole = make(folder)
        part = make(folder.parent / f"{folder.name}_stage")
        say(parts=[part.name])(whole)
        say(part_of=whole.name, components={"stage": {**stage, "settings": engine}})(part)
        return whole

    one, two = assembled(tmp_path / "one"), assembled(tmp_path / "two")
    assert fingerprint(one) == fingerprint(two)
    write(tmp_path / "two_stage" / "1" / "model" / "model.safetensors", "other")
    assert changed_parts(fingerprint(one), fingerprint(two)) == ["weights"]


def test_weights_elsewhere_are_told_by_their_files(tmp_path: Path) -> None:
    elsewhere = tmp_path / "checkpoint"
    write(elsewhere / "model.safetensors", "weights")
    model = make(tmp_path / "m")
    generator = {**COMPONENTS["generator"], "settings": {"path": str(elsewhere)}}
    say(components={"generator": generator})(model)
    before = fingerprint(model)
    shutil.move(str(elsewhere), str(tmp_path / "moved"))
    generator = {**generator, "settings": {"path": str(tmp_path / "moved")}}
    say(components={"generator": generator})(model)
    assert fingerprint(model) == before
    write(tmp_path / "moved" / "model.safetensors", "longer weights")
    assert changed_parts(before, fingerprint(model)) == ["weights"]


_DIGEST = st.binary(min_size=32, max_size=32).map(bytes.hex)


@given(st.lists(_DIGEST, min_size=len(PARTS), max_size=len(PARTS)), st.sampled_from(PARTS), _DIGEST)
def test_a_fingerprint_has_a_place_for_each_part(digests: list[str], part: str, other: str) -> None:
    old = Passport(*digests)
    new = replace(old, **{part: other})
    assert is_fingerprint(old.fingerprint)
    # Five characters of 32 are the first 25 bits.
    same = int(getattr(old, part), 16) >> 231 == int(other, 16) >> 231
    assert changed_parts(old.fingerprint, new.fingerprint) == ([] if same else [part])


@pytest.mark.parametrize("text", ["", "fp_", "fp_aaaaa", "fp_" + "-".join(["aaaa"] * 6), "gpt2"])
def test_other_words_are_no_fingerprints(text: str) -> None:
    assert not is_fingerprint(text)


def test_the_command_says_what_differs(tmp_path: Path) -> None:
    def check(*words: Path) -> Result:
        said = ["check", "--passport", *map(str, words)]
        return CliRunner().invoke(cli, said, standalone_mode=False)

    old, new = make(tmp_path / "old" / "m"), make(tmp_path / "new" / "m")
    edit("1/tokenizer/chat_template.jinja", "x")(new)
    say(packages={"torch": "2.1"})(new)
    found = check(old, new)
    assert found.return_value == 3
    assert found.output.splitlines() == [
        "chat template: chat_template.jinja",
        "engine: torch: 2.0 -> 2.1",
    ]
    same = check(old, old)
    assert (same.return_value, same.output) == (0, "nothing differs that answers depend on\n")
    assert "no model that llmserve built" in str(check(tmp_path / "no", new).exception)
