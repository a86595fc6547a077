"""Where ``from_pretrained`` finds a model: what ``BuildContext.place`` wrote down."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def located(settings: Mapping[str, Any], folder: Path) -> tuple[str, dict[str, Any]]:
    """Return what ``from_pretrained`` takes: a folder of the repository, or a hub's id.

    Remote code runs only if the build allowed it, and the manifest says it.
    """
    options: dict[str, Any] = {"trust_remote_code": bool(settings.get("trust_remote_code", False))}
    if "path" in settings:
        # An absolute path, of weights that were not copied, stays what it is.
        return str(folder / settings["path"]), {**options, "local_files_only": True}
    # False keeps a token that was once stored by a login out of it.
    token = os.environ.get("HF_TOKEN") or False
    return settings["id"], {**options, "revision": settings["revision"], "token": token}
