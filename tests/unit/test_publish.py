"""A build is all or nothing, and never takes away what is not its own."""

from __future__ import annotations

import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from llmserve.errors import ConfigError, OutputError
from llmserve.repository.dockerfile import FILE as DOCKERFILE
from llmserve.repository.manifest import Manifest, hashes
from llmserve.repository.publish import ASIDE, MODELS, check_output, publish, staging


def model(
    folder: Path,
    text: str = "one",
    *,
    part_of: str = "",
    parts: Sequence[str] = (),
    **packages: str,
) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.pbtxt").write_text("")
    (folder / "1").mkdir()
    (folder / "1" / "model.py").write_text(text)
    Manifest(
        name=folder.name, recipe="r", plugin="p", exchange="unary", source={}, options={},
        components={}, contract={}, packages=packages, trust_remote_code=False, llmserve="0",
        part_of=part_of, parts=list(parts),
    ).write(folder)  # fmt: skip
    return folder


def put(output: Path, name: str, text: str, *, force: bool = False, **packages: str) -> None:
    with staging(output) as scratch:
        model(scratch / MODELS / name, text, **packages)
        publish(scratch, output, name, force=force)


def put_all(output: Path, name: str, text: str, *suffixes: str, force: bool = False) -> None:
    parts = [f"{name}_{suffix}" for suffix in suffixes]
    with staging(output) as scratch:
        model(scratch / MODELS / name, text, parts=parts)
        for part in parts:
            model(scratch / MODELS / part, text, part_of=name)
        publish(scratch, output, name, force=force)


def models_of(output: Path) -> list[str]:
    return sorted(path.name for path in output.iterdir() if path.is_dir())


def text_of(output: Path) -> str:
    return (output / "m" / "1" / "model.py").read_text()


def test_a_model_appears_whole_and_nothing_else_does(tmp_path: Path) -> None:
    put(tmp_path / "repo", "m", "one")
    assert text_of(tmp_path / "repo") == "one"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["repo"]


def test_what_llmserve_built_is_replaced(tmp_path: Path) -> None:
    put(tmp_path / "repo", "m", "one")
    put(tmp_path / "repo", "m", "two")
    assert text_of(tmp_path / "repo") == "two"


def test_a_second_model_leaves_the_first(tmp_path: Path) -> None:
    put(tmp_path / "repo", "m", "one")
    put(tmp_path / "repo", "n", "two")
    assert text_of(tmp_path / "repo") == "one"


def test_parts_come_and_go_with_their_model(tmp_path: Path) -> None:
    repo = tmp_path / "repo"
    put_all(repo, "m", "one", "a", "b")
    put(repo, "n", "one")
    assert models_of(repo) == ["m", "m_a", "m_b", "n"]
    put_all(repo, "m", "two", "b", "c")
    assert models_of(repo) == ["m", "m_b", "m_c", "n"]
    assert (repo / "m_b" / "1" / "model.py").read_text() == "two"
    put(repo, "m", "three")
    assert models_of(repo) == ["m", "n"]


def test_a_part_is_replaced_with_its_model_only(tmp_path: Path) -> None:
    repo = tmp_path / "repo"
    put_all(repo, "m", "one", "a")
    for force in (False, True):
        with pytest.raises(OutputError, match="m_a is a part of m: give another --name"):
            put(repo, "m_a", "two", force=force)
    put(repo, "n_a", "one")
    with pytest.raises(OutputError, match="n_a is a model of its own"):
        put_all(repo, "n", "one", "a")
    assert models_of(repo) == ["m", "m_a", "n_a"]


def test_an_edited_part_is_kept_unless_forced(tmp_path: Path) -> None:
    repo = tmp_path / "repo"
    put_all(repo, "m", "one", "a")
    (repo / "m_a" / "config.pbtxt").write_text("mine")
    for suffixes in (["a"], []):
        with pytest.raises(OutputError, match="m_a was edited"):
            put_all(repo, "m", "two", *suffixes)
    put_all(repo, "m", "two", "a", force=True)
    assert (repo / "m_a" / "1" / "model.py").read_text() == "two"


def test_a_part_of_a_model_that_is_gone_can_be_replaced(tmp_path: Path) -> None:
    repo = tmp_path / "repo"
    put_all(repo, "m", "one", "a")
    shutil.rmtree(repo / "m")
    put(repo, "m_a", "two", force=True)
    put_all(repo, "m", "two", "b")
    assert models_of(repo) == ["m", "m_a", "m_b"]


def test_missing_weights_are_no_edit(tmp_path: Path) -> None:
    put(tmp_path / "repo", "m", "one")
    (tmp_path / "repo" / "m" / "1" / "model.py").unlink()
    put(tmp_path / "repo", "m", "two")
    assert text_of(tmp_path / "repo") == "two"


@pytest.mark.parametrize("edit", ["changed", "added"])
def test_an_edited_model_is_kept_unless_forced(tmp_path: Path, edit: str) -> None:
    put(tmp_path / "repo", "m", "one")
    name = {"changed": "config.pbtxt", "added": "notes.txt"}[edit]
    (tmp_path / "repo" / "m" / name).write_text("mine")
    with pytest.raises(OutputError, match=f"{name} was {edit}"):
        put(tmp_path / "repo", "m", "two")
    assert text_of(tmp_path / "repo") == "one"
    put(tmp_path / "repo", "m", "two", force=True)
    assert text_of(tmp_path / "repo") == "two"


def test_somebody_elses_model_is_kept_unless_forced(tmp_path: Path) -> None:
    put(tmp_path / "repo", "m", "one")
    (tmp_path / "repo" / "m" / "llmserve.json").unlink()
    with pytest.raises(OutputError, match="not built by llmserve"):
        check_output(tmp_path / "repo", ["m"], force=False)
    check_output(tmp_path / "repo", ["m"], force=True)


