"""Models on the hub: the real client with a prepared cache and with hubs on this machine."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler
from pathlib import Path

import pytest

import llmserve
from llmserve.demo import demo_model_path
from llmserve.errors import ModelSourceError
from llmserve.testing.command import run
from llmserve.testing.web import http_server, reply
from tests.support import hub_cache

COMMIT = "0123456789abcdef0123456789abcdef01234567"
TOKEN = "hf_thisIsNotARealToken"


def build(repo: Path, **env: str) -> subprocess.CompletedProcess[str]:
    clean = {key: value for key, value in os.environ.items() if not key.startswith("HF_")}
    args = ["build", "--plugin", "hf", "--model", "acme/tiny", "--output", str(repo)]
    return run(*args, env={**clean, "HF_HOME": str(repo.parent / "home"), **env})


def test_a_model_in_the_cache_is_pinned_to_its_commit(repo: Path) -> None:
    hub_cache(repo.parent / "home", "acme/tiny", COMMIT)
    done = build(repo, HF_HUB_OFFLINE="1")
    assert done.returncode == 0, done.stderr
    manifest = json.loads((repo / "tiny" / "llmserve.json").read_text())
    assert manifest["source"] == {"kind": "hub", "id": "acme/tiny", "revision": COMMIT}
    for role in ("tokenizer", "generator"):
        settings = manifest["components"][role]["settings"]
        assert (settings["id"], settings["revision"]) == ("acme/tiny", COMMIT)
    assert not list(repo.rglob("*.safetensors"))


def test_a_model_that_is_not_in_the_cache_is_reported_when_offline(repo: Path) -> None:
    done = build(repo, HF_HUB_OFFLINE="1")
    assert done.returncode == 3
    assert "is not in the cache" in done.stderr
    assert "Traceback" not in done.stderr
    assert not repo.exists()


def test_links_are_followed_only_within_a_model_and_into_the_hubs_blobs(
    repo: Path, folder: Path
) -> None:
    snapshot = hub_cache(repo.parent / "home", "acme/tiny", COMMIT)
    weights = snapshot / "model.safetensors"
    assert weights.is_symlink()
    result = llmserve.build("hf", str(snapshot), output=repo, name="hub")
    copied = result.folder / "1" / "model" / "model.safetensors"
    assert not copied.is_symlink()
    assert copied.read_bytes() == weights.read_bytes()
    (folder / "model.safetensors").rename(folder / "real")
    (folder / "model.safetensors").symlink_to("real")
    llmserve.build("hf", str(folder), output=repo, name="within")
    secret = repo.parent / "secret.txt"
    secret.write_text("not yours")
    for model in (folder, snapshot):
        (model / "vocab.txt").symlink_to(secret)
        with pytest.raises(ModelSourceError, match=r"vocab\.txt is a link to .*secret\.txt, outs"):
            llmserve.build("hf", str(model), output=repo, name="other")
    assert not (repo / "other").exists()


FILES = {path.name: path.read_bytes() for path in demo_model_path().iterdir() if path.is_file()}
REPO = {**FILES, "onnx/config.json": b"{}", "original/model.safetensors": b"0" * 1000}


@dataclass
class Hub:
    """A hub with one model, which a test may change."""

    commit: str = COMMIT
    downloaded: list[str] = field(default_factory=list)
    asked: list[str] = field(default_factory=list)

    def serving(self) -> AbstractContextManager[str]:
        return http_server(self._answer)

    def _answer(self, request: BaseHTTPRequestHandler) -> None:
        path = request.path.partition("?")[0]
        self.asked.append(path)
        name = path.rpartition(f"/resolve/{self.commit}/")[2]
        headers = {}
        if name in REPO:
            self.downloaded.append(name)
            content, headers = REPO[name], {"ETag": f'"{name}"', "X-Repo-Commit": self.commit}
        elif "/tree/" in path:
            tree = [{"type": "file", "path": n, "size": len(c), "oid": n} for n, c in REPO.items()]
            content = json.dumps(tree).encode()
        else:
            siblings = [{"rfilename": name} for name in REPO]
            info = {"id": "acme/tiny", "sha": self.commit, "siblings": siblings}
            content = json.dumps(info).encode()
        reply(request, content, headers=headers)


def test_files_in_subfolders_are_not_downloaded(repo: Path) -> None:
    hub = Hub()
    with hub.serving() as url:
        done = build(repo, HF_ENDPOINT=url)
    assert done.returncode == 0, done.stderr
    assert set(hub.downloaded) == FILES.keys()
    (snapshot,) = (repo.parent / "home").glob("hub/*/snapshots/*")
    assert {path.name for path in snapshot.iterdir()} == FILES.keys()


@pytest.mark.parametrize(
    ("status", "code", "message"),
    [
        (403, "GatedRepo", "is gated"),
        (401, "RepoNotFound", "or it is private"),
        (404, "RepoNotFound", "no model"),
        (404, "RevisionNotFound", "no revision"),
    ],
)
def test_a_refusal_is_one_line_that_names_the_fix(
    repo: Path, status: int, code: str, message: str
) -> None:
    headers = {"X-Error-Code": code}
    with http_server(lambda request: reply(request, status=status, headers=headers)) as url:
        done = build(repo, HF_ENDPOINT=url)
    assert done.returncode == 3
    (line,) = [line for line in done.stderr.splitlines() if message in line]
    assert line.startswith(("llmserve: acme/tiny", "llmserve: the hub"))
    assert "Traceback" not in done.stderr
    assert not repo.exists()


def test_the_token_comes_from_the_environment_and_goes_nowhere_else(repo: Path) -> None:
    # A token that a login stored must not be used.
    (repo.parent / "home").mkdir()
    (repo.parent / "home" / "token").write_text("hf_storedByALogin")
    received: list[Mapping[str, str]] = []

    def refuse(request: BaseHTTPRequestHandler) -> None:
        received.append({key.lower(): value for key, value in request.headers.items()})
        reply(request, status=403, headers={"X-Error-Code": "GatedRepo"})

    with http_server(refuse) as url:
        build(repo, HF_ENDPOINT=url)
        assert received
        assert not any("authorization" in headers for headers in received)
        received.clear()
        done = build(repo, HF_ENDPOINT=url, HF_TOKEN=TOKEN)
    sent = {headers["authorization"] for headers in received if "authorization" in headers}
    assert sent == {f"Bearer {TOKEN}"}
    assert TOKEN not in done.stdout + done.stderr
