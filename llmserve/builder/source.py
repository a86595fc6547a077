"""Locates the model that a build is given: a demo, a local folder or a model on the hub."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Literal

from llmserve.builder.hub.choice import needed_files
from llmserve.builder.hub.download import content_of, download
from llmserve.builder.hub.failures import no_file
from llmserve.builder.hub.listing import COMMIT
from llmserve.builder.hub.lookup import cached, look_up
from llmserve.builder.reading import read_object
from llmserve.demo import DEMO, DEMO_MODELS, demo_model_path
from llmserve.errors import ModelSourceError

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
    def is_demo(self) -> bool:
        """Whether it is one of our own models, which are in the package."""
        return is_demo(self.asked)

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
        if self.is_demo:
            return {"kind": DEMO} if self.asked == DEMO else {"kind": DEMO, "name": self.asked}
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
    if is_demo(model):
        if kind == "file":
            raise ModelSourceError("the demo is a folder", hint="name a file")
        if kind is not None:
            _check_weights(demo_model_path(model), model, weights)
        return ModelSource(model, demo_model_path(model))
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
    folder = _fetch(model, revision=revision, weights=weights, report=report)
    return ModelSource(model, folder, model, folder.name)


def is_demo(model: str) -> bool:
    """Return whether this is the name of a model that the package has."""
    return model in DEMO_MODELS


GGUF = ".gguf"
_MAGIC = b"GGUF"
_DIGEST = re.compile(r"sha256-[0-9a-f]{64}")
"""What Ollama calls a file of its store."""


def is_gguf(path: Path) -> bool:
    """Return whether a path is a GGUF file, or a folder whose model is in such files."""
    if path.is_dir():
        return any(path.glob(f"*{GGUF}")) and not any(path.glob(WEIGHTS))
    is_named_so = path.suffix.lower() == GGUF or _DIGEST.fullmatch(path.name) is not None
    return is_named_so and path.is_file() and (bool(path.suffix) or _begins_as_gguf(path))


def _begins_as_gguf(path: Path) -> bool:
    """Return whether a file that is called by its hash, as Ollama's are, is a GGUF file."""
    with suppress(OSError), path.open("rb") as file:
        return file.read(len(_MAGIC)) == _MAGIC
    return False


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


def is_unbuilt_model(path: Path) -> bool:
    """Return whether a path is a model that a build takes: a folder, or a GGUF file."""
    return is_checkpoint(path) or is_gguf(path)


def names_model(model: str) -> bool:
    """Return whether this can be a model of the hub, or a demo, if there is no such path."""
    if "/" not in model and model.lower().endswith(GGUF):
        return False
    return model_on_hub(model) is not None


def model_on_hub(model: str) -> tuple[str, str] | None:
    """Return the id that a name means on the hub, and the file if it names one."""
    if named := _HUB_FILE.fullmatch(model):
        return named["id"], named["file"]
    return (model, "") if _HUB_ID.fullmatch(model) else None


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
    if not _has_any(folder, weights):
        raise _no_weights(model, folder.name, weights, any(folder.glob(PICKLED)))


def _no_weights(
    model: str, where: str, weights: Sequence[str], has_pickled: bool
) -> ModelSourceError:
    if has_pickled:
        return ModelSourceError(
            f"{model} has only pickled weights, which can run code when they are loaded",
            hint="convert them to safetensors, or allow it with --set pickle=true",
        )
    return ModelSourceError(
        f"{model} has no weights: no {' or '.join(weights)} in {where}",
        hint="name a folder that has them",
    )


def _is_checked_later(weights: Sequence[str]) -> bool:
    """Return whether a generator looks itself for its weights, some of which are in folders."""
    return any("/" in pattern for pattern in weights)


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
    if COMMIT.fullmatch(revision) and not beside and (here := cached(repo_id, revision, file)):
        # It is the same for ever.
        return here / file
    found = look_up(repo_id, file, revision=revision, report=report)
    if isinstance(found, Path):
        return found / file
    if file not in found.files:
        raise no_file(repo_id, file)
    others = [name for name in found.files if any(fnmatchcase(name, each) for each in beside)]
    return download(found, [file, *others], report) / file


def _fetch(
    model: str, *, revision: str, weights: Sequence[str], report: Callable[[str], None]
) -> Path:
    """Download what a build needs of a model, and return its folder, whose name is the commit."""
    found = look_up(model, "config.json", revision=revision, report=report)
    if isinstance(found, Path):
        if not _is_checked_later(weights) and not _has_any(found, weights):
            raise ModelSourceError(
                f"only a part of {model} is in the cache, and the hub cannot be reached",
                hint="build it again with a connection, which downloads the rest",
            )
        return found
    own = [name for name in found.files if "/" not in name]
    has_weights = any(fnmatchcase(name, pattern) for name in own for pattern in weights)
    ggufs = [name for name in found.files if name.lower().endswith(GGUF)]
    if ggufs and ("config.json" not in own or not has_weights):
        others = f" (or {', '.join(ggufs[1:4])})" if ggufs[1:] else ""
        raise ModelSourceError(
            f"{model} has its weights in GGUF files", hint=f"name one: {model}:{ggufs[0]}{others}"
        )
    if "config.json" not in own:
        raise ModelSourceError(
            f"{model} is not a model: it has no config.json", hint="name another one"
        )
    if not has_weights and not _is_checked_later(weights):
        has_pickled = any(fnmatchcase(name, PICKLED) for name in own)
        raise _no_weights(model, found.commit, weights, has_pickled)
    names = needed_files(found.files, weights, lambda name: content_of(found, name, report))
    return download(found, names, report)
