"""Models on the hub: the real client with a prepared cache and with hubs on this machine."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from http.server import BaseHTTPRequestHandler
from pathlib import Path

import pytest

import llmserve
from llmserve.demo import demo_model_path
from llmserve.errors import ModelSourceError
from llmserve.testing.command import LLMSERVE, run
from llmserve.testing.tiny_adapters import save_adapter
from llmserve.testing.web import http_server, reply
from tests.live.servers import eventually
from tests.loopback_hub import COMMIT, MODEL, Hub, demo_files, proxy, tls_hub
from tests.support import hub_cache

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


FILES = demo_files()
REPO = {**FILES, "onnx/config.json": b"{}", "original/model.safetensors": b"0" * 1000}


def test_files_in_subfolders_are_not_downloaded(repo: Path) -> None:
    hub = Hub(REPO)
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


def surroundings(home: Path, **env: str) -> dict[str, str]:
    """Return what a process of this machine has, without settings of the hub and of proxies."""
    clean = {
        key: value for key, value in os.environ.items()
        if not key.startswith("HF_") and not key.lower().endswith("_proxy")
    }  # fmt: skip
    return {**clean, "HF_HOME": str(home), **env}


def adapter_files(folder: Path) -> dict[str, bytes]:
    """Return an adapter of the demo model, beside what else its authors have uploaded."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(demo_model_path()))
    saved = save_adapter(folder, model, targets=("c_attn",))
    others = {"adapter_model.bin": b"x", "tokenizer.json": b"{}", "run.py": b"", "README.md": b""}
    own = ("adapter_config.json", "adapter_model.safetensors")
    return {**others, **{name: (saved / name).read_bytes() for name in own}}


@pytest.mark.parametrize("by", ["build", "add"])
def test_an_adapter_of_the_hub_is_downloaded_without_anything_else(repo: Path, by: str) -> None:
    hub, home = Hub(adapter_files(repo.parent / "saved")), repo.parent / "home"
    build = ["build", "--plugin", "iterative", "--model", "demo", "--output", str(repo)]
    with hub.serving() as url:
        env = surroundings(home, HF_ENDPOINT=url)
        if by == "build":
            done = run(*build, "--adapter", f"sql={MODEL}", env=env)
        else:
            assert run(*build, env=env).returncode == 0
            add = ["adapter", "add", "demo", f"sql={MODEL}", "--repository", str(repo)]
            done = run(*add, env=env)
    assert done.returncode == 0, done.stderr
    assert "note: the adapter sql was trained on tiny" in done.stderr
    assert sorted(hub.downloaded) == ["adapter_config.json", "adapter_model.safetensors"]
    for file in (repo / "demo/1/adapters/sql").iterdir():
        assert not file.is_symlink()
        assert file.read_bytes() == hub.files[file.name]


def test_what_is_no_adapter_on_the_hub_is_refused_before_anything_is_built(repo: Path) -> None:
    hub, home = Hub({"config.json": b"{}"}), repo.parent / "home"
    build = ["build", "--plugin", "iterative", "--model", "demo", "--output", str(repo)]
    with hub.serving() as url:
        for files, words in (
            ({"config.json": b"{}"}, "has no file adapter_config.json"),
            ({"adapter_config.json": b'{"peft_type": "LORA", "r": 4}', "adapter_model.bin": b""},
             "has no adapter_model.safetensors"),
        ):  # fmt: skip
            hub.files = files
            done = run(*build, "--adapter", f"sql={MODEL}", env=surroundings(home, HF_ENDPOINT=url))
            assert done.returncode == 3
            assert words in done.stderr
            assert "Traceback" not in done.stderr
    assert "adapter_model.bin" not in hub.downloaded
    assert not repo.exists()


FETCH = """
import sys
from llmserve.builder.source import resolve
from llmserve.errors import LLMServeError
try:
    print(resolve("acme/tiny", report=lambda said: print(said, flush=True)).path)
except LLMServeError as error:
    sys.exit(str(error))
"""


