"""Helpers that tests of several tiers share."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Event, Thread
from typing import IO, Any

from llmserve.demo import demo_model_path
from llmserve.runtime import Generation, Params
from llmserve.runtime.drivers.batch import BatchDriver
from llmserve.testing import ByteTokenizer, FakeRequest, LiveTriton, make_parts

ROOT = Path(__file__).parents[1]
_BYTES = ByteTokenizer()
LLMSERVE = [sys.executable, "-m", "llmserve_cli"]


def run(
    *arguments: str,
    stdin: str = "",
    cwd: Path | None = None,
    env: Mapping[str, str] = os.environ,
    stdout: int | IO[str] = subprocess.PIPE,
    **extra_env: str,
) -> subprocess.CompletedProcess[str]:
    """Run the command line in a separate process, as a user's shell does."""
    return subprocess.run(
        [*LLMSERVE, *arguments],
        cwd=cwd, env={**env, **extra_env}, input=stdin, stdout=stdout, stderr=subprocess.PIPE,
        encoding="utf-8", check=False, timeout=240,
    )  # fmt: skip


def install(site: Path, name: str, entries: str, version: str = "1.2", **modules: str) -> None:
    """Write a distribution into a folder, as an installer does."""
    info = describe(site, name, version)
    (info / "entry_points.txt").write_text(entries)
    for module, source in modules.items():
        (site / f"{module}.py").write_text(source)


def describe(
    site: Path, name: str, version: str = "1.2", *,
    requires: Sequence[str] = (), origin: Mapping[str, Any] | None = None,
) -> Path:  # fmt: skip
    """Write a distribution's metadata and return its folder; ``origin`` is where it is from."""
    info = site / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir(parents=True)
    lines = ["Metadata-Version: 2.1", f"Name: {name}", f"Version: {version}"]
    lines += [f"Requires-Dist: {requirement}" for requirement in requires]
    (info / "METADATA").write_text("\n".join(lines) + "\n")
    if origin:
        (info / "direct_url.json").write_text(json.dumps(origin))
    return info


def with_path(*folders: Path) -> dict[str, str]:
    """Return an environment in which Python also searches these folders for packages."""
    path = [*map(str, folders), os.environ.get("PYTHONPATH", "")]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(path)}


@contextmanager
def http_server(answer: Callable[[BaseHTTPRequestHandler], None]) -> Iterator[str]:
    """Serve HTTP in this process and yield the address; ``answer`` handles every request."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            answer(self)

        do_HEAD = do_POST = do_GET

        def log_message(self, format: str, *args: object) -> None: ...

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()


def reply(
    request: BaseHTTPRequestHandler,
    content: bytes = b"",
    status: int = 200,
    headers: Mapping[str, str] | None = None,
) -> None:
    request.send_response(status)
    for name, value in {**(headers or {}), "Content-Length": str(len(content))}.items():
        request.send_header(name, value)
    request.end_headers()
    if request.command != "HEAD":
        request.wfile.write(content)


def metrics_page(page: str) -> AbstractContextManager[str]:
    """Serve a page at /metrics, as Triton does, and 404 for every other path."""
    return http_server(
        lambda request: reply(request, page.encode(), 200 if request.path == "/metrics" else 404)
    )


def files_of(folder: Path) -> dict[str, str]:
    return {
        path.relative_to(folder).as_posix(): path.read_text(encoding="utf-8")
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def edit_json(path: Path, **changes: Any) -> None:
    content = json.loads(path.read_text(encoding="utf-8"))
    path.write_text(json.dumps({**content, **changes}), encoding="utf-8")


def replace_text(path: Path, old: str, new: str) -> None:
    text = path.read_text(encoding="utf-8")
    assert old in text
    path.write_text(text.replace(old, new), encoding="utf-8")


def hub_cache(home: Path, repo_id: str, commit: str) -> Path:
    """Create a cache of the demo model as the hub's client does: links to files named by hash."""
    folder = home / "hub" / f"models--{repo_id.replace('/', '--')}"
    snapshot = folder / "snapshots" / commit
    for subfolder in (folder / "refs", folder / "blobs", snapshot):
        subfolder.mkdir(parents=True)
    (folder / "refs" / "main").write_text(commit)
    for file in demo_model_path().iterdir():
        if file.is_file():
            (folder / "blobs" / f"hash-of-{file.name}").write_bytes(file.read_bytes())
            (snapshot / file.name).symlink_to(f"../../blobs/hash-of-{file.name}")
    return snapshot


def one_layer(folder: Path) -> Path:
    """Save the demo model with one layer: exporting all of it to ONNX takes half a minute."""
    if not folder.exists():
        from transformers import AutoModelForCausalLM

        model = AutoModelForCausalLM.from_pretrained(demo_model_path(), n_layer=1)
        shutil.copytree(demo_model_path(), folder)
        model.save_pretrained(folder)
        # Drop what this version of transformers adds to the config.
        shutil.copy(demo_model_path() / "config.json", folder)
        edit_json(folder / "config.json", n_layer=1)
    return folder


def completion_order(triton: LiveTriton, model: str, *, long: int, short: int) -> list[str]:
    """Request a long answer and, once it streams, a short one; return which finishes first."""
    order: list[str] = []
    started = Event()

    def ask(name: str, tokens: int) -> None:
        options = {"max_tokens": tokens, "ignore_eos": True}
        for _ in triton.client.stream(model, "Programming in C++ is like", **options):
            started.set()
        order.append(name)

    with ThreadPoolExecutor(1) as pool:
        long_answer = pool.submit(ask, "long", long)
        assert started.wait(60)
        ask("short", short)
        long_answer.result()
    return order


def generation(
    prompt: Sequence[int],
    max_tokens: int,
    *,
    eos: frozenset[int] = frozenset(),
    decode: Callable[[Sequence[int]], str] = _BYTES.decode,
    requested: bool = False,
    **params: Any,
) -> Generation:
    """Return a generation; ``requested`` means that its request itself names the length."""
    if requested:
        params["max_tokens"] = max_tokens
    return Generation(prompt, Params(**params), max_tokens=max_tokens, eos_ids=eos, decode=decode)


def drive(generator: Any, *requests: FakeRequest, **parts: Any) -> None:
    """Answer one batch with a generator, without Triton."""
    driver = BatchDriver({}, Path())
    driver.start(make_parts(generator, **parts))
    driver.execute(requests)
