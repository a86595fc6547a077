"""What the file says that `llmserve serve` reads too: one file for a server and its deployment."""

from __future__ import annotations

from math import ceil
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from llmserve.plugin import ServerFile


def settings_of(file: ServerFile) -> dict[str, Any]:
    """Return the options of a deployment that the file has, by their names here.

    Addresses, ports, the file with the keys and whether there are keys at all are matters of one
    machine, and are left out: what opens a deployment to everyone is said where it is made.
    """
    _check_built(file)
    settings: dict[str, Any] = {
        "repository": file.repository,
        "models": [*file.models, *file.texts],
    }
    if "replicas" in file.serve:
        settings["replicas"] = file.serve["replicas"]
    if "grace" in file.serve:
        settings["grace"] = ceil(file.serve["grace"])
    return settings


def _check_built(file: ServerFile) -> None:
    """Refuse a file whose models are not built: nothing is built here."""
    from llmserve.errors import UsageError
    from llmserve.plugin import Repository

    present = Repository.open(file.repository).models
    missing = [name for name in file.models if name not in present]
    if missing:
        raise UsageError(
            f"{', '.join(missing)} of {file.path} is not built",
            hint=f"llmserve build --config {file.path}",
        )