def fetch(home: Path, **env: str) -> subprocess.Popen[str]:
    """Only download the model, in a process of its own."""
    return subprocess.Popen(
        [sys.executable, "-c", FETCH], env=surroundings(home, **env), text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip


def ended(process: subprocess.Popen[str]) -> tuple[list[str], str]:
    stdout, stderr = process.communicate(timeout=60)
    return stdout.splitlines(), stderr


def test_a_second_process_waits_for_the_first_and_downloads_nothing(tmp_path: Path) -> None:
    hub = Hub(FILES, seconds_per_block=1)
    with hub.serving() as url:
        first = fetch(tmp_path / "home", HF_ENDPOINT=url)
        eventually(lambda: hub.sent["model.safetensors"])
        second = fetch(tmp_path / "home", HF_ENDPOINT=url)
        assert second.stdout is not None
        # However long it takes to start.
        waiting = second.stdout.readline()
        hub.seconds_per_block = 0
        assert waiting == "waiting for another process that downloads acme/tiny\n"
        said, stderr = ended(first)
        assert stderr == ""
        assert ended(second) == ([said[-1]], "")
    assert hub.sent_bytes() == {name: len(content) for name, content in FILES.items()}


def test_ctrl_c_keeps_what_was_downloaded_and_the_next_build_goes_on(repo: Path) -> None:
    hub = Hub(FILES, seconds_per_block=0.01)
    args = ["build", "--plugin", "hf", "--model", "acme/tiny", "--output", str(repo)]
    with hub.serving() as url:
        env = surroundings(repo.parent / "home", HF_ENDPOINT=url)
        first = subprocess.Popen([*LLMSERVE, *args], env=env, text=True, stderr=subprocess.PIPE)
        eventually(lambda: hub.sent["model.safetensors"] > 200_000)
        first.send_signal(signal.SIGINT)
        _, said = first.communicate(timeout=10)
        assert first.returncode == 130
        assert "what was downloaded is kept: the same command goes on from there" in said
        assert "Traceback" not in said
        assert not list(repo.parent.glob("home/hub/*/snapshots"))
        (part,) = repo.parent.glob("home/hub/*/blobs/*.llmserve.incomplete")
        kept = part.stat().st_size
        assert kept > 100_000
        hub.sent_bytes()
        hub.sent.clear()
        done = run(*args, env=env)
    assert done.returncode == 0, done.stderr
    assert hub.sent_bytes()["model.safetensors"] == len(FILES["model.safetensors"]) - kept


def test_a_process_that_is_killed_leaves_what_the_next_one_goes_on_from(tmp_path: Path) -> None:
    hub = Hub(FILES, seconds_per_block=0.01)
    with hub.serving() as url:
        first = fetch(tmp_path / "home", HF_ENDPOINT=url)
        eventually(lambda: hub.sent["model.safetensors"] > 200_000)
        first.kill()
        first.communicate()
        (part,) = tmp_path.glob("home/hub/*/blobs/*.llmserve.incomplete")
        kept = part.stat().st_size
        hub.sent_bytes()
        hub.sent.clear()
        said, stderr = ended(fetch(tmp_path / "home", HF_ENDPOINT=url))
    assert (stderr, said[0]) == ("", "downloading acme/tiny")
    assert hub.sent_bytes()["model.safetensors"] == len(FILES["model.safetensors"]) - kept
    assert (Path(said[-1]) / "model.safetensors").read_bytes() == FILES["model.safetensors"]


ON_A_SMALL_DISK = """
mount -t tmpfs -o size=1m tmpfs "$HF_HOME" || exit 9
"$0" -c "$1"; echo "ended with $?"
ls "$HF_HOME"/hub/*/blobs/*.incomplete >/dev/null && mount -o remount,size=64m "$HF_HOME"
"$0" -c "$1"; echo "ended with $?"
"""


def test_a_disk_that_fills_in_the_middle_loses_nothing(tmp_path: Path) -> None:
    # What says no sizes cannot be refused before.
    hub, home = Hub(FILES, is_plain=True, knows_sizes=False), tmp_path / "home"
    home.mkdir()
    with hub.serving() as url:
        done = subprocess.run(
            ["unshare", "-Urm", "sh", "-c", ON_A_SMALL_DISK, sys.executable, FETCH],
            env=surroundings(home, HF_ENDPOINT=url), capture_output=True, text=True, check=False,
        )  # fmt: skip
    if done.returncode == 9 or "unshare" in done.stderr:
        pytest.skip("this machine does not allow mounts")
    assert (
        f"the disk of {home}/hub is full: make some space: the same command goes on" in done.stderr
    )
    assert done.stdout.count("ended with 1") == done.stdout.count("ended with 0") == 1
    assert "Traceback" not in done.stderr
    ranges = [asked.headers["range"] for asked in hub.gets() if "range" in asked.headers]
    assert ranges, "it went on from there"


def test_a_mirror_and_a_proxy_are_those_of_the_hubs_own_variables(tmp_path: Path) -> None:
    hub = Hub(FILES)
    with proxy(hub) as (address, asked):
        env = {"HF_ENDPOINT": "http://hub.invalid/mirror", "HTTP_PROXY": address}
        said, stderr = ended(fetch(tmp_path / "plain", **env))
        assert stderr == ""
        assert said[-1].endswith(COMMIT)
        assert all(each.startswith("http://hub.invalid/mirror/") for each in asked)
    with tls_hub(hub, tmp_path) as (target, cert), proxy(hub, target=target) as (address, asked):
        env = {"HF_ENDPOINT": "https://hub.invalid", "HTTPS_PROXY": address}
        env |= {"SSL_CERT_FILE": str(cert), "REQUESTS_CA_BUNDLE": str(cert)}
        said, stderr = ended(fetch(tmp_path / "tunnel", **env))
        assert stderr == ""
        assert said[-1].endswith(COMMIT)
        assert set(asked) == {"hub.invalid:443"}
    said, stderr = ended(fetch(tmp_path / "none", HF_ENDPOINT="https://hub.invalid",
                               HTTPS_PROXY="http://me:secret@127.0.0.1:9"))  # fmt: skip
    assert "the hub cannot be reached: https://hub.invalid: " in stderr
    assert "secret" not in stderr
    assert "Traceback" not in stderr
