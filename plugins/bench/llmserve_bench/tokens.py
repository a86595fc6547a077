"""Counting tokens as the model does, where its tokenizer can be read."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path

from llmserve.errors import UsageError
from llmserve.repository.manifest import Manifest, parts_of

_TRANSFORMERS = "llmserve.runtime.hf_tokenizer:TransformersTokenizer"


@dataclass(frozen=True)
class TokenCounter:
    """Counts the tokens of a text. ``exact`` is False for an estimate; ``source`` says whose."""

    count: Callable[[str], int]
    exact: bool
    source: str


ESTIMATE = TokenCounter(
    lambda text: max(1, round(len(text) / 4)), False, "estimated, 4 characters to a token"
)


def find_counter(repository: Path | None, model: str, tokenizer: Path | None) -> TokenCounter:
    """Take the tokenizer that was named, else the model's own from a local repository.

    That repository need not be the server's: a model of the same name counts as the same.
    """
    if tokenizer is not None:
        settings = {"path": str(tokenizer.absolute())}
        return _load(_TRANSFORMERS, settings, tokenizer, f"tokenizer of {tokenizer}")
    if repository is not None and repository.is_dir():
        for name in (model, *parts_of(repository, model)):
            manifest = Manifest.read(repository / name)
            part = manifest.components.get("tokenizer") if manifest else None
            # An ensemble's own manifest says what was chosen; the files are with its parts.
            if manifest and part and not manifest.parts:
                folder, source = repository / name / "1", "the model's own tokenizer"
                return _load(part["runtime"], part["settings"], folder, source)
    return ESTIMATE


def _load(runtime: str, settings: object, folder: Path, source: str) -> TokenCounter:
    module, _, name = runtime.partition(":")
    try:
        tokenizer = getattr(import_module(module), name)(settings, folder)
    except Exception as error:
        raise UsageError(
            f"the tokenizer in {folder} cannot be read: {error}",
            mend="install what the model needs, or name another folder with --tokenizer",
        ) from None
    return TokenCounter(lambda text: len(tokenizer.encode(text)), exact=True, source=source)
