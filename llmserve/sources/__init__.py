"""What ``--model`` can name: the demo model, a local folder or a model on the Hugging Face hub."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llmserve.errors import ModelSourceError
from llmserve.sources.intact import read_object

DEMO = "demo"
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")

WEIGHTS = "*.safetensors"
PICKLED = "*.bin"


@dataclass(frozen=True)
class ModelSource:
    """A model's files on this machine, and where they came from."""

    asked: str
    path: Path
    repo_id: str | None = None
    revision: str | None = None

    def config(self) -> dict[str, Any]:
        """Return the model's ``config.json``."""
        path = self.path / "config.json"
        content = read_object(path)
        names = content.get("architectures") or []
        sound = (
            isinstance(names, list)
            and all(isinstance(name, str) for name in names)
            and isinstance(content.get("model_type") or "", str)
            and isinstance(content.get("auto_map") or {}, dict)
        )
        if not sound:
            raise ModelSourceError(
                f"{path} is not a model's configuration",
                mend="architectures is a list of names, model_type a name, auto_map an object",
            )
        return content

    def described(self) -> dict[str, str]:
        """Return what the manifest says of the source: never a path of this machine."""
        if self.repo_id and self.revision:
            return {"kind": "hub", "id": self.repo_id, "revision": self.revision}
        if self.asked == DEMO:
            return {"kind": "demo"}
        return {"kind": "local", "folder": self.path.name}


def resolve(
    asked: str,
    *,
    revision: str = "",
    pickle: bool = False,
    weights: Sequence[str] = (WEIGHTS,),
    report: Callable[[str], None],
) -> ModelSource:
    """Find a model; what is on the hub is fetched into ``HF_HOME`` and pinned to a commit.

    ``weights`` are patterns of files, any of which makes a folder a model.
    """
    if asked == DEMO:
        from llmserve.demo import demo_model_path

        return ModelSource(asked, demo_model_path())
    path = Path(asked).expanduser()
    if path.is_dir():
        return ModelSource(asked, _checked(path.resolve(), asked, pickle, weights))
    if path.exists():
        raise ModelSourceError(f"{asked} is a file", mend="name the folder it lies in (--model)")
    if asked.startswith((".", "/", "~")) or not _HUB_ID.fullmatch(asked):
        raise ModelSourceError(
            f"no folder at {asked}",
            mend="--model takes a local folder, a model's id on the hub, or 'demo'",
        )
    from llmserve.sources.hub import fetch

    folder = fetch(asked, revision=revision, pickle=pickle, weights=weights, report=report)
    return ModelSource(asked, _checked(folder, asked, pickle, weights), asked, folder.name)


def _checked(folder: Path, asked: str, pickle: bool, weights: Sequence[str]) -> Path:
    if not (folder / "config.json").is_file():
        raise ModelSourceError(
            f"{asked} is no model: it has no config.json",
            mend="name a folder that save_pretrained wrote",
        )
    accepted = (*weights, PICKLED) if pickle else weights
    if any(any(folder.glob(pattern)) for pattern in accepted):
        return folder
    if any(folder.glob(PICKLED)):
        raise ModelSourceError(
            f"{asked} has only pickled weights, which can run code when they are loaded",
            mend="convert them to safetensors, or allow it with --set pickle=true",
        )
    raise ModelSourceError(
        f"{asked} has no weights: no {' or '.join(weights)} in {folder.name}",
        mend="name a folder that save_pretrained wrote",
    )
