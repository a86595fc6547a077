"""A build is all or nothing, and never removes what is not its own."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from llmserve.contract.container import DOCKERFILE
from llmserve.errors import ConfigError, OutputError
from llmserve.repository.manifest import Manifest, hashes
from llmserve.repository.publish import (
    ASIDE,
    MODELS,
    check_output,
    publish,
    recover,
    remove,
    staging,
)


def model(
    folder: Path, text: str = "one", part_of: str = "", parts: Sequence[str] = (), **packages: str
) -> Path:
    (folder / "1").mkdir(parents=True)
    (folder / "config.pbtxt").touch()
    (folder / "1" / "model.py").write_text(text)
    Manifest(
        name=folder.name, recipe="r", plugin="p", exchange="unary", source={}, options={},
        components={}, contract={}, packages=packages, trust_remote_code=False, llmserve="0",
        part_of=part_of, parts=list(parts),
    ).write(folder)  # fmt: skip
    return folder


def put(
    output: Path, name: str, text: str, *suffixes: str, force: bool = False, **packages: str
) -> None:
    """Publish a model, and a part of it for each suffix."""
    parts = [f"{name}_{suffix}" for suffix in suffixes]
    with staging(output) as scratch:
        model(scratch / MODELS / name, text, parts=parts, **packages)
        for part in parts:
            model(scratch / MODELS / part, text, part_of=name)
        publish(scratch, output, name, force=force)


@pytest.fixture
def repo(tmp_path: Path) -> Path:
    """A repository with one model."""
    put(tmp_path / "repo", "m", "one")
    return tmp_path / "repo"


@pytest.fixture
def with_part(tmp_path: Path) -> Path:
    """A repository with a model that has a part."""
    put(tmp_path / "repo", "m", "one", "a")
    return tmp_path / "repo"


def models_of(output: Path) -> list[str]:
    return sorted(path.name for path in output.iterdir() if path.is_dir())


def text_of(output: Path, name: str = "m") -> str:
    return (output / name / "1" / "model.py").read_text()


def test_a_model_appears_whole_and_replaces_its_previous_build(repo: Path) -> None:
    assert text_of(repo) == "one"
    assert [*repo.parent.iterdir()] == [repo]
    put(repo, "n", "two")
    assert text_of(repo) == "one"
    # A missing file of a version folder does not count as an edit.
    (repo / "m" / "1" / "model.py").unlink()
    put(repo, "m", "two")
    assert text_of(repo) == "two"


def test_parts_come_and_go_with_their_model(tmp_path: Path) -> None:
    repo = tmp_path / "repo"
    put(repo, "m", "one", "a", "b")
    put(repo, "n", "one")
    assert models_of(repo) == ["m", "m_a", "m_b", "n"]
    put(repo, "m", "two", "b", "c")
    assert models_of(repo) == ["m", "m_b", "m_c", "n"]
    assert text_of(repo, "m_b") == "two"
    put(repo, "m", "three")
    assert models_of(repo) == ["m", "n"]


def test_a_part_is_replaced_with_its_model_only(with_part: Path) -> None:
    repo = with_part
    for force in (False, True):
        with pytest.raises(OutputError, match="m_a is a part of m: give another --name"):
            put(repo, "m_a", "two", force=force)
    put(repo, "n_a", "one")
    with pytest.raises(OutputError, match="n_a is a separate model"):
        put(repo, "n", "one", "a")
    assert models_of(repo) == ["m", "m_a", "n_a"]


def test_a_part_of_a_removed_model_can_be_replaced(with_part: Path) -> None:
    shutil.rmtree(with_part / "m")
    put(with_part, "m_a", "two", force=True)
    put(with_part, "m", "two", "b")
    assert models_of(with_part) == ["m", "m_a", "m_b"]


@pytest.mark.parametrize(
    ("file", "message"),
    [
        ("m/config.pbtxt", r"config\.pbtxt was changed"),
        ("m/notes.txt", r"notes\.txt was added"),
        ("m_a/config.pbtxt", "m_a was edited"),
    ],
)
def test_an_edited_model_is_kept_unless_forced(with_part: Path, file: str, message: str) -> None:
    (with_part / file).write_text("mine")
    for suffixes in (["a"], []):
        with pytest.raises(OutputError, match=message):
            put(with_part, "m", "two", *suffixes)
    assert text_of(with_part) == "one"
    put(with_part, "m", "two", "a", force=True)
    assert text_of(with_part) == text_of(with_part, "m_a") == "two"


def test_a_model_of_another_tool_is_kept_unless_forced(repo: Path) -> None:
    (repo / "m" / "llmserve.json").unlink()
    with pytest.raises(OutputError, match="not built by llmserve"):
        check_output(repo, ["m"], force=False)
    check_output(repo, ["m"], force=True)


@pytest.mark.parametrize("force", [False, True])
def test_a_folder_with_other_content_is_no_repository(tmp_path: Path, force: bool) -> None:
    (tmp_path / "here" / "photos").mkdir(parents=True)
    (tmp_path / "file").touch()
    for name, message in (("here", "photos/ is not a Triton model"), ("file", "is a file")):
        with pytest.raises(OutputError, match=message):
            check_output(tmp_path / name, ["m"], force=force)


def test_a_failure_in_the_middle_leaves_the_old_model(
    repo: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = hashes(repo)
    rename = Path.rename

    def fail_for_new_model(self: Path, target: Path) -> Path:
        if Path(target).parent.parent == tmp_path and self.parent.name != ASIDE:
            raise OSError(28, "disk full")
        return rename(self, target)

    def fail(self: Path, target: Path) -> Path:
        raise OSError(28, "disk full")

    for name, replacement in (("rename", fail_for_new_model), ("replace", fail)):
        with monkeypatch.context() as patched:
            patched.setattr(Path, name, replacement)
            with pytest.raises(OutputError, match="disk full"):
                put(repo, "m", "two", torch="1.0")
            with pytest.raises(OutputError, match="disk full"):
                put(tmp_path / "new", "m", "two")
        assert hashes(repo) == before
        assert sorted(path.name for path in tmp_path.iterdir()) == ["repo"]


def test_a_damaged_neighbour_is_reported_before_anything_moves(repo: Path) -> None:
    put(repo, "n", "one")
    (repo / "n" / "llmserve.json").write_text("{")
    before = hashes(repo)
    with pytest.raises(ConfigError, match=r"n/llmserve\.json is damaged"):
        put(repo, "m", "two")
    assert hashes(repo) == before


def test_an_upgrade_begins_with_one_model_and_names_the_others(tmp_path: Path) -> None:
    put(tmp_path / "repo", "m", "one", torch="1.0")
    put(tmp_path / "repo", "n", "one", torch="1.0")
    put(tmp_path / "repo", "m", "two", torch="2.0")
    text = (tmp_path / "repo" / DOCKERFILE).read_text()
    assert "torch==2.0" in text
    assert "# n was built with torch 1.0: build it again." in text
    put(tmp_path / "repo", "n", "two", torch="2.0")
    assert "build it again" not in (tmp_path / "repo" / DOCKERFILE).read_text()


def test_a_damaged_model_is_replaced_when_forced(repo: Path) -> None:
    (repo / "m" / "llmserve.json").write_text("{")
    with pytest.raises(OutputError, match=r"is damaged: .*--force to replace"):
        put(repo, "m", "two")
    put(repo, "m", "two", force=True)
    assert text_of(repo) == "two"


def test_a_manifest_cannot_have_a_folder_outside_the_repository_removed(
    repo: Path, tmp_path: Path
) -> None:
    precious = model(tmp_path / "precious")
    manifest = repo / "m" / "llmserve.json"
    manifest.write_text(manifest.read_text().replace('"parts": []', '"parts": ["../precious"]'))
    with pytest.raises(OutputError, match="is damaged"):
        put(repo, "m", "two")
    put(repo, "m", "two", force=True)
    assert (precious / "1" / "model.py").is_file()
    assert text_of(repo) == "two"


def test_a_dockerfile_of_the_user_is_kept_in_any_encoding(repo: Path) -> None:
    mine = "# für Müller\nFROM mine\n".encode("latin-1")
    (repo / DOCKERFILE).write_bytes(mine)
    put(repo, "m", "two")
    assert text_of(repo) == "two"
    assert (repo / DOCKERFILE).read_bytes() == mine


@pytest.mark.parametrize(("old", "new"), [("torch", "torch; echo"), ("2.0", "2.0 $(id)")])
def test_a_package_that_would_run_a_command_in_the_container_is_refused(
    tmp_path: Path, old: str, new: str
) -> None:
    put(tmp_path / "repo", "n", "one", torch="2.0")
    before = (tmp_path / "repo" / DOCKERFILE).read_text()
    manifest = tmp_path / "repo" / "n" / "llmserve.json"
    manifest.write_text(manifest.read_text().replace(old, new))
    with pytest.raises(ConfigError, match="is damaged"):
        put(tmp_path / "repo", "m", "one")
    assert (tmp_path / "repo" / DOCKERFILE).read_text() == before


KILLED = """
import shutil, sys, time
from pathlib import Path
from llmserve.repository.publish import staging
from llmserve.repository.publish import MODELS, replace_models

