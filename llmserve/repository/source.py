"""What ``--model`` can name: the demo model, a local folder or a model on the Hugging Face hub."""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from llmserve.errors import ModelSourceError

DEMO = "demo"
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")

WEIGHTS = "*.safetensors"
PICKLED = "*.bin"

SourceKind = Literal["huggingface", "folder"] | None
"""What a generator takes for a model: see ``Generator.source``."""


@dataclass(frozen=True)
class ModelSource:
    """A model's files on this machine, and where they came from.

    ``path`` is a folder, but where a generator takes any word for a model.
    """

    asked: str
    path: Path
    repo_id: str | None = None
    revision: str | None = None

    def config(self) -> dict[str, Any]:
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
        if not self.path.is_dir():
            return {"kind": "name", "name": self.asked}
        return {"kind": "local", "folder": self.path.name}


def resolve(
    asked: str,
    *,
    revision: str = "",
    weights: Sequence[str] = (WEIGHTS,),
    kind: SourceKind = "huggingface",
    report: Callable[[str], None],
) -> ModelSource:
    """Find a model; what is on the hub is fetched into ``HF_HOME`` and pinned to a commit.

    ``weights`` are patterns of files, any of which makes a folder a model; ``kind`` is the
    generator's ``source``.
    """
    if asked == DEMO:
        from llmserve.demo import demo_model_path

        return ModelSource(asked, demo_model_path())
    if not asked:
        raise ModelSourceError("--model is empty", mend="name a folder, or an id on the hub")
    path = Path(asked)
    with suppress(RuntimeError):
        # Nobody has that name: then there is no such folder either.
        path = path.expanduser()
    if path.is_dir():
        if kind == "huggingface":
            _check_config(path, asked)
        if kind is not None:
            _check_weights(path, asked, weights)
        return ModelSource(asked, path.resolve())
    if kind is None:
        return ModelSource(asked, path)
    if path.exists():
        raise ModelSourceError(f"{asked} is a file", mend="name the folder it lies in (--model)")
    if kind == "folder" or asked.startswith((".", "/", "~")) or not _HUB_ID.fullmatch(asked):
        hub = "" if kind == "folder" else ", a model's id on the hub, or 'demo'"
        raise ModelSourceError(f"no folder at {asked}", mend=f"--model takes a local folder{hub}")
    folder = fetch(asked, revision=revision, weights=weights, report=report)
    _check_config(folder, asked)
    _check_weights(folder, asked, weights)
    return ModelSource(asked, folder, asked, folder.name)


def _check_config(folder: Path, asked: str) -> None:
    if not (folder / "config.json").is_file():
        raise ModelSourceError(
            f"{asked} is no model: it has no config.json",
            mend="name a folder that save_pretrained wrote",
        )


def _check_weights(folder: Path, asked: str, weights: Sequence[str]) -> None:
    if any(any(folder.glob(pattern)) for pattern in weights):
        return
    if any(folder.glob(PICKLED)):
        raise ModelSourceError(
            f"{asked} has only pickled weights, which can run code when they are loaded",
            mend="convert them to safetensors, or allow it with --set pickle=true",
        )
    raise ModelSourceError(
        f"{asked} has no weights: no {' or '.join(weights)} in {folder.name}",
        mend="name a folder that has them (--model)",
    )


_NEEDED = ["*.json", "*.jinja", "*.model", "*.txt", "*.tiktoken", "*.py"]


def fetch(
    repo_id: str, *, revision: str, weights: Sequence[str], report: Callable[[str], None]
) -> Path:
    """Return the folder of a snapshot; its name is the commit."""
    try:
        from huggingface_hub import errors, snapshot_download
        from huggingface_hub.utils import disable_progress_bars
    except ImportError:
        raise ModelSourceError(
            f"{repo_id} is on the hub, and huggingface_hub is not installed",
            mend="pip install huggingface_hub, or name a local folder",
        ) from None
    if not sys.stderr.isatty():
        disable_progress_bars()
    report(f"fetching {repo_id}")
    try:
        return Path(
            snapshot_download(
                repo_id,
                revision=revision or None,
                # To the hub's client * goes on past a slash: without this, onnx/ and original/,
                # which nothing here reads, would come too.
                ignore_patterns=["*/*"],
                allow_patterns=[*_NEEDED, *weights],
                # False keeps a token that was once stored by a login out of it.
                token=os.environ.get("HF_TOKEN") or False,
            )
        )
    except errors.GatedRepoError:
        raise ModelSourceError(
            f"{repo_id} is gated",
            mend="ask for access on its page, then set HF_TOKEN to your token",
        ) from None
    except errors.RevisionNotFoundError:
        raise ModelSourceError(
            f"{repo_id} has no revision {revision!r}", mend="see its page for branches and tags"
        ) from None
    except errors.RepositoryNotFoundError:
        raise ModelSourceError(
            f"the hub has no model {repo_id!r}, or it is private",
            mend="check the id; for a private model set HF_TOKEN to your token",
        ) from None
    except (errors.LocalEntryNotFoundError, errors.OfflineModeIsEnabled):
        raise ModelSourceError(
            f"{repo_id} is not in the cache, and the hub cannot be reached",
            mend="name a local folder, or fill HF_HOME on a machine with a connection",
        ) from None
    except (errors.HfHubHTTPError, OSError) as error:
        first = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ModelSourceError(f"{repo_id} could not be fetched: {first}") from None


def read_object(path: Path) -> dict[str, Any]:
    content = read_json(path)
    if not isinstance(content, dict):
        raise ModelSourceError(f"{path} holds no JSON object", mend="fetch or save it again")
    return content


def read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise damaged(path, str(error)) from None


def damaged(path: Path, why: str) -> ModelSourceError:
    return ModelSourceError(f"{path} cannot be read: {why}", mend="fetch or save it again")
