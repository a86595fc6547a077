"""Reads where ``from_pretrained`` finds a model, as recorded by ``BuildContext.place``."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

_WEIGHTS = ("model.safetensors", "pytorch_model.bin")


def located(settings: Mapping[str, Any], folder: Path) -> tuple[str, dict[str, Any]]:
    """Return the arguments of ``from_pretrained``: a folder, or a hub id.

    Remote code runs only if the build allowed it, as recorded in the manifest.
    """
    options: dict[str, Any] = {"trust_remote_code": bool(settings.get("trust_remote_code", False))}
    if "path" in settings:
        # The absolute path of weights that were not copied stays unchanged.
        return str(folder / settings["path"]), {**options, "local_files_only": True}
    if snapshot := _downloaded(settings["id"], settings["revision"]):
        # By its id, libraries would ask the hub for all that a model may have, and wait minutes
        # for a hub that cannot be reached; some would also download weights in other forms.
        return str(snapshot), {**options, "local_files_only": True}
    # False prevents the use of a token that an earlier login has stored.
    token = os.environ.get("HF_TOKEN") or False
    return settings["id"], {**options, "revision": settings["revision"], "token": token}


def _downloaded(repo_id: str, commit: str) -> Path | None:
    """Return the folder of a commit in the hub's cache, if the weights there are whole."""
    folder = _cache() / f"models--{repo_id.replace('/', '--')}" / "snapshots" / commit
    if not (folder / "config.json").is_file():
        return None
    for whole in _WEIGHTS:
        if (folder / whole).is_file():
            return folder
        try:
            index = json.loads((folder / f"{whole}.index.json").read_text(encoding="utf-8"))
            shards = set(index["weight_map"].values())
            if shards and all((folder / shard).is_file() for shard in shards):
                return folder
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            continue
    return None


def _cache() -> Path:
    """Return the cache of the hub's client, by its own variables."""
    if cache := os.environ.get("HF_HUB_CACHE") or os.environ.get("HUGGINGFACE_HUB_CACHE"):
        return Path(cache).expanduser()
    others = Path(os.environ.get("XDG_CACHE_HOME") or Path("~/.cache")) / "huggingface"
    return Path(os.environ.get("HF_HOME") or others).expanduser() / "hub"
