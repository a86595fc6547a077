"""Models on the hub: the real client against a cache made here and a hub that says no."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest

from llmserve.demo import demo_model_path

COMMIT = "0123456789abcdef0123456789abcdef01234567"
TOKEN = "hf_thisIsNotARealToken"


def cache(home: Path, repo_id: str) -> Path:
    """Make a cache as the hub's client leaves it after a download."""
    folder = home / "hub" / f"models--{repo_id.replace('/', '--')}"
    (folder / "refs").mkdir(parents=True)
    (folder / "refs" / "main").write_text(COMMIT)
    shutil.copytree(demo_model_path(), folder / "snapshots" / COMMIT)
    return folder / "snapshots" / COMMIT


def build(model: str, repo: Path, home: Path, **env: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "llmserve_cli", "build", "--plugin", "hf"]
    clean = {key: value for key, value in os.environ.items() if not key.startswith("HF_")}
    return subprocess.run(
        [*command, "--model", model, "--output", str(repo)],
        env={**clean, "HF_HOME": str(home), **env},
        capture_output=True,
        text=True,
        check=False,
    )


def test_a_model_in_the_cache_is_pinned_to_its_commit(tmp_path: Path) -> None:
    cache(tmp_path / "home", "acme/tiny")
    done = build("acme/tiny", tmp_path / "repo", tmp_path / "home", HF_HUB_OFFLINE="1")
    assert done.returncode == 0, done.stderr
    manifest = json.loads((tmp_path / "repo" / "tiny" / "llmserve.json").read_text())
    assert manifest["source"] == {"kind": "hub", "id": "acme/tiny", "revision": COMMIT}
    for role in ("tokenizer", "generator"):
        settings = manifest["components"][role]["settings"]
        assert (settings["id"], settings["revision"]) == ("acme/tiny", COMMIT)
    assert not list((tmp_path / "repo").rglob("*.safetensors"))


def test_what_is_not_in_the_cache_is_told_when_offline(tmp_path: Path) -> None:
    done = build("acme/tiny", tmp_path / "repo", tmp_path / "home", HF_HUB_OFFLINE="1")
    assert done.returncode == 3
    assert "is not in the cache" in done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "repo").exists()


@contextmanager
def hub(status: int, code: str) -> Iterator[tuple[str, list[Mapping[str, str]]]]:
    """Run a hub on loopback that answers everything with one refusal."""
    asked: list[Mapping[str, str]] = []

    class Refuses(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(dict(self.headers.items()))
            self.send_response(status)
            self.send_header("X-Error-Code", code)
            self.send_header("Content-Length", "0")
            self.end_headers()

        do_HEAD = do_GET

        def log_message(self, format: str, *args: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Refuses) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}", asked
        server.shutdown()


FILES = {path.name: path.read_bytes() for path in demo_model_path().iterdir() if path.is_file()}
MANY = {**FILES, "onnx/config.json": b"{}", "original/model.safetensors": b"0" * 1000}


@contextmanager
def generous_hub() -> Iterator[tuple[str, list[str]]]:
    """Run a hub on loopback that has one model, with copies of it in subfolders."""
    fetched: list[str] = []

    class Serves(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            path = self.path.partition("?")[0]
            name = path.rpartition(f"/resolve/{COMMIT}/")[2]
            if name in MANY:
                fetched.append(name)
                self.answer(MANY[name], ETag=f'"{name}"', **{"X-Repo-Commit": COMMIT})
            elif "/tree/" in path:
                sizes = {name: len(content) for name, content in MANY.items()}
                tree = [{"type": "file", "path": n, "size": s, "oid": n} for n, s in sizes.items()]
                self.answer(json.dumps(tree).encode())
            else:
                siblings = [{"rfilename": name} for name in MANY]
                info = {"id": "acme/tiny", "sha": COMMIT, "siblings": siblings}
                self.answer(json.dumps(info).encode())

        do_HEAD = do_GET

        def answer(self, content: bytes, **headers: str) -> None:
            self.send_response(200)
            for key, value in {**headers, "Content-Length": str(len(content))}.items():
                self.send_header(key, value)
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(content)

        def log_message(self, format: str, *args: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Serves) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}", fetched
        server.shutdown()


def test_what_lies_in_subfolders_is_not_fetched(tmp_path: Path) -> None:
    with generous_hub() as (url, fetched):
        done = build("acme/tiny", tmp_path / "repo", tmp_path / "home", HF_ENDPOINT=url)
    assert done.returncode == 0, done.stderr
    assert set(fetched) == FILES.keys()
    (snapshot,) = (tmp_path / "home").glob("hub/*/snapshots/*")
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
def test_a_refusal_is_one_line_that_names_the_mend(
    tmp_path: Path, status: int, code: str, message: str
) -> None:
    with hub(status, code) as (url, _):
        done = build("acme/tiny", tmp_path / "repo", tmp_path / "home", HF_ENDPOINT=url)
    assert done.returncode == 3
    (line,) = [line for line in done.stderr.splitlines() if message in line]
    assert line.startswith("llmserve: acme/tiny") or line.startswith("llmserve: the hub")
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "repo").exists()


def test_the_token_comes_from_the_environment_and_goes_nowhere_else(tmp_path: Path) -> None:
    # A token that a login stored is not ours to use.
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "token").write_text("hf_storedByALogin")
    with hub(403, "GatedRepo") as (url, asked):
        build("acme/tiny", tmp_path / "repo", tmp_path / "home", HF_ENDPOINT=url)
        assert asked
        assert not any("authorization" in {k.lower() for k in headers} for headers in asked)
        asked.clear()
        done = build(
            "acme/tiny", tmp_path / "repo", tmp_path / "home", HF_ENDPOINT=url, HF_TOKEN=TOKEN
        )
        sent = {v for headers in asked for k, v in headers.items() if k.lower() == "authorization"}
    assert sent == {f"Bearer {TOKEN}"}
    assert TOKEN not in done.stdout + done.stderr
