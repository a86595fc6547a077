"""Helpers that tests of several tiers share."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from llmserve.demo import demo_model_path
from llmserve.runtime.drivers.batch import BatchDriver
from llmserve.testing import FakeRequest, make_parts

ROOT = Path(__file__).parents[1]


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


def drive(generator: Any, *requests: FakeRequest, **parts: Any) -> None:
    """Answer one batch with a generator, without Triton."""
    driver = BatchDriver({}, Path())
    driver.start(make_parts(generator, **parts))
    driver.execute(requests)
