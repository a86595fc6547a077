"""A build is all or nothing, and never takes away what is not its own."""

from __future__ import annotations

from pathlib import Path

import pytest

from llmserve.builder.publish import check_output, publish, staging
from llmserve.errors import OutputError
from llmserve.manifest import Manifest


def model(folder: Path, text: str = "one") -> Path:
    folder.mkdir(parents=True)
    (folder / "config.pbtxt").write_text("")
    (folder / "1").mkdir()
    (folder / "1" / "model.py").write_text(text)
    Manifest(
        name=folder.name, recipe="r", plugin="p", exchange="unary", source={}, options={},
        components={}, contract={}, packages={}, trust_remote_code=False, llmserve="0",
    ).write(folder)  # fmt: skip
    return folder


def put(output: Path, name: str, text: str, *, force: bool = False) -> None:
    with staging(output) as scratch:
        publish(model(scratch / name, text), output, name, force=force)


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
        check_output(tmp_path / "repo", "m", force=False)
    check_output(tmp_path / "repo", "m", force=True)


def test_a_folder_that_holds_something_else_is_refused_even_when_forced(tmp_path: Path) -> None:
    (tmp_path / "photos").mkdir()
    for force in (False, True):
        with pytest.raises(OutputError, match="photos/ is no Triton model"):
            check_output(tmp_path, "m", force=force)


def test_a_file_is_no_repository(tmp_path: Path) -> None:
    (tmp_path / "repo").write_text("")
    with pytest.raises(OutputError, match="is a file"):
        check_output(tmp_path / "repo", "m", force=False)


def test_a_failure_in_the_middle_leaves_the_old_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(tmp_path / "repo", "m", "one")
    rename = Path.rename

    def fails_for_the_new(self: Path, target: Path) -> Path:
        if Path(target) == tmp_path / "repo" / "m" and not self.name.endswith(".old"):
            raise OSError("disk full")
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", fails_for_the_new)
    with pytest.raises(OSError, match="disk full"):
        put(tmp_path / "repo", "m", "two")
    assert text_of(tmp_path / "repo") == "one"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["repo"]


def test_an_interrupted_build_leaves_nothing(tmp_path: Path) -> None:
    def interrupted() -> None:
        with staging(tmp_path / "repo") as scratch:
            model(scratch / "m")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert not list(tmp_path.iterdir())
