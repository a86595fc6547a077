"""A model comes from the hub whole, whatever happens on the way, and no byte of it twice."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from llmserve.builder.hub import download as downloading
from llmserve.builder.hub import failures
from llmserve.builder.progress import Note, PartDone
from llmserve.builder.source import resolve
from llmserve.errors import LLMServeError, ModelSourceError, OutputError
from tests.loopback_hub import COMMIT, MODEL, Hub, point_to

WEIGHTS = os.urandom(300_000)
FILES = {"config.json": b"{}", "tokenizer.json": b'{"model": {}}', "model.safetensors": WEIGHTS}
PARTS = "hub/models--acme--tiny/blobs/*.llmserve.incomplete"


@pytest.fixture
def home(tmp_path: Path) -> Path:
    return tmp_path / "home"


@pytest.fixture
def hub(home: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    monkeypatch.setattr(failures, "PAUSES", (0.01,) * 3)
    monkeypatch.setattr(downloading, "PAUSES", (0.01,) * 3)
    hub = Hub(dict(FILES))
    with hub.serving() as url:
        point_to(url, home, monkeypatch)
        yield hub


def fetched(said: list[str] | None = None, revision: str = "") -> Path:
    report = (lambda _: None) if said is None else said.append
    return resolve(MODEL, revision=revision, report=report).path


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_a_download_goes_on_where_its_connection_was_cut(hub: Hub, home: Path) -> None:
    hub.cuts["model.safetensors"] = [100_000, 0, 50_000]
    folder = fetched()
    assert contents(folder) == FILES
    assert folder.name == COMMIT
    assert hub.sent_bytes() == {name: len(content) for name, content in FILES.items()}
    assert not list(home.glob(PARTS))


def test_a_download_that_broke_off_goes_on_with_the_next_command(hub: Hub, home: Path) -> None:
    hub.cuts["model.safetensors"] = [100_000, *[0] * 20]
    with pytest.raises(ModelSourceError, match=r"acme/tiny could not be downloaded: ") as broken:
        fetched()
    assert broken.value.hint is not None
    assert broken.value.hint.startswith("the same command goes on from what is here, 0 MB of 0 MB")
    (part,) = home.glob(PARTS)
    assert part.stat().st_size == 100_000
    # Without its weights, it is no model of the cache.
    assert not list(home.glob("hub/*/snapshots/*"))
    hub.cuts.clear()
    assert contents(fetched()) == FILES
    assert hub.sent_bytes() == {name: len(content) for name, content in FILES.items()}


@pytest.mark.parametrize("knows", [True, False])
def test_a_hub_that_does_not_go_on_sends_the_whole_again(hub: Hub, knows: bool) -> None:
    hub.cuts["model.safetensors"] = [100_000]
    hub.ignores_ranges = True
    assert contents(fetched()) == FILES
    assert hub.sent_bytes()["model.safetensors"] == 400_000


def test_what_is_here_already_is_not_asked_for(hub: Hub) -> None:
    fetched()
    hub.asked.clear()
    assert contents(fetched()) == FILES
    assert hub.downloaded == []


def test_a_hub_that_is_busy_is_asked_again_when_it_says(hub: Hub) -> None:
    hub.busy = [(503, {}), (429, {"Retry-After": "0"})]
    hub.refusals = [(429, {"Retry-After": "1"}), (500, {}), (503, {}), (504, {})]
    said: list[str] = []
    assert contents(fetched(said)) == FILES
    assert "acme/tiny: the hub answers 503, again in 0.01 s" in said
    assert hub.sent_bytes() == {name: len(content) for name, content in FILES.items()}


@pytest.mark.parametrize(
    ("status", "headers", "message"),
    [
        (503, {}, r"^the hub answers 503 for \S+ of acme/tiny: try again later: what was"),
        (429, {}, r"^the hub answers 429 for .*with a token in HF_TOKEN it allows more$"),
        (429, {"Retry-After": "9999"}, r"^the hub answers 429 for \S+ .*, and asks to wait 9999 s"),
        (429, {"ratelimit": '"api";r=0;t=555'}, r"^the hub answers 429 .* asks to wait 555 s"),
        (429, {"Retry-After": "Wed, 21 Oct 2099 07:28:00 GMT"}, r" asks to wait \d{9,} s"),
    ],
)
def test_a_hub_that_stays_busy_is_one_line(
    hub: Hub, status: int, headers: dict[str, str], message: str
) -> None:
    hub.refusals = [(status, headers)] * 40
    with pytest.raises(ModelSourceError, match=message):
        fetched()
    hub.refusals = []
    assert contents(fetched()) == FILES


def test_the_list_of_a_hub_that_stays_busy_is_one_line(hub: Hub) -> None:
    hub.busy = [(502, {})] * 9
    with pytest.raises(ModelSourceError, match=r"^the hub answers 502 for acme/tiny: try again"):
        fetched()


def test_a_hub_that_falls_silent_is_said_and_given_up(
    hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_DOWNLOAD_TIMEOUT", 0.6)
    monkeypatch.setattr(downloading, "_SILENCE", 0.2)
    hub.silent = {"model.safetensors"}
    said: list[str] = []
    try:
        with pytest.raises(ModelSourceError, match=r"could not be downloaded: .*timed out"):
            fetched(said)
    finally:
        hub.silent.clear()
    amounts = [message.amount for message in said if isinstance(message, PartDone)]
    assert any("nothing has come for" in amount for amount in amounts)
    assert contents(fetched()) == FILES


def test_one_bar_tells_of_all_files_together(hub: Hub) -> None:
    hub.files["model.safetensors"] = os.urandom(2_000_000)
    hub.seconds_per_block = 0.01
    said: list[str] = []
    fetched(said)
    parts = [message for message in said if isinstance(message, PartDone)]
    assert {str(part) for part in parts} == {"downloading acme/tiny"} == set(said)
    shares = [part.share for part in parts]
    assert shares == sorted(shares)
    assert shares[0] < 0.01
    assert shares[-1] == 1
    assert len(set(shares)) > 3
    assert parts[-1].amount.startswith("2 MB of 2 MB")
    assert any(
        part.left and re.fullmatch(r"[012] MB of 2 MB, \d\.\d MB/s", part.amount) for part in parts
    )


def test_a_disk_that_is_too_small_is_said_before(hub: Hub, home: Path) -> None:
    hub.listed["model.safetensors"] = 10**16
    with pytest.raises(OutputError, match=r"acme/tiny takes 10000000\.0 GB to download, .* free"):
        fetched()
    assert hub.downloaded == []


def test_all_files_are_of_the_commit_that_was_asked_for_first(hub: Hub) -> None:
    def change(name: str) -> None:
        hub.commit = COMMIT[::-1]

    hub.before_file = change
    folder = fetched()
    assert folder.name == COMMIT
    assert contents(folder) == FILES
    assert all(f"/resolve/{COMMIT}/" in asked.path for asked in hub.gets() if "/acme/" in asked.path
               and "/api/" not in asked.path)  # fmt: skip


def test_a_new_commit_takes_only_what_has_changed(hub: Hub, home: Path) -> None:
    fetched()
    hub.commit, hub.files["config.json"] = COMMIT[::-1], b'{"new": 1}'
    hub.asked.clear()
    folder = fetched()
    assert (folder.name, hub.downloaded) == (COMMIT[::-1], ["config.json"])
    assert contents(folder) == hub.files
    assert (home / "hub/models--acme--tiny/refs/main").read_text() == COMMIT[::-1]
    assert contents(folder.with_name(COMMIT)) == FILES


def test_a_part_of_something_else_is_downloaded_anew(hub: Hub, home: Path) -> None:
    hub.cuts["model.safetensors"] = [100_000, *[0] * 20]
    with pytest.raises(ModelSourceError):
        fetched()
    (part,) = home.glob(PARTS)
    part.write_bytes(b"0" * 100_000)
    hub.cuts.clear()
    said: list[str] = []
    assert contents(fetched(said)) == FILES
    assert any("model.safetensors is downloaded anew" in each for each in said
               if isinstance(each, Note))  # fmt: skip
    # One that is too long cannot be a part of it.
    for link in home.glob("hub/*/snapshots/*/model.safetensors"):
        content = link.resolve()
        link.unlink()
        content.rename(part)
    part.write_bytes(WEIGHTS + b"0")
    assert contents(fetched()) == FILES


def test_a_large_file_is_asked_for_in_pieces(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(downloading, "LONGEST_ANSWER", 70_000)
    assert contents(fetched()) == FILES
    assert hub.sent_bytes()["model.safetensors"] == len(WEIGHTS)
    assert hub.downloaded.count("model.safetensors") == 5


@pytest.mark.parametrize("knows_sizes", [True, False])
def test_a_mirror_that_lists_names_alone_will_do(hub: Hub, knows_sizes: bool) -> None:
    hub.is_plain, hub.knows_sizes = True, knows_sizes
    assert contents(fetched()) == FILES
    assert hub.sent_bytes() == {name: len(content) for name, content in FILES.items()}


def test_a_cache_that_cannot_be_written_is_one_line(hub: Hub, home: Path) -> None:
    home.mkdir()
    (home / "hub").write_text("in the way")
    with pytest.raises(
        OutputError, match=r"the cache of the hub in .* cannot be written: Not a dir"
    ):
        fetched()


def test_without_a_hub_the_cache_will_do_and_that_is_said(
    hub: Hub, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = fetched()
    point_to("http://127.0.0.1:9", home, monkeypatch)
    said: list[str] = []
    assert fetched(said) == folder
    assert len(said) == 1
    assert said[0].startswith("the hub cannot be reached (")
    assert said[0].endswith("): acme/tiny is taken from the cache")
    assert fetched(revision=COMMIT) == folder
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert fetched(said) == folder
    assert len(said) == 1, "who wants no connection is not told that there is none"


def test_without_a_hub_and_a_cache_it_is_one_line(
    hub: Hub, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    point_to("http://127.0.0.1:9", home, monkeypatch)
    with pytest.raises(LLMServeError) as caught:
        fetched()
    problem, hint = caught.value.problem, caught.value.hint
    assert problem.startswith("acme/tiny is not in the cache, and the hub cannot be reached: ")
    assert "http://127.0.0.1:9: " in problem
    assert hint is not None
    assert "HF_ENDPOINT names a mirror, and HTTPS_PROXY a proxy" in hint


def test_a_part_in_the_cache_is_told_apart_from_a_model(
    hub: Hub, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (fetched() / "model.safetensors").unlink()
    point_to("http://127.0.0.1:9", home, monkeypatch)
    with pytest.raises(ModelSourceError, match="only a part of acme/tiny is in the cache"):
        fetched()