def test_a_folder_that_holds_something_else_is_refused_even_when_forced(tmp_path: Path) -> None:
    (tmp_path / "photos").mkdir()
    for force in (False, True):
        with pytest.raises(OutputError, match="photos/ is no Triton model"):
            check_output(tmp_path, ["m"], force=force)


def test_a_file_is_no_repository(tmp_path: Path) -> None:
    (tmp_path / "repo").write_text("")
    with pytest.raises(OutputError, match="is a file"):
        check_output(tmp_path / "repo", ["m"], force=False)


def test_a_failure_in_the_middle_leaves_the_old_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(tmp_path / "repo", "m", "one")
    before = hashes(tmp_path / "repo")
    rename = Path.rename

    def fails_for_the_new(self: Path, target: Path) -> Path:
        if Path(target).parent.parent == tmp_path and self.parent.name != ASIDE:
            raise OSError(28, "disk full")
        return rename(self, target)

    def fails(self: Path, target: Path) -> Path:
        raise OSError(28, "disk full")

    for name, failing in (("rename", fails_for_the_new), ("replace", fails)):
        with monkeypatch.context() as patched:
            patched.setattr(Path, name, failing)
            with pytest.raises(OutputError, match="disk full"):
                put(tmp_path / "repo", "m", "two", torch="1.0")
            with pytest.raises(OutputError, match="disk full"):
                put(tmp_path / "new", "m", "two")
        assert hashes(tmp_path / "repo") == before
        assert sorted(path.name for path in tmp_path.iterdir()) == ["repo"]


def damage(manifest: Path) -> None:
    manifest.write_text("{", encoding="utf-8")


def test_a_damaged_neighbour_is_told_before_anything_moves(tmp_path: Path) -> None:
    put(tmp_path / "repo", "m", "one", torch="2.0")
    put(tmp_path / "repo", "n", "one", torch="2.0")
    damage(tmp_path / "repo" / "n" / "llmserve.json")
    before = hashes(tmp_path / "repo")
    with pytest.raises(ConfigError, match=r"n/llmserve\.json is damaged"):
        put(tmp_path / "repo", "m", "two", torch="2.0")
    assert hashes(tmp_path / "repo") == before


def test_an_upgrade_begins_with_one_model_and_names_the_others(tmp_path: Path) -> None:
    put(tmp_path / "repo", "m", "one", torch="1.0")
    put(tmp_path / "repo", "n", "one", torch="1.0")
    put(tmp_path / "repo", "m", "two", torch="2.0")
    text = (tmp_path / "repo" / DOCKERFILE).read_text()
    assert "torch==2.0" in text
    assert "# n was built with torch 1.0: build it again." in text
    put(tmp_path / "repo", "n", "two", torch="2.0")
    assert "build it again" not in (tmp_path / "repo" / DOCKERFILE).read_text()


def test_a_damaged_model_is_replaced_when_forced(tmp_path: Path) -> None:
    put(tmp_path / "repo", "m", "one")
    damage(tmp_path / "repo" / "m" / "llmserve.json")
    with pytest.raises(OutputError, match=r"is damaged: .*--force to replace"):
        put(tmp_path / "repo", "m", "two")
    put(tmp_path / "repo", "m", "two", force=True)
    assert text_of(tmp_path / "repo") == "two"


def test_no_manifest_names_a_folder_outside_of_the_repository_for_removal(tmp_path: Path) -> None:
    precious = model(tmp_path / "precious")
    put(tmp_path / "repo", "m", "one")
    manifest = tmp_path / "repo" / "m" / "llmserve.json"
    manifest.write_text(manifest.read_text().replace('"parts": []', '"parts": ["../precious"]'))
    with pytest.raises(OutputError, match="is damaged"):
        put(tmp_path / "repo", "m", "two")
    put(tmp_path / "repo", "m", "two", force=True)
    assert (precious / "1" / "model.py").is_file()
    assert text_of(tmp_path / "repo") == "two"


def test_a_dockerfile_of_the_users_own_may_be_in_any_encoding(tmp_path: Path) -> None:
    put(tmp_path / "repo", "m", "one")
    (tmp_path / "repo" / DOCKERFILE).write_bytes("# für Müller".encode("latin-1"))
    put(tmp_path / "repo", "m", "two")
    assert text_of(tmp_path / "repo") == "two"
    assert (tmp_path / "repo" / DOCKERFILE).read_bytes() == "# für Müller".encode("latin-1")


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


def test_the_stage_of_a_build_that_was_killed_is_swept_and_no_other(tmp_path: Path) -> None:
    repo = tmp_path / "repo"
    put_all(repo, "m", "one", "a")
    command = [sys.executable, "-c", KILLED, str(repo)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as build:
        assert build.stdout is not None
        assert build.stdout.readline() == b"ready\n"
        put(repo, "n", "one")
        (stage,) = [path for path in tmp_path.iterdir() if path != repo]
        assert (stage / ASIDE / "m").is_dir()
        assert (repo / "m_b").is_dir()
        build.send_signal(signal.SIGKILL)
    put(repo, "n", "one")
    assert list(tmp_path.iterdir()) == [repo]
    assert text_of(repo) == "one", "what the killed build had set aside is back"
    assert models_of(repo) == ["m", "m_a", "n"], "and what it had brought is gone"


def test_an_interrupted_build_leaves_nothing(tmp_path: Path) -> None:
    def interrupted() -> None:
        with staging(tmp_path / "repo") as scratch:
            model(scratch / "m")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert not list(tmp_path.iterdir())
