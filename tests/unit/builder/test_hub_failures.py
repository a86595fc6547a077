"""What a hub refuses is one line that says what to do; what a hostile one sends does no harm."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from http.server import BaseHTTPRequestHandler
from pathlib import Path

import pytest

from llmserve.builder.hub import download as downloading
from llmserve.builder.size import size_of
from llmserve.builder.source import resolve
from llmserve.errors import ModelSourceError
from llmserve.testing.web import http_server, reply
from tests.loopback_hub import COMMIT, MODEL, Hub, point_to

TOKEN = "hf_thisIsNotARealToken"
WEIGHTS = os.urandom(200_000)
FILES = {"config.json": b"{}", "model.safetensors": WEIGHTS}


@pytest.fixture
def home(tmp_path: Path) -> Path:
    return tmp_path / "home"


@pytest.fixture
def hub(home: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    monkeypatch.setattr(downloading, "PAUSES", (0.01,) * 2)
    hub = Hub(dict(FILES))
    with hub.serving() as url:
        point_to(url, home, monkeypatch)
        yield hub


def fetched(model: str = MODEL, revision: str = "") -> Path:
    return resolve(model, revision=revision, report=lambda _: None).path


def refused(model: str = MODEL, revision: str = "") -> str:
    with pytest.raises(ModelSourceError) as caught:
        fetched(model, revision)
    assert TOKEN not in str(caught.value)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def files_outside(home: Path) -> list[Path]:
    """Return what is beside the cache, or in none of its folders."""
    places = ("blobs", "refs", "snapshots")
    return [
        path for path in home.parent.rglob("*")
        if path.is_file() and not (
            path.is_relative_to(home / "hub" / ".locks")
            or any(path.is_relative_to(home / "hub/models--acme--tiny" / each) for each in places)
        )
    ]  # fmt: skip


def test_a_private_model_names_the_token(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.private = TOKEN
    assert refused().endswith("or it is private: check the id; for a private model set HF_TOKEN to "
                              "your token")  # fmt: skip
    monkeypatch.setenv("HF_TOKEN", "hf_another")
    assert refused().endswith("for a private model your token in HF_TOKEN may not see it")
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    assert (fetched() / "model.safetensors").read_bytes() == WEIGHTS


@pytest.mark.parametrize(
    ("status", "headers", "message"),
    [
        (403, {"X-Error-Code": "GatedRepo"}, "acme/tiny is gated: request access on its page, "),
        (
            401,
            {"X-Error-Message": "Invalid credentials in Authorization header"},
            "the hub {} for ",
        ),
        (403, {}, "the hub {} for "),
        (404, {"X-Error-Code": "EntryNotFound"}, "acme/tiny has no file "),
        (404, {}, "acme/tiny has no file "),
        (451, {}, "the hub answers 451 for "),
    ],
)
def test_a_refused_file_names_the_fix(
    hub: Hub,
    status: int,
    headers: Mapping[str, str],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    hub.refusals = [(status, headers)] * 9
    assert refused().startswith(message.format("wants a token"))
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    assert refused().startswith(message.format("does not accept your token in HF_TOKEN"))


def test_a_wrong_name_or_revision_is_said(hub: Hub) -> None:
    assert refused("acme/other").startswith("the hub has no model 'acme/other', or it is private")
    assert refused("acme/a--b").startswith("acme/a--b is no id on the hub: it is OWNER/NAME")
    hub.busy = [(404, {"X-Error-Code": "RevisionNotFound"})]
    assert refused(revision="v9").startswith("acme/tiny has no revision 'v9': see its page")


@pytest.mark.parametrize(
    "answer",
    [
        b"<html>Please log in</html>", b"", b"[]", b"3", b'{"id": 3}', b'{"sha": null}',
        b'{"id": "acme/tiny", "sha": "../../../../x", "siblings": []}',
        json.dumps({"id": MODEL, "sha": COMMIT, "siblings": 7}).encode(),
        json.dumps({"id": MODEL, "sha": COMMIT, "siblings": [{"size": 1}]}).encode(),
    ],
)  # fmt: skip
def test_what_is_no_hub_is_said_to_be_none(
    answer: bytes, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with http_server(lambda request: reply(request, answer)) as url:
        point_to(url, home, monkeypatch)
        said = refused()
    assert said.startswith(
        f"what answers for acme/tiny at {url} is no hub: look at it in a browser"
    )
    assert files_outside(home) == []


@pytest.mark.parametrize("wrong", ["hf_abc\nX-Evil: 1", "hf_\u00fcmlaut", "hf abc"])
def test_a_token_that_is_none_is_not_shown(
    hub: Hub, wrong: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", wrong)
    said = refused()
    assert said.startswith("HF_TOKEN is no token of the hub")
    assert wrong[:6] not in said
    # What a file of a secret ends with is no part of it.
    monkeypatch.setenv("HF_TOKEN", f"{TOKEN}\n")
    hub.private = TOKEN
    fetched()


def test_the_token_does_not_follow_to_another_host(
    hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    other = Hub(dict(FILES))
    with other.serving() as address:
        hub.elsewhere = address
        hub.cuts = {}
        other.cuts = {"model.safetensors": [100_000]}
        assert (fetched() / "model.safetensors").read_bytes() == WEIGHTS
    assert other.sent_bytes()["model.safetensors"] == len(WEIGHTS), "it went on there as well"
    assert all(
        "authorization" in asked.headers for asked in hub.gets() if "/resolve/" in asked.path
    )
    assert other.asked
    assert not any("authorization" in asked.headers for asked in other.asked)
    assert not any(TOKEN in str(asked) for asked in other.asked)


@pytest.mark.parametrize("location", ["file:///etc/passwd", "ftp://x/y", "http://[", "\\\\x\\y"])
def test_a_file_is_had_from_nowhere_else_than_the_web(hub: Hub, home: Path, location: str) -> None:
    hub.refusals = [(302, {"Location": location})] * 40
    refused()
    assert not list(home.glob("hub/*/snapshots/*"))


@pytest.mark.parametrize(
    "name",
    [
        "../evil.json", "../../../../evil.json", "/tmp/evil.json", "..\\evil.json", "C:\\evil.json",
        "a/../../evil.json", "./evil.json", "evil\0.json", "a//evil.json", "evil\n.json", "..",
    ],
)  # fmt: skip
def test_a_name_that_leads_elsewhere_is_left_out(hub: Hub, home: Path, name: str) -> None:
    hub.files[name] = b'{"evil": 1}'
    folder = fetched()
    assert {path.name for path in folder.iterdir()} == FILES.keys()
    assert files_outside(home) == []
    assert refused(f"{MODEL}:evil.gguf").startswith("acme/tiny has no file evil.gguf")


@pytest.mark.parametrize(
    "etag", ['"../../../../evil"', '"a/b"', '"/tmp/evil"', '".."', '""', '"\\x"']
)
def test_a_name_of_a_content_that_leads_elsewhere_is_refused(
    home: Path, etag: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def answer(request: BaseHTTPRequestHandler) -> None:
        siblings = [{"rfilename": name} for name in FILES]
        info = json.dumps({"id": MODEL, "sha": COMMIT, "siblings": siblings}).encode()
        is_file = "/resolve/" in request.path
        headers = {"ETag": etag, "X-Repo-Commit": COMMIT, "X-Linked-Size": "4"} if is_file else {}
        reply(request, b"evil" if is_file else info, headers=headers)

    with http_server(answer) as url:
        point_to(url, home, monkeypatch)
        assert "is no hub" in refused()
    assert files_outside(home) == []


@pytest.mark.parametrize("blob", ["../../../evil", "/tmp/evil", "", 7, None, "a" * 39, ["x"]])
@pytest.mark.parametrize("size", [-1, "5", None, True, 1.5])
def test_a_listed_hash_or_size_that_is_none_is_not_believed(
    hub: Hub, home: Path, blob: object, size: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    listed = hub._listed

    def lying(name: str, *, described: bool) -> Mapping[str, object]:
        return {**listed(name, described=described), "blobId": blob, "size": size, "lfs": None}

    monkeypatch.setattr(hub, "_listed", lying)
    try:
        folder = fetched()
    except ModelSourceError as error:
        assert "is no hub" in str(error)  # noqa: PT017
    else:
        assert {path.name: path.read_bytes() for path in folder.iterdir()} == FILES
    assert files_outside(home) == []


@pytest.mark.parametrize("said", [len(WEIGHTS) - 1, len(WEIGHTS) + 1, 0, 5])
def test_a_size_that_lies_ends_the_download(hub: Hub, home: Path, said: int) -> None:
    hub.listed["model.safetensors"] = said
    message = refused()
    assert "model.safetensors" in message or "could not be downloaded" in message
    assert not list(home.glob("hub/*/snapshots/*"))
    hub.listed.clear()
    assert (fetched() / "model.safetensors").read_bytes() == WEIGHTS


def test_a_content_that_is_not_what_was_listed_is_not_taken(hub: Hub, home: Path) -> None:
    def change(name: str) -> None:
        hub.files["model.safetensors"] = WEIGHTS[:-1] + b"?"

    hub.before_file = change
    assert refused().startswith("model.safetensors of acme/tiny is not what the hub says it is")
    assert not list(home.glob("hub/*/snapshots/*"))
    assert sum(path.stat().st_size for path in home.glob("hub/*/blobs/*.incomplete")) == 0


def test_the_password_of_a_mirror_is_not_shown(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    point_to("http://me:secret@127.0.0.1:9", home, monkeypatch)
    assert "secret" not in refused()


def test_no_fit_is_told_of_a_file_that_is_not_there(hub: Hub) -> None:
    assert size_of(f"{MODEL}:other-Q8_0.gguf") is None
