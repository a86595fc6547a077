"""The links through which Triton sees a model: they change only on request and completely."""

from __future__ import annotations

from pathlib import Path

import pytest

from llmserve.errors import ServerError
from llmserve.server import ServerSettings
from llmserve.server.find.launch import link_model, link_models
from llmserve.server.keep.control import control_folder
from llmserve.server.workarounds import keep_model, withdraw_model


def newest(folder: Path) -> float:
    """Return the newest modification time in a folder, which is what Triton compares."""
    return max([folder.stat().st_mtime, *(newest(p) if p.is_dir() else p.stat().st_mtime
                                          for p in folder.iterdir())])  # fmt: skip


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "repository" / "demo"
    (folder / "1" / "weights").mkdir(parents=True)
    (folder / "1" / "weights" / "a.bin").write_text("a")
    (folder / "1" / "model.py").write_text("one")
    (folder / "config.pbtxt").write_text("one")
    (folder / "llmserve.json").write_text("one")
    return folder


def test_a_change_of_a_served_model_changes_nothing_for_triton(model: Path, tmp_path: Path) -> None:
    link_model(model, links := tmp_path / "links")
    assert (links / "1" / "weights" / "a.bin").read_text() == "a"
    before = newest(links / "1")
    (model / "1" / "model.py").write_text("two")
    (model / "config.pbtxt").write_text("two")
    (links / "1" / "__pycache__").mkdir()
    assert newest(links / "1") == before
    assert (links / "config.pbtxt").read_text() == "one"


def test_renewed_links_match_the_repository_and_triton_notices(model: Path, tmp_path: Path) -> None:
    link_model(model, links := tmp_path / "links")
    for _ in range(3):
        before = newest(links / "1")
        (model / "1" / "model.py").unlink(missing_ok=True)
        (model / "1" / "entry.py").write_text("two")
        (model / "config.pbtxt").write_text("two")
        link_model(model, links)
        assert newest(links / "1") > before
    assert {path.name for path in (links / "1").iterdir()} == {".renewed", "entry.py", "weights"}
    assert (links / "config.pbtxt").read_text() == "two"
    assert (links / "llmserve.json").is_symlink()


def test_after_a_failed_reload_nothing_is_newer_than_what_triton_has(
    model: Path, tmp_path: Path
) -> None:
    """It would try again every second, and load the next change without a request."""
    link_model(model, links := tmp_path / "links")
    loaded = newest(links / "1")
    link_model(model, links)
    keep_model(links)
    assert newest(links / "1") == loaded
    keep_model(links)
    link_model(model, links)
    assert newest(links / "1") > loaded


def test_a_new_model_that_failed_is_taken_away_and_can_be_added_again(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    links = tmp_path / "models" / "demo"
    links.parent.mkdir()
    seen: list[tuple[str, bool]] = []

    def look(seconds: float) -> None:
        # While Triton may still begin to load it, it finds all files and no valid configuration.
        seen.append(((links / "config.pbtxt").read_text(), (links / "1" / "model.py").is_file()))

    monkeypatch.setattr("time.sleep", look)
    link_model(model, links)
    withdraw_model(links)
    assert not links.exists()
    assert list(links.parent.iterdir()) == []
    ((config, complete),) = seen
    assert complete
    assert config != "one"

    def renew(seconds: float) -> None:
        link_model(model, links)

    monkeypatch.setattr("time.sleep", renew)
    link_model(model, links)
    withdraw_model(links)
    assert (links / "config.pbtxt").read_text() == "one", "a reload meanwhile is not undone"


def test_a_folder_of_sockets_that_others_can_read_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    assert control_folder().stat().st_mode & 0o777 == 0o700
    control_folder().chmod(0o755)
    with pytest.raises(ServerError, match="chmod 700"):
        control_folder()
    folder_of_another_user = tmp_path / "elsewhere"
    folder_of_another_user.mkdir(mode=0o700)
    (tmp_path / "llmserve").rmdir()
    (tmp_path / "llmserve").symlink_to(folder_of_another_user)
    with pytest.raises(ServerError):
        control_folder()


def test_a_server_that_cannot_renew_its_models_has_their_texts_too(tmp_path: Path) -> None:
    for name in ("own", "ours"):
        (tmp_path / "models" / name / "1").mkdir(parents=True)
        (tmp_path / "models" / name / "config.pbtxt").touch()
    settings = ServerSettings(tmp_path / "models", texts={"own": ("PROMPT", "ANSWER")})
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    links = link_models(settings, scratch)
    assert "PROMPT" in (links / "own/config.pbtxt").read_text()
    assert (links / "ours").is_symlink()


def test_a_model_without_a_configuration_gets_the_texts_that_are_declared(tmp_path: Path) -> None:
    (tmp_path / "models/own/1").mkdir(parents=True)
    links = tmp_path / "links"
    for _ in range(2):
        link_model(tmp_path / "models/own", links, ("PROMPT", "ANSWER"))
        text = (links / "config.pbtxt").read_text(encoding="utf-8")
        assert text.count("PROMPT") == text.count("ANSWER") == 1
    assert not (tmp_path / "models/own/config.pbtxt").exists()
