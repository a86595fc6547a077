"""How large models are taken to be, also those that are built anew while they are served."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from llmserve.contract.report import State
from llmserve.repository.repository import Model
from llmserve.server import ServerSettings
from llmserve.server.keep import sizes as module
from llmserve.server.keep.memory import TritonMemory
from llmserve.server.keep.sizes import Sizes


class One:
    """Models of a repository, each of which takes what ``memory`` says once it is loaded."""

    def __init__(
        self,
        repository: Path,
        replicas: int = 1,
        texts: Mapping[str, tuple[str, str]] | None = None,
    ) -> None:
        self.memory: dict[str, int] = {}
        stubs = SimpleNamespace(
            memory=lambda name: (self.memory.get(name, 0),) * 2,
            of=lambda name: [1] if name in self.memory else [],
        )
        running: Any = SimpleNamespace(
            settings=ServerSettings(repository, texts=texts or {}),
            server=SimpleNamespace(stubs=stubs),
        )
        self.tritons = [TritonMemory(number) for number in range(replicas)]
        self.sizes = Sizes([running] * replicas, self.tritons)
        self.now = 0.0

    def size(self, name: str) -> float:
        self.now += 0.25
        self.sizes.look([name], self.now)
        return self.sizes.sizes()[name]

    def load(self, name: str, *parts: str) -> None:
        for triton in self.tritons:
            triton.add(name, State.READY, self.now, parts)
        self.size(name)

    def unload(self, name: str) -> None:
        for triton in self.tritons:
            triton.models[name].unloaded(self.now)
        self.size(name)


def built(repository: Path, name: str) -> None:
    """Replace a model's folder as a build does: both exist for a moment."""
    (repository / f".{name}").mkdir()
    if (repository / name).exists():
        (repository / name).rename(repository / f".old.{name}")
    (repository / f".{name}").rename(repository / name)
    if (repository / f".old.{name}").exists():
        (repository / f".old.{name}").rmdir()


@pytest.fixture
def sizes(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    sizes: dict[str, int] = {}
    for name in ("expected_memory", "first_memory"):
        monkeypatch.setattr(module, name, lambda model: sizes.get(model.name, 0))
    return sizes


def test_a_model_that_was_built_smaller_is_not_taken_for_what_it_was(
    tmp_path: Path, sizes: dict[str, int]
) -> None:
    built(tmp_path, "a")
    one = One(tmp_path)
    sizes["a"] = 10
    assert one.size("a") == 10
    built(tmp_path, "a")
    sizes["a"] = 3
    assert one.size("a") == 3, "it was refused until now, and never loaded"
    one.memory["a"] = 12
    one.load("a")
    built(tmp_path, "a")
    assert one.size("a") == 12, "the old one is still loaded"
    one.unload("a")
    assert one.size("a") == 3
    one.memory["a"] = 4
    one.load("a")
    one.unload("a")
    assert one.size("a") == 4, "the most that this build took"


def test_the_parts_of_a_new_model_count(
    tmp_path: Path, sizes: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    parts = property(lambda model: ("part",) if model.name == "whole" else ())
    monkeypatch.setattr(Model, "parts", parts)
    one = One(tmp_path)
    built(tmp_path, "part")
    built(tmp_path, "whole")
    sizes["part"] = 5
    assert one.size("whole") == 5
    assert one.sizes.parts() == {"whole": ("part",)}
    sizes["part"] = 7
    one.size("whole")
    built(tmp_path, "part")
    assert one.size("whole") == 7, "it was built anew alone"


def test_a_step_that_somebody_adds_to_an_ensemble_counts(
    tmp_path: Path, sizes: dict[str, int]
) -> None:
    built(tmp_path, "part")
    built(tmp_path, "whole")
    config = tmp_path / "whole" / "config.pbtxt"
    config.write_text('platform: "ensemble"')
    sizes["part"] = 5
    one = One(tmp_path)
    assert one.size("whole") == 0
    config.write_text('platform: "ensemble" ensemble_scheduling { step { model_name: "part" } }')
    os.utime(config, (2**31, 2**31))
    assert one.size("whole") == 5
    assert one.sizes.parts() == {"whole": ("part",)}


def test_a_part_that_triton_itself_runs_counts_by_its_files(
    tmp_path: Path, sizes: dict[str, int]
) -> None:
    for name, backend in (("m", "python"), ("graph", "onnxruntime")):
        built(tmp_path, name)
        (tmp_path / name / "config.pbtxt").write_text(f'backend: "{backend}"')
    one = One(tmp_path, replicas=2)
    sizes.update(m=1, graph=100)
    one.memory["m"] = 10
    one.load("m", "graph")
    assert one.size("m") == 2 * 110
    sizes["graph"] = 300
    one.now += 1
    assert one.size("m") == 2 * 110, "as it was when it was loaded"
    one.unload("m")
    assert one.size("m") == 2 * 110
    one.load("m", "graph")
    one.memory["graph"] = 40
    one.now += 1
    assert one.size("m") == 2 * 50, "a stand-in's process is measured"


def test_what_a_model_is_for_is_in_its_configuration(tmp_path: Path) -> None:
    built(tmp_path, "a")
    assert One(tmp_path).sizes.task("a") == "generate", "nothing is known of it"
    config = tmp_path / "a" / "config.pbtxt"
    config.write_text(
        'parameters { key: "llmserve.task" value { string_value: "embed" } }\n'
        'input { name: "text_input" }'
    )
    assert One(tmp_path).sizes.task("a") == "embed"
    config.write_text('input { name: "IN" } output { name: "OUT" }')
    assert One(tmp_path).sizes.task("a") == ""


def test_a_model_of_others_is_for_texts_if_the_file_says_so(tmp_path: Path) -> None:
    built(tmp_path, "a")
    (tmp_path / "a/config.pbtxt").write_text('input { name: "IN" } output { name: "OUT" }')
    assert One(tmp_path, texts={"a": ("IN", "OUT")}).sizes.task("a") == "generate"
    for texts in ({"a": ("OTHER", "OUT")}, {"a": ("IN", "OTHER")}, {"b": ("IN", "OUT")}):
        assert One(tmp_path, texts=texts).sizes.task("a") == ""


def test_a_model_of_others_is_taken_to_need_its_files_until_it_was_loaded(tmp_path: Path) -> None:
    built(tmp_path, "a")
    config = 'backend: "python" instance_group { kind: KIND_CPU count: 2 }'
    (tmp_path / "a/config.pbtxt").write_text(config)
    before = One(tmp_path).size("a")
    (tmp_path / "a/1").mkdir()
    (tmp_path / "a/1/weights.bin").write_bytes(bytes(1 << 20))
    one = One(tmp_path)
    assert one.size("a") == before + 2 * (1 << 20), "each process may read them"
    one.memory["a"] = 7
    one.load("a")
    assert one.size("a") == 7, "as it is measured"


def test_the_adapters_of_a_model_are_those_in_its_folder_at_the_moment(tmp_path: Path) -> None:
    built(tmp_path, "a")
    sizes = One(tmp_path).sizes
    assert sizes.adapters("a") == ()
    for name in ("sql", "chat", ".draft"):
        (tmp_path / "a" / "1" / "adapters" / name).mkdir(parents=True)
    assert sizes.adapters("a") == ("chat", "sql")
