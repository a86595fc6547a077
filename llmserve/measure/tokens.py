"""Counting tokens as the model does, where its tokenizer can be read."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path

from llmserve.errors import UsageError
from llmserve.manifest import Manifest, parts_of

CHARACTERS = 4
"""How many characters of English a token has, roughly, where nobody can say better."""


@dataclass(frozen=True)
class Counter:
    """Counts the tokens of a text; ``exact`` is False for an estimate, and ``source`` says whose
    tokenizer it is."""

    count: Callable[[str], int]
    exact: bool
    source: str


def find_counter(repository: Path | None, model: str, tokenizer: Path | None = None) -> Counter:
    """Take the tokenizer that was named, else the model's own, else estimate and say so.

    The model's own is in its folder of a local repository, which need not be where the server
    reads it: a model of the same name counts as the same.
    """
    if tokenizer is not None:
        if not tokenizer.is_dir():
            raise UsageError(f"no tokenizer folder at {tokenizer}")
        return _loaded(
            "llmserve.runtime.hf_tokenizer:TransformersTokenizer",
            {"path": str(tokenizer.absolute())},
            tokenizer,
            str(tokenizer),
        )
    for folder in _folders(repository, model):
        manifest = Manifest.read(folder)
        part = manifest.components.get("tokenizer") if manifest else None
        # An ensemble's own says what was chosen; the files are with its parts.
        if manifest and part and not manifest.parts:
            made = _loaded(part["runtime"], part["settings"], folder / "1", str(folder))
            # Where it lay is chance: that of a variant of a sweep is gone when it is read.
            return replace(made, source="the model's own tokenizer")
    return Counter(
        lambda text: max(1, round(len(text) / CHARACTERS)),
        exact=False,
        source=f"no tokenizer at hand, {CHARACTERS} characters taken for a token",
    )


def _folders(repository: Path | None, model: str) -> list[Path]:
    """Give a model's folder and, of an ensemble, those of its parts."""
    if repository is None or not repository.is_dir():
        return []
    return [repository / name for name in (model, *parts_of(repository, model))]


def _loaded(runtime: str, settings: object, folder: Path, source: str) -> Counter:
    module, _, name = runtime.partition(":")
    try:
        made = getattr(import_module(module), name)(settings, folder)
    except Exception as error:
        raise UsageError(
            f"the tokenizer of {source} cannot be read: {error}",
            mend="install what the model needs, or name another folder with --tokenizer",
        ) from None
    return Counter(lambda text: len(made.encode(text)), exact=True, source=f"tokenizer of {source}")
