"""A repository is read once, what is damaged in it is a value, and a problem has one form."""

from __future__ import annotations

import sys
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

import llmserve
from llmserve.builder.build import BuildSpec, build_spec
from llmserve.contract.container import base_of
from llmserve.errors import ConfigError, LLMServeError, PortInUseError, ServerError, UsageError
from llmserve.plugin import Manifest, Model, Problem, Repository
from llmserve.plugins.roles import Batching
from llmserve.repository.check import check_repository
from llmserve.repository.runtimes import problem_with
from llmserve.runtime import TextFormatter
from llmserve.runtime.model import create


def add(repository: Path, name: str, **fields: Any) -> None:
    empty: Any = {key: {} for key in ("source", "options", "components", "contract", "packages")}
    words = {key: "x" for key in ("recipe", "plugin", "exchange", "llmserve")}
    (repository / name).mkdir(parents=True)
    manifest = Manifest(name=name, trust_remote_code=False, **{**empty, **words, **fields})
    manifest.write(repository / name)


def test_what_is_damaged_hides_nothing_else(tmp_path: Path) -> None:
    add(tmp_path, "whole", parts=["part"])
    add(tmp_path, "part", part_of="whole")
    add(tmp_path, "damaged")
    (tmp_path / "damaged" / "llmserve.json").write_text("{")
    (tmp_path / "mine").mkdir()
    (tmp_path / "a file").touch()
    repository = Repository.open(tmp_path)
    assert list(repository.models) == ["damaged", "mine", "part", "whole"]
    models = repository.models
    assert models["whole"].parts == ("part",)
    assert models["part"].part_of == "whole"
    assert (models["mine"].manifest, models["mine"].damage) == (None, None)
    assert models["damaged"].manifest is None
    assert "llmserve.json is damaged" in str(models["damaged"].damage)
    with pytest.raises(ConfigError, match="damaged"):
        models["damaged"].intact()
    assert repository.with_parts(["whole", "mine", "part"]) == ("part", "whole", "mine")
    assert repository.parts_of("gone") == ()
    assert models["mine"].config is None
    assert "cannot be read" in str(models["mine"].config_damage)


def ensemble(repository: Path, name: str, *steps: str) -> None:
    """Write an ensemble by hand, as somebody has it who never built with llmserve."""
    words = " ".join(f'step {{ model_name: "{step}" model_version: -1 }}' for step in steps)
    (repository / name / "1").mkdir(parents=True)
    text = f'platform: "ensemble" ensemble_scheduling {{ {words} }}'
    (repository / name / "config.pbtxt").write_text(text, encoding="utf-8")


@pytest.mark.parametrize(
    ("name", "parts"),
    [
        ("plain", ()),
        ("whole", ("cut", "gone", "join")),
        ("of others", ("cut", "gone", "join", "whole", "plain")),
        ("of ours", ("inner", "built")),
        ("itself", ("cut",)),
        ("round", ("cut", "about")),
        ("path", ()),
        ("damaged", ()),
    ],
)
def test_the_steps_of_a_hand_written_ensemble_are_its_parts(
    tmp_path: Path, name: str, parts: tuple[str, ...]
) -> None:
    for step in ("cut", "join", "plain"):
        (tmp_path / step).mkdir()
        (tmp_path / step / "config.pbtxt").write_text('backend: "python"', encoding="utf-8")
    add(tmp_path, "built", parts=["inner"])
    add(tmp_path, "inner", part_of="built")
    ensemble(tmp_path, "whole", "cut", "gone", "join", "cut")
    ensemble(tmp_path, "of others", "whole", "plain")
    ensemble(tmp_path, "of ours", "built")
    ensemble(tmp_path, "itself", "cut", "itself")
    ensemble(tmp_path, "round", "about")
    ensemble(tmp_path, "about", "cut", "round")
    ensemble(tmp_path, "path", "../plain")
    ensemble(tmp_path, "damaged", "cut")
    (tmp_path / "damaged/llmserve.json").write_text("{", encoding="utf-8")
    repository = Repository.open(tmp_path)
    assert repository.parts_of(name) == parts
    assert repository.with_parts([name]) == (*parts, name)
    assert repository.built_with(name) == ()
    owner = repository.owner_of("join")
    assert repository.models[owner].parts.index("join") > 0
    assert repository.owner_of("inner") == "built"
    assert repository.owner_of("round") == "about"
    assert repository.owner_of("of ours") == ""


