"""Locates the model that a build is given: the demo, a local folder or a model on the hub."""

from __future__ import annotations

import json
import os
import re
import shlex
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from llmserve.errors import ModelSourceError
from llmserve.packages import install_command

DEMO = "demo"
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
_HUB_FILE = re.compile(
    rf"(?P<id>{_HUB_ID.pattern}):(?P<file>([\w.-]+/)*[\w.-]+\.gguf)", re.IGNORECASE
)

_HUB_PAGE = re.compile(
    rf"(?:https?://)?(?:www\.)?huggingface\.co/(?P<id>{_HUB_ID.pattern})"
    r"(?:/(?:blob|resolve)/[^/]+/(?P<file>[^?#]+\.gguf)|/[^?#]*)?(?:[?#].*)?",
    re.IGNORECASE,
)
_OLLAMAS = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)*:[\w.-]+")
"""As in ``qwen3:0.6b``; the hub's names have no tag."""

WEIGHTS = "*.safetensors"
PICKLED = "*.bin"

SourceKind = Literal["huggingface", "folder", "file"] | None
"""The kind of model that a generator accepts: see ``Generator.source``."""


@dataclass(frozen=True)
class ModelSource:
    """A model's files on this machine, and where they came from.

    ``path`` is a folder, unless the generator accepts a file, or any name as a model.
    ``converted_from`` is what was asked for, if the folder was made of it for this build alone.
    """

    asked: str
    path: Path
    repo_id: str | None = None
    revision: str | None = None
    converted_from: ModelSource | None = None

    @property
    def folder(self) -> Path:
        """The folder that its files are in."""
        return self.path.parent if self.path.is_file() else self.path

    def config(self) -> dict[str, Any]:
        path = self.path / "config.json"
        content = read_object(path)
        names = content.get("architectures") or []
        valid = (
            isinstance(names, list)
            and all(isinstance(name, str) for name in names)
            and isinstance(content.get("model_type") or "", str)
            and isinstance(content.get("auto_map") or {}, dict)
        )
        if not valid:
            raise ModelSourceError(
                f"{path} is not a model's configuration",
                hint="architectures is a list of names, model_type a name, auto_map an object",
            )
        return content

    def end_ids(self) -> list[int]:
        """Return the tokens that end an answer; chat models have several."""
        paths = [self.path / name for name in ("generation_config.json", "config.json")]
        places = [read_object(path) for path in paths if path.is_file()]
        # A model of several parts has those of its text apart.
        parts = [part for each in places if isinstance(part := each.get("text_config"), dict)]
        found = (place.get("eos_token_id") for place in (*places[:-1], *parts, *places[-1:]))
        ends: Any = next((ids for ids in found if ids is not None), [])
        return sorted(i for i in (ends if isinstance(ends, list) else [ends]) if isinstance(i, int))

    def described(self) -> dict[str, str]:
        """Return the description of the source in the manifest, without paths of this machine."""
        if self.converted_from:
            return self.converted_from.described()
        if self.repo_id and self.revision:
            file = {"file": self.path.name} if self.path.is_file() else {}
            return {"kind": "hub", "id": self.repo_id, "revision": self.revision, **file}
        if self.asked == DEMO:
            return {"kind": "demo"}
        if self.path.is_file():
            return {"kind": "local", "file": self.path.name}
        if not self.path.is_dir():
            return {"kind": "name", "name": self.asked}
        return {"kind": "local", "folder": self.path.name}


