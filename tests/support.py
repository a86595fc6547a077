"""What tests of several tiers share."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

from llmserve.demo import demo_model_path
from llmserve.runtime.batch import BatchDriver
from llmserve.testing import FakeRequest, make_parts

ROOT = Path(__file__).parents[1]
LLMSERVE = [sys.executable, "-m", "llmserve_cli"]


def run(
    *words: str,
    stdin: str = "",
    cwd: Path | None = None,
    env: Mapping[str, str] = os.environ,
    stdout: int | IO[str] = subprocess.PIPE,
    **more: str,
) -> subprocess.CompletedProcess[str]:
    """Run the command line in a process of its own, as a user's shell does."""
    return subprocess.run(
        [*LLMSERVE, *words],
        cwd=cwd, env={**env, **more}, input=stdin, stdout=stdout, stderr=subprocess.PIPE,
        encoding="utf-8", check=False, timeout=240,
    )  # fmt: skip


def install(site: Path, name: str, entries: str, version: str = "1.2", **modules: str) -> None:
    """Put a distribution into a folder, as an installer leaves it."""
    info = site / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    (info / "entry_points.txt").write_text(entries)
    for module, source in modules.items():
        (site / f"{module}.py").write_text(source)


def with_path(*folders: Path) -> dict[str, str]:
    """Return an environment in which Python looks for packages in these folders as well."""
    path = [*map(str, folders), os.environ.get("PYTHONPATH", "")]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(path)}


def edit_json(path: Path, **changes: Any) -> None:
    content = json.loads(path.read_text(encoding="utf-8"))
    path.write_text(json.dumps({**content, **changes}), encoding="utf-8")


def replace_text(path: Path, old: str, new: str) -> None:
    text = path.read_text(encoding="utf-8")
    assert old in text
    path.write_text(text.replace(old, new), encoding="utf-8")


def hub_cache(home: Path, repo_id: str, commit: str) -> Path:
    """Make a cache of the demo model as the hub's client leaves it: links to files by hashes."""
    folder = home / "hub" / f"models--{repo_id.replace('/', '--')}"
    snapshot = folder / "snapshots" / commit
    for made in (folder / "refs", folder / "blobs", snapshot):
        made.mkdir(parents=True)
    (folder / "refs" / "main").write_text(commit)
    for file in demo_model_path().iterdir():
        if file.is_file():
            (folder / "blobs" / f"hash-of-{file.name}").write_bytes(file.read_bytes())
            (snapshot / file.name).symlink_to(f"../../blobs/hash-of-{file.name}")
    return snapshot


def one_layer(folder: Path) -> Path:
    """Make the demo model without most of it: to export all of it to ONNX takes half a minute."""
    if not folder.exists():
        from transformers import AutoModelForCausalLM

        model = AutoModelForCausalLM.from_pretrained(demo_model_path(), n_layer=1)
        shutil.copytree(demo_model_path(), folder)
        model.save_pretrained(folder)
        # Without what this version of transformers adds to it.
        shutil.copy(demo_model_path() / "config.json", folder)
        edit_json(folder / "config.json", n_layer=1)
    return folder


def drive(generator: Any, *requests: FakeRequest, **parts: Any) -> None:
    """Have a generator answer one batch, without Triton."""
    driver = BatchDriver({}, Path())
    driver.start(make_parts(generator, **parts))
    driver.execute(requests)