def test_a_model_is_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    add(tmp_path, "a", parts=["b"])
    add(tmp_path, "b", part_of="a")
    reads: list[str] = []
    read = Manifest.read

    def note(folder: Path) -> Manifest | None:
        reads.append(folder.name)
        return read(folder)

    monkeypatch.setattr(Manifest, "read", note)
    repository = Repository.open(tmp_path)
    assert reads == []
    check_repository(repository, quick=True)
    check_repository(repository, models=["a"], quick=True)
    assert sorted(reads) == ["a", "b"]
    (tmp_path / "a" / "llmserve.json").unlink()
    assert repository.models["a"].manifest
    assert Repository.open(tmp_path).models["a"].manifest is Model(tmp_path / "c").manifest is None


@pytest.mark.parametrize("kind", [ConfigError, UsageError, ServerError, PortInUseError])
def test_a_problem_is_an_error_and_back(kind: type[LLMServeError]) -> None:
    problem = Problem.of(kind("it is bad", hint="hint it"), "here")
    assert str(problem) == "here: it is bad: hint it"
    assert type(problem.error()) is kind
    assert str(problem.error()) == str(problem)


@pytest.mark.parametrize(
    ("text", "base"),
    [
        ("FROM a:1", "a:1"),
        ("# FROM x\nfrom --platform=linux/amd64 a:1 as one\nFROM b\nFROM one", "a:1"),
        ("ARG A=a\nARG B\nFROM ${A}:${B:-2}\nARG A=c", "a:2"),
        ("FROM \\\n  a:1", "a:1"),
        ("ARG IMAGE\nFROM ${IMAGE}", ""),
        ("", ""),
    ],
)
def test_the_base_of_a_dockerfile(text: str, base: str) -> None:
    assert base_of(text) == base


def test_a_build_goes_from_plan_to_publication_without_coming_back(tmp_path: Path) -> None:
    home = f"{Path(llmserve.__file__).parent}/"
    visited: list[str] = []

    def note(frame: FrameType, event: str, _: object) -> None:
        file = frame.f_code.co_filename
        folder = file.removeprefix(home).partition("/")[0]
        if event == "call" and file.startswith(home) and folder in ("builder", "repository"):
            visited.extend([folder] if visited[-1:] != [folder] else [])

    spec = BuildSpec("hf", "demo", output=tmp_path / "repository")
    sys.setprofile(note)
    try:
        build_spec(spec)
    finally:
        sys.setprofile(None)
    # It looks at the repository before the components prepare their files: copying takes long.
    assert visited == ["builder", "repository", "builder", "repository"]


def test_a_model_names_classes_of_ours_where_they_are_public(tmp_path: Path) -> None:
    """What earlier versions built, and what plugins of API 2 register, names their modules."""
    old = "llmserve.runtime.batch:BatchDriver"
    assert Batching(name="b", summary="", runtime=old).runtime == "llmserve.runtime:BatchDriver"
    golden = Path(__file__).parents[2] / "golden" / "demo" / "llmserve.json"
    text = golden.read_text(encoding="utf-8")
    older = text.replace("llmserve.runtime:Text", "llmserve.runtime.text_formatter:Text")
    assert older != text
    (tmp_path / "llmserve.json").write_text(older, encoding="utf-8")
    manifest = Model(tmp_path).intact()
    assert manifest
    for component in manifest.components.values():
        assert not component["runtime"].startswith("llmserve.runtime.")
        assert not problem_with(component["runtime"])
    created = create({"runtime": "llmserve.runtime.gone:TextFormatter", "settings": {}}, tmp_path)
    assert isinstance(created, TextFormatter)