def resolve(
    model: str,
    *,
    revision: str = "",
    weights: Sequence[str] = (WEIGHTS,),
    kind: SourceKind = "huggingface",
    report: Callable[[str], None],
) -> ModelSource:
    """Locate a model; a model on the hub is downloaded to ``HF_HOME`` and pinned to a commit.

    ``weights`` are file patterns, at least one of which must match; ``kind`` is the generator's
    ``source``. Of a model on the hub, files in folders are not downloaded: if a pattern names some,
    the generator looks whether they are there.
    """
    if model == DEMO:
        from llmserve.demo import demo_model_path

        if kind == "file":
            raise ModelSourceError("the demo is a folder", hint="name a file")
        if kind is not None:
            _check_weights(demo_model_path(), model, weights)
        return ModelSource(model, demo_model_path())
    if not model:
        raise ModelSourceError("the model is not named", hint="name a folder, or an id on the hub")
    path = path_of(model)
    if kind == "file":
        return ModelSource(model, _file(path, model, weights))
    if kind == "huggingface" and is_gguf(path) and not _has_any(path, weights):
        return ModelSource(model, _gguf_file(path, model))
    if path.is_dir():
        if kind == "huggingface":
            _check_config(path, model)
        if kind is not None:
            _check_weights(path, model, weights)
        return ModelSource(model, path.resolve())
    if kind is None:
        return ModelSource(model, path)
    if path.exists():
        raise ModelSourceError(
            f"{model} is a file", hint=f"name its folder: {shlex.quote(str(path.parent))}"
        )
    if kind == "huggingface" and (named := _HUB_FILE.fullmatch(model)):
        file = fetch_file(named["id"], named["file"], revision=revision, report=report)
        # The name of a snapshot's folder is the commit.
        commit = file.parents[named["file"].count("/")].name
        return ModelSource(model, file, named["id"], commit)
    if page := _HUB_PAGE.fullmatch(model):
        named_so = page["id"] + (f":{page['file']}" if page["file"] else "")
        raise ModelSourceError(f"{model} is a page of the hub", hint=f"name its model: {named_so}")
    if kind == "huggingface" and is_ollamas(model):
        raise ModelSourceError(
            f"{model} is a name as Ollama gives them, of a model in its own store",
            hint="name the model as the Hugging Face hub does, OWNER/NAME, or its GGUF file; "
            "docs/guides/from-ollama.md says where both are",
        )
    if kind == "folder" or model.startswith((".", "/", "~")) or not names_model(model):
        others = "" if kind == "folder" else ", a GGUF file, a model's id on the hub, or 'demo'"
        what = "file" if path.suffix.lower() == GGUF else "folder"
        raise ModelSourceError(f"no {what} at {model}", hint=f"name a local folder{others}")
    folder = fetch(model, revision=revision, weights=weights, report=report)
    _check_config(folder, model)
    if not any("/" in pattern for pattern in weights):
        _check_weights(folder, model, weights)
    return ModelSource(model, folder, model, folder.name)


GGUF = ".gguf"


def is_gguf(path: Path) -> bool:
    """Return whether a path is a GGUF file, or a folder whose model is in such files."""
    if path.is_dir():
        return any(path.glob(f"*{GGUF}")) and not any(path.glob(WEIGHTS))
    return path.suffix.lower() == GGUF and path.is_file()


def _gguf_file(path: Path, model: str) -> Path:
    files = sorted(path.glob(f"*{GGUF}")) if path.is_dir() else [path]
    if len(files) > 1:
        others = ", ".join(file.name for file in files[1:4])
        raise ModelSourceError(
            f"{model} has {len(files)} GGUF files",
            hint=f"name one: {shlex.quote(str(files[0]))} (or {others})",
        )
    return files[0].absolute()


def is_checkpoint(path: Path) -> bool:
    """Return whether a folder has a model as ``save_pretrained`` writes it."""
    weights = any(any(path.glob(pattern)) for pattern in (WEIGHTS, PICKLED))
    return weights and (path / "config.json").is_file()


def names_model(model: str) -> bool:
    """Return whether this can be a model of the hub, or the demo, if there is no such path."""
    if "/" not in model and model.lower().endswith(GGUF):
        return False
    return bool(_HUB_ID.fullmatch(model) or _HUB_FILE.fullmatch(model))


def is_ollamas(model: str) -> bool:
    """Return whether this is a name with a tag, as Ollama gives them, and no GGUF file."""
    return bool(_OLLAMAS.fullmatch(model)) and not model.lower().endswith(GGUF)


def meaning_of(asked: str) -> Literal["files", "model", "id", ""]:
    """Say what a user means who names a model, or something else.

    It is the ``files`` of a model on this machine, a ``model`` in the words of others, or perhaps
    the ``id`` of one on the hub; else it is none.
    """
    path = path_of(asked)
    if is_checkpoint(path) or is_gguf(path):
        return "files"
    if asked.lower().endswith(GGUF) or "://" in asked or is_ollamas(asked):
        return "model"
    return "id" if names_model(asked) else ""


