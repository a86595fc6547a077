"""Built models that are kept: built once, again after a change, and never half."""

from __future__ import annotations

import resource
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier
from typing import Any

import pytest

from llmserve.builder import fitted
from llmserve.builder import store as store_module
from llmserve.builder.build import build_spec
from llmserve.builder.home import home
from llmserve.builder.plan import BuildSpec
from llmserve.builder.store import Store, StoredModel
from llmserve.demo import demo_model_path
from llmserve.errors import ConfigError, OutputError, UsageError
from llmserve.plugins.registry import Registry
from llmserve.repository.check import check_repository
from tests.support import hub_cache

REGISTRY = Registry.load()


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "home")


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return Path(shutil.copytree(demo_model_path(), tmp_path / "my model"))


def build(store: Store, model: str | Path = "demo", **changes: Any) -> StoredModel:
    options = changes.pop("options", {})
    spec = BuildSpec(changes.pop("plugin", "hf"), str(model), options=options, **changes)
    return store.build(spec, REGISTRY)


def test_the_same_model_is_built_once(store: Store) -> None:
    first = build(store)
    again = build(store)
    assert (first.is_new, again.is_new) == (True, False)
    assert (again, again.name) == (first, "demo")
    assert first.repository == store.models_folder / "demo"
    assert store.models() == [first]
    assert not check_repository(first.repository, quick=True)


@pytest.mark.parametrize(
    "changes",
    [
        {"options": {"max_tokens": "7"}},
        {"options": {"dtype": "bfloat16"}},
        {"plugin": "iterative"},
        {"batching": "static"},
        {"force": True},
    ],
)
def test_a_changed_option_builds_again(store: Store, changes: dict[str, Any]) -> None:
    build(store)
    assert build(store, **changes).is_new
    assert not build(store, **{**changes, "force": False}).is_new
    assert [kept.name for kept in store.models()] == ["demo"]


def test_an_option_that_says_the_same_in_other_words_does_not(store: Store) -> None:
    build(store, options={"max_batch_size": 4, "decoupled": True})
    assert not build(store, options={"decoupled": "true", "max_batch_size": "4"}).is_new


def test_without_a_plugin_the_best_one_is_used_and_named_when_it_builds(store: Store) -> None:
    lines: list[str] = []
    spec = BuildSpec("", "demo", options={"device": "cuda"})
    assert store.build(spec, REGISTRY, report=lines.append).is_new
    assert lines[0].startswith("plugin: iterative, first choice for cuda")
    lines.clear()
    assert not store.build(spec, REGISTRY, report=lines.append).is_new
    assert lines == []


def change(file: Path) -> None:
    file.write_text(file.read_text(encoding="utf-8") + "\n", encoding="utf-8")


def test_a_changed_source_builds_again_and_one_that_is_gone_does_not(
    store: Store, source: Path
) -> None:
    assert build(store, source).name == "my-model"
    assert not build(store, source).is_new
    change(source / "tokenizer_config.json")
    assert build(store, source).is_new
    assert not build(store, f"{source}/").is_new
    shutil.rmtree(source)
    assert not build(store, "my-model").is_new