repo = Path(sys.argv[1])
with staging(repo) as scratch:
    (scratch / MODELS).mkdir()
    shutil.copytree(repo / "m_a", scratch / MODELS / "m_b")
    try:
        replace_models(scratch, repo, ["m_b", "m"], ["m", "m_a"])
    except FileNotFoundError:
        print("ready", flush=True)
        time.sleep(60)
"""


@pytest.mark.parametrize("sweep", [recover, lambda repo: put(repo, "n", "one")])
def test_the_stage_of_a_killed_build_is_removed_and_no_other(
    with_part: Path, tmp_path: Path, sweep: Callable[[Path], None]
) -> None:
    repo = with_part
    command = [sys.executable, "-c", KILLED, str(repo)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as build:
        assert build.stdout is not None
        assert build.stdout.readline() == b"ready\n"
        put(repo, "n", "one")
        (stage,) = [path for path in tmp_path.iterdir() if path != repo]
        assert (stage / ASIDE / "m").is_dir()
        assert (repo / "m_b").is_dir()
        build.send_signal(signal.SIGKILL)
    sweep(repo)
    assert list(tmp_path.iterdir()) == [repo]
    assert text_of(repo) == "one", "what the killed build set aside is restored"
    assert models_of(repo) == ["m", "m_a", "n"], "and what it added is removed"


def planted(repo: Path, journal: str) -> Path:
    """Create a stage with a forged journal, which lists what a cleanup would move back."""
    stage = repo.parent / f".{repo.name}.llmserve-build-planted"
    (stage / "models").mkdir(parents=True)
    (stage / ".journal").write_text(journal)
    return stage


def test_a_planted_stage_moves_nothing_from_outside_the_repository(
    repo: Path, tmp_path: Path
) -> None:
    precious = model(tmp_path / "precious")
    planted(repo, '["../precious"]')
    put(repo, "n", "one")
    assert precious.is_dir()


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give a folder to another user")
def test_a_stage_of_another_user_is_left_alone(repo: Path) -> None:
    stage = planted(repo, '["m"]')
    os.chown(stage, 12345, 12345)
    put(repo, "n", "one")
    assert stage.is_dir()
    assert (repo / "m").is_dir()


def test_an_interrupted_build_leaves_nothing(tmp_path: Path) -> None:
    def interrupted() -> None:
        with staging(tmp_path / "repo") as scratch:
            model(scratch / "m")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("function", ["mkdir", "rmdir"])
def test_a_stage_goes_although_its_making_or_its_deletion_is_interrupted(
    function: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real: Any = getattr(os, function)
    interrupted: list[Any] = []

    def interrupt(path: Any, *arguments: Any, **named: Any) -> None:
        if interrupted or function == "mkdir":
            real(path, *arguments, **named)
        if not interrupted:
            interrupted.append(path)
            raise KeyboardInterrupt

    monkeypatch.setattr(os, function, interrupt)
    with pytest.raises(KeyboardInterrupt), staging(tmp_path / "repository"):
        pass
    assert interrupted
    assert not [*tmp_path.iterdir()]


def test_a_removed_model_leaves_the_repository_with_its_parts(with_part: Path) -> None:
    put(with_part, "other", "two", torch="2.0")
    remove(with_part, "m", force=False)
    assert sorted(path.name for path in with_part.iterdir()) == [DOCKERFILE, "other"]
    assert "torch==2.0" in (with_part / DOCKERFILE).read_text()
    remove(with_part, "other", force=False)
    assert list(with_part.iterdir()) == [], "a Dockerfile of no models would not build"
    assert [path.name for path in with_part.parent.iterdir()] == ["repo"]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("m_a", "m_a is a part of m: remove m instead"),
        ("mm", "no model 'mm' in .*: did you mean 'm'"),
        ("", "no model ''"),
        ("..", "no model '..'"),
        ("mine", "mine was not built by llmserve: --force deletes mine anyway"),
        ("edited", "edited was edited since it was built: .*: --force deletes edited anyway"),
    ],
)
def test_what_must_stay_is_not_removed(with_part: Path, name: str, message: str) -> None:
    (with_part / "mine" / "1").mkdir(parents=True)
    put(with_part, "edited", "one")
    (with_part / "edited" / "1" / "model.py").write_text("mine")
    before = hashes(with_part)
    with pytest.raises(ConfigError, match=message):
        remove(with_part, name, force=False)
    assert hashes(with_part) == before
    if "--force" in message:
        remove(with_part, name, force=True)
        assert not (with_part / name).exists()


def test_a_removal_that_fails_leaves_the_model(repo: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*arguments: object, **options: object) -> None:
        raise OSError(28, "No space left on device")

    before = hashes(repo)
    monkeypatch.setattr("llmserve.repository.publish.replace_models", fails)
    with pytest.raises(OutputError, match="cannot be deleted: No space left"):
        remove(repo, "m", force=False)
    assert hashes(repo) == before


def test_the_steps_of_an_ensemble_that_somebody_wrote_stay_when_it_goes(repo: Path) -> None:
    (repo / "whole/1").mkdir(parents=True)
    (repo / "whole/config.pbtxt").write_text(
        'platform: "ensemble" ensemble_scheduling { step { model_name: "m" } }', encoding="utf-8"
    )
    with pytest.raises(OutputError, match="whole was not built by llmserve"):
        remove(repo, "whole", force=False)
    remove(repo, "whole", force=True)
    assert models_of(repo) == ["m"]