def path_of(model: str) -> Path:
    """Return the path that a model may be; raise if no file can be called that."""
    path = Path(model)
    with suppress(RuntimeError):
        # This fails for an unknown user; there is no such folder then.
        path = path.expanduser()
    try:
        path.exists()
    except OSError as error:
        raise ModelSourceError(
            f"{model[:40]}… cannot be a path: {error.strerror}", hint="name a folder, or an id"
        ) from None
    return path


def _file(path: Path, model: str, weights: Sequence[str]) -> Path:
    names = " or ".join(weights)
    if path.is_dir():
        raise ModelSourceError(f"{model} is a folder", hint=f"name a file in it: {names}")
    if not path.is_file():
        raise ModelSourceError(f"no file at {model}", hint="name a local file")
    if not any(path.match(pattern) for pattern in weights):
        raise ModelSourceError(f"{model} is not a file of this kind", hint=f"name one: {names}")
    return path.absolute()


def _check_config(folder: Path, model: str) -> None:
    if not (folder / "config.json").is_file():
        raise ModelSourceError(
            f"{model} is not a model: it has no config.json",
            hint="name a folder that save_pretrained wrote",
        )


def _has_any(folder: Path, patterns: Sequence[str]) -> bool:
    return any(any(folder.glob(pattern)) for pattern in patterns)


def _check_weights(folder: Path, model: str, weights: Sequence[str]) -> None:
    if _has_any(folder, weights):
        return
    if any(folder.glob(PICKLED)):
        raise ModelSourceError(
            f"{model} has only pickled weights, which can run code when they are loaded",
            hint="convert them to safetensors, or allow it with --set pickle=true",
        )
    raise ModelSourceError(
        f"{model} has no weights: no {' or '.join(weights)} in {folder.name}",
        hint="name a folder that has them",
    )


# Seconds that a model which is here may wait for the hub.
_LOOKUP = 3.0
_NEEDED = ["*.json", "*.jinja", "*.model", "*.txt", "*.tiktoken", "*.py"]


def fetch(
    repo_id: str, *, revision: str, weights: Sequence[str], report: Callable[[str], None]
) -> Path:
    """Download a snapshot and return its folder, whose name is the commit."""
    with _downloading(repo_id, revision, report):
        from huggingface_hub import snapshot_download

        return Path(
            snapshot_download(
                repo_id,
                revision=revision or None,
                # In the hub's client, * also matches slashes: without this, unused folders such as
                # onnx/ and original/ would be downloaded too.
                ignore_patterns=["*/*"],
                allow_patterns=[*_NEEDED, *weights],
                token=_token(),
            )
        )


def fetch_file(
    repo_id: str,
    file: str,
    *,
    revision: str,
    report: Callable[[str], None],
    beside: Sequence[str] = (),
) -> Path:
    """Download one file, and return where it is in a snapshot.

    Files that match the patterns ``beside`` are downloaded too, if there are any.
    """
    with _downloading(repo_id, revision, report, file):
        from huggingface_hub import hf_hub_download, snapshot_download

        chosen: dict[str, Any] = {"revision": revision or None, "token": _token()}
        # Without a connection this says so at once; a single file is asked for six times.
        folder = snapshot_download(repo_id, allow_patterns=[file, *beside], **chosen)
        if (path := Path(folder, file)).is_file():
            return path
        # It says why the file is not there.
        return Path(hf_hub_download(repo_id, file, **chosen))


def cached(repo_id: str, commit: str) -> Path | None:
    """Return the folder of a snapshot that was downloaded before, None if there is none."""
    try:
        from huggingface_hub import try_to_load_from_cache
    except ImportError:
        return None
    found = try_to_load_from_cache(repo_id, "config.json", revision=commit)
    return Path(found).parent if isinstance(found, str) else None


