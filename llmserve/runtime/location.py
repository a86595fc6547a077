"""Reads where ``from_pretrained`` finds a model, as recorded by ``BuildContext.place``."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def located(settings: Mapping[str, Any], folder: Path) -> tuple[str, dict[str, Any]]:
    """Return the arguments of ``from_pretrained``: a folder of the repository or a hub id.

    Remote code runs only if the build allowed it, as recorded in the manifest.
    """
    options: dict[str, Any] = {"trust_remote_code": bool(settings.get("trust_remote_code", False))}
    if "path" in settings:
        # The absolute path of weights that were not copied stays unchanged.
        return str(folder / settings["path"]), {**options, "local_files_only": True}
    # False prevents the use of a token that an earlier login has stored.
    token = os.environ.get("HF_TOKEN") or False
    return settings["id"], {**options, "revision": settings["revision"], "token": token}