@pytest.fixture
def hub_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A model of the hub that is in the cache."""
    hub_cache(tmp_path / "cache", "acme/tiny", COMMIT)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache" / "hub"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    return "acme/tiny"


COMMIT, LATER = "0123456789" * 4, "abcdef0123" * 4


def test_a_model_of_the_hub_is_built_again_when_the_hub_has_another_commit(
    store: Store, hub_model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []
    answer: str | None = COMMIT

    def newest(repo_id: str, revision: str, *, timeout: float) -> str | None:
        asked.append(f"{repo_id}@{revision}")
        return answer

    monkeypatch.setattr(store_module, "newest_commit", newest)
    assert build(store, hub_model).is_new
    assert asked == [], "it has just been fetched"
    assert not build(store, hub_model).is_new
    answer = None
    assert not build(store, hub_model).is_new, "the hub does not answer"
    assert asked == ["acme/tiny@"] * 2
    # It has another commit, which cannot be fetched: what is here is used.
    answer = LATER
    shutil.move(tmp_path / "cache", tmp_path / "gone")
    lines: list[str] = []
    kept = store.build(BuildSpec("hf", hub_model), REGISTRY, report=lines.append)
    assert not kept.is_new
    assert "acme/tiny has changed on the hub, from 01234567 to abcdef01" in lines
    assert any(line.startswith("tiny stays as it is: acme/tiny is not in the") for line in lines)
    hub_cache(tmp_path / "cache", "acme/tiny", LATER)
    again = build(store, hub_model)
    assert again.is_new
    assert again.model.manifest is not None
    assert again.model.manifest.source["revision"] == LATER


def test_a_model_that_is_pinned_to_a_commit_is_never_looked_up(
    store: Store, hub_model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_module, "newest_commit", lambda *_, **__: pytest.fail("looked up"))
    for new in (True, False):
        assert build(store, hub_model, options={"revision": COMMIT}).is_new == new


def test_a_file_that_an_option_names_is_a_source_too(store: Store, tmp_path: Path) -> None:
    record = store_module.Record.of(BuildSpec("p", "m", options={"engine": str(tmp_path), "n": 1}))
    assert record.stamps == {}
    (tmp_path / "rank0.engine").write_bytes(b"weights")
    record = store_module.Record.of(BuildSpec("p", "m", options={"engine": str(tmp_path), "n": 1}))
    assert record.stamps[str(tmp_path)]["rank0.engine"][0] == 7


def test_a_folder_is_found_from_elsewhere(
    store: Store, source: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(source)
    assert build(store, ".").name == "my-model"
    monkeypatch.chdir(tmp_path)
    assert not build(store, "my model").is_new


def test_a_model_is_meant_by_its_name_with_its_options(store: Store, source: Path) -> None:
    build(store, source, name="mine", options={"max_tokens": 7})
    by_name = build(store, "mine", plugin="")
    assert (by_name.is_new, by_name.name) == (False, "mine")
    changed = build(store, "mine", plugin="", options={"dtype": "bfloat16"})
    assert changed.is_new
    assert changed.record is not None
    assert changed.record.options == {"max_tokens": 7, "dtype": "bfloat16"}
    with pytest.raises(UsageError, match="the name mine is taken by"):
        build(store, "acme/mine")


def test_a_model_of_the_same_name_from_elsewhere_is_not_replaced(
    store: Store, source: Path
) -> None:
    build(store, source, name="demo")
    with pytest.raises(UsageError, match=r"the name demo is taken by .*my model: give another"):
        build(store)
    assert not build(store, source, name="demo").is_new
    assert build(store, name="other").is_new


def test_a_model_whose_files_were_edited_is_replaced_only_on_request(store: Store) -> None:
    kept = build(store)
    change(kept.model.folder / "config.pbtxt")
    assert not build(store).is_new
    with pytest.raises(OutputError, match="was edited"):
        build(store, options={"max_tokens": 7})
    assert build(store, options={"max_tokens": 7}, force=True).is_new


def test_a_model_with_a_missing_file_is_built_again(store: Store) -> None:
    kept = build(store)
    (kept.model.folder / "1" / "model.py").unlink()
    assert build(store).is_new


def test_two_builds_of_one_model_at_once_are_one(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    start, builds = Barrier(2), []
    lines: list[str] = []

    def slow(*args: Any, **extra: Any) -> Any:
        builds.append(args)
        # The other one waits meanwhile, and says so.
        while not lines:
            pass
        return build_spec(*args, **extra)

    def report(line: str) -> None:
        if "wait" in line:
            lines.append(line)

    monkeypatch.setattr(fitted, "build_spec", slow)

    def one() -> StoredModel:
        start.wait()
        return store.build(BuildSpec("hf", "demo"), REGISTRY, report=report)

    with ThreadPoolExecutor(2) as pool:
        kept = [future.result() for future in [pool.submit(one), pool.submit(one)]]
    assert len(builds) == 1
    assert sorted(each.is_new for each in kept) == [False, True]
    assert lines == ["waiting for another process that builds demo"]


@pytest.mark.parametrize("error", [KeyboardInterrupt, OutputError("the disk is full")])
def test_a_build_that_ends_early_keeps_what_was_there(
    store: Store, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    def fail(*args: Any, **extra: Any) -> Any:
        raise error

    kind = error if isinstance(error, type) else type(error)
    with monkeypatch.context() as patched:
        patched.setattr(fitted, "build_spec", fail)
        with pytest.raises(kind):
            build(store)
        assert store.models() == []
    kept = build(store)
    with monkeypatch.context() as patched:
        patched.setattr(fitted, "build_spec", fail)
        with pytest.raises(kind):
            build(store, options={"max_tokens": 7})
    assert store.models() == [kept]
    assert not build(store).is_new


def test_a_full_disk_leaves_nothing_half_built(store: Store) -> None:
    """Files that reach a limit fail as those on a full disk do."""
    script = (
        "import resource, sys\n"
        "from pathlib import Path\n"
        "from llmserve.builder.plan import BuildSpec\n"
        "from llmserve.builder.store import Store\n"
        "from llmserve.plugins.registry import Registry\n"
        "registry = Registry.load()\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[2]),) * 2)\n"
        "Store(Path(sys.argv[1])).build(BuildSpec('hf', 'demo'), registry)\n"
    )
    assert resource.getrlimit(resource.RLIMIT_FSIZE)[0] == resource.RLIM_INFINITY
    for limit in (200, 100_000, 2_000_000):
        command = [sys.executable, "-c", script, str(store.folder), str(limit)]
        run = subprocess.run(command, capture_output=True, text=True, check=False)
        assert "Error: " in run.stderr
        assert [*store.models_folder.iterdir()] == []
    assert build(store).is_new


def test_a_model_without_its_record_is_built_again(store: Store) -> None:
    """The process was killed before it wrote the record, or another build came in between."""
    build(store)
    (record,) = (store.folder / "records").iterdir()
    for damaged in ("", "[]", "{}", record.read_text().replace('"manifest": "', '"manifest": "0')):
        record.write_text(damaged)
        (found,) = store.models()
        assert found.record is None
        assert build(store).is_new
    record.unlink()
    assert build(store).is_new


def test_a_model_is_removed_with_its_repository(store: Store) -> None:
    kept = build(store)
    store.remove("demo", force=False)
    assert store.models() == []
    assert not kept.repository.exists()
    for name in ("demo", "../home", ""):
        with pytest.raises(ConfigError, match="no model"):
            store.remove(name, force=True)
    assert build(store).is_new


def test_only_this_user_has_access(store: Store) -> None:
    build(store)
    assert store.folder.stat().st_mode & 0o777 == 0o700
    store.folder.chmod(0o777)
    with pytest.raises(ConfigError, match=r"other users may write to .*: chmod 700 it, or set LLM"):
        build(store)


def test_a_folder_that_cannot_be_written_is_reported(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(OutputError, match=r"cannot be written: .*: set LLMSERVE_HOME to another"):
        build(Store(tmp_path / "file" / "home"))


def test_the_home_is_in_the_users_cache_or_where_the_user_wants_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name in ("LLMSERVE_HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert home() == tmp_path / ".cache" / "llmserve"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert home() == tmp_path / "cache" / "llmserve"
    monkeypatch.setenv("LLMSERVE_HOME", "~/models")
    assert home() == tmp_path / "models"