def newest_commit(repo_id: str, *, revision: str = "") -> str | None:
    """Return the commit that the hub has now; None if it does not answer at once."""
    try:
        from huggingface_hub import HfApi

        api = HfApi(token=_token())
        info = api.model_info(repo_id, revision=revision or None, timeout=_LOOKUP)
    except Exception:
        # Whatever the reason: a model that is here can be used without the hub.
        return None
    commit: str | None = info.sha
    return commit


def hub_listing(
    model: str, *, revision: str = ""
) -> tuple[str, Mapping[str, int], Mapping[str, Any]] | None:
    """Return what the hub has of a model, without its files; None if it does not answer at once.

    That is the GGUF file that the name means, if any, the size of each file, and ``config.json``.
    """
    named = _HUB_FILE.fullmatch(model)
    if not named and not _HUB_ID.fullmatch(model):
        return None
    repo_id, file = (named["id"], named["file"]) if named else (model, "")
    try:
        from huggingface_hub import HfApi, hf_hub_download

        chosen: dict[str, Any] = {"revision": revision or None}
        info = HfApi(token=_token()).model_info(
            repo_id, files_metadata=True, timeout=_LOOKUP, **chosen
        )
        sizes = {each.rfilename: int(each.size or 0) for each in info.siblings or ()}
        if file or "config.json" not in sizes:
            return (file, sizes, {}) if file in sizes else None
        path = hf_hub_download(
            repo_id, "config.json", token=_token(), etag_timeout=_LOOKUP, **chosen
        )
        return file, sizes, read_object(Path(path))
    except Exception:
        # As below: then nothing is known before it is downloaded.
        return None


def _token() -> str | Literal[False]:
    # False prevents the use of a token that a login stored earlier.
    return os.environ.get("HF_TOKEN") or False


@contextmanager
def _downloading(
    repo_id: str, revision: str, report: Callable[[str], None], file: str = ""
) -> Iterator[None]:
    """Report what is downloaded, and say in one line why it could not be."""
    try:
        from huggingface_hub import errors
        from huggingface_hub.utils import disable_progress_bars
    except ImportError:
        raise ModelSourceError(
            f"{repo_id} is on the hub, but huggingface_hub is not installed",
            hint=f"{install_command('huggingface_hub')}, or name a local folder",
        ) from None
    if not sys.stderr.isatty():
        disable_progress_bars()
    report(f"downloading {file} of {repo_id}" if file else f"downloading {repo_id}")
    try:
        yield
    except errors.GatedRepoError:
        raise ModelSourceError(
            f"{repo_id} is gated",
            hint="request access on its page, then set HF_TOKEN to your token",
        ) from None
    except errors.RevisionNotFoundError:
        raise ModelSourceError(
            f"{repo_id} has no revision {revision!r}", hint="see its page for branches and tags"
        ) from None
    except errors.RepositoryNotFoundError:
        raise ModelSourceError(
            f"the hub has no model {repo_id!r}, or it is private",
            hint="check the id; for a private model set HF_TOKEN to your token",
        ) from None
    except (errors.LocalEntryNotFoundError, errors.OfflineModeIsEnabled):
        raise ModelSourceError(
            f"{repo_id} is not in the cache, and the hub cannot be reached",
            hint="name a local folder, or fill HF_HOME on a machine with a connection",
        ) from None
    except errors.EntryNotFoundError:
        raise ModelSourceError(
            f"{repo_id} has no file {file}", hint="see its page for the names of its files"
        ) from None
    except (errors.HfHubHTTPError, OSError, *_connection_errors()) as error:
        message = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ModelSourceError(f"{repo_id} could not be downloaded: {message}") from None


def _connection_errors() -> tuple[type[Exception], ...]:
    """Return what the hub's client raises if a connection breaks off; before 1.0, an OSError."""
    try:
        from httpx import HTTPError
    except ImportError:
        return ()
    return (HTTPError,)


def read_object(path: Path) -> dict[str, Any]:
    content = read_json(path)
    if not isinstance(content, dict):
        raise ModelSourceError(f"{path} is not a JSON object", hint="download or save it again")
    return content


def read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise damaged(path, str(error)) from None


def damaged(path: Path, reason: str) -> ModelSourceError:
    return ModelSourceError(f"{path} cannot be read: {reason}", hint="download or save it again")
