"""Which of a model's files belong to its tokenizer and to its weights, and whether they fit."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from llmserve.errors import ModelSourceError
from llmserve.repository.source import (
    PICKLED,
    WEIGHTS,
    ModelSource,
    damaged,
    read_json,
    read_object,
)

_TEMPLATES = {"chat_template.jinja", "chat_template.json"}
_TOKENIZER = _TEMPLATES | {
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
}
_TOKENIZER_KINDS = (".model", ".tiktoken")


def tokenizer_files(source: ModelSource) -> list[Path]:
    """Return the tokenizer's files, with ``config.json``, which says what kind it is."""
    files = [
        path
        for path in _all(source)
        if path.name in _TOKENIZER or path.suffix in _TOKENIZER_KINDS or path.suffix == ".py"
    ]
    if not any(path.suffix != ".py" for path in files):
        raise ModelSourceError(
            f"{source.asked} has no tokenizer",
            mend="put tokenizer.json into it, or choose another tokenizer with --tokenizer",
        )
    config = source.path / "config.json"
    return [config, *files] if config.is_file() else files


def has_chat_template(source: ModelSource) -> bool:
    """Tell whether the tokenizer knows how a conversation is written."""
    if any((source.path / name).is_file() for name in _TEMPLATES):
        return True
    config = source.path / "tokenizer_config.json"
    return config.is_file() and "chat_template" in read_object(config)


def weight_files(source: ModelSource, *, pickle: bool) -> list[Path]:
    """Return the weights and what is needed to load them."""
    patterns = [WEIGHTS, "*.safetensors.index.json", "config.json", "generation_config.json"]
    if pickle:
        patterns += [PICKLED, "*.bin.index.json"]
    return [
        path
        for path in _all(source)
        if path.suffix == ".py" or any(path.match(pattern) for pattern in patterns)
    ]


def _all(source: ModelSource) -> list[Path]:
    if not source.path.is_dir():
        return []
    return sorted(path for path in source.path.iterdir() if path.is_file())


def check_links(files: Iterable[Path], folder: Path) -> None:
    """Refuse links that lead out of a model's folder, but for the hub's into its cache.

    Their targets would be copied into the repository, whatever they are.
    """
    home = folder.resolve()
    inside = [home]
    if home.parent.name == "snapshots":
        inside.append(home.parent.parent / "blobs")
    for file in files:
        target = file.resolve()
        if not any(target.is_relative_to(place) for place in inside):
            raise ModelSourceError(
                f"{file} is a link to {target}, outside of the model's folder",
                mend="put the file itself there",
            )


_OBJECTS = {"config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"}
_LARGEST_HEADER = 100_000_000
"""What safetensors itself takes at most."""


def check_intact(files: Iterable[Path]) -> None:
    """Refuse files that cannot be read as what they are called; weights are not read through."""
    for file in files:
        if file.name in _OBJECTS:
            read_object(file)
        elif file.suffix == ".json":
            read_json(file)
        elif file.suffix == ".safetensors":
            _check_safetensors(file)


def _check_safetensors(path: Path) -> None:
    """Hold the header, which says where each tensor lies, against the size of the file."""
    try:
        with path.open("rb") as stream:
            start = stream.read(8)
            length = int.from_bytes(start, "little")
            # A pointer that stands for a file not fetched, or a page of an error, is text: its
            # first bytes make a number beyond all bounds.
            if len(start) < 8 or length > _LARGEST_HEADER:
                raise ValueError("it does not begin as a safetensors file does")
            header = json.loads(stream.read(length))
        tensors = [tensor for name, tensor in header.items() if name != "__metadata__"]
        wanted = 8 + length + max((tensor["data_offsets"][1] for tensor in tensors), default=0)
        size = path.stat().st_size
        if size < wanted:
            raise ValueError(f"it has {size} bytes of {wanted}")
    except (KeyError, TypeError, IndexError, AttributeError):
        raise damaged(path, "its header describes no tensors") from None
    except (OSError, ValueError, RecursionError) as error:
        raise damaged(path, str(error)) from None


_NAMERS = frozenset({"config.json", "tokenizer_config.json"})


def check_code(files: Iterable[Path]) -> None:
    """Refuse a model whose code would be fetched from elsewhere, in whatever version is newest."""
    for file in files:
        if file.name in _NAMERS and (elsewhere := code_elsewhere(read_object(file))):
            raise ModelSourceError(
                f"{file.name} takes its Python code from {elsewhere}, in no version that is pinned",
                mend="save the model and that code into one folder, and name the folder",
            )


def code_elsewhere(config: Mapping[str, Any]) -> str | None:
    """Return the repository of somebody else that a configuration takes code from."""
    code = config.get("auto_map")
    for names in code.values() if isinstance(code, dict) else ():
        for name in names if isinstance(names, list) else [names]:
            repository, found, _ = str(name).partition("--")
            if found:
                return repository
    for name, value in config.items():
        # Versions of transformers before 5.3 run what this names whatever they were told.
        if "attn_implementation" in name and "/" in str(value):
            return str(value)
        if isinstance(value, dict) and (found_inside := code_elsewhere(value)):
            return found_inside
    return None


def check_vocabulary(source: ModelSource, report: Callable[[str], None] = lambda _: None) -> None:
    """Refuse a tokenizer with more words than the model: the first of them would crash it.

    One with less than half of the model's is reported: it is hardly the model's own. Words that
    were added later are left out: models are met that never got their padding token.
    """
    known, words = model_vocabulary(source), vocabulary_size(source.path)
    if known is None or words is None:
        return
    if words > known:
        raise ModelSourceError(
            f"the tokenizer of {source.asked} has {words} words and the model knows {known}",
            mend="put the tokenizer beside the model that it was made with",
        )
    if words < known / 2:
        report(
            f"the tokenizer of {source.asked} has {words} words and the model knows {known}: is it "
            "the model's own?"
        )


def model_vocabulary(source: ModelSource) -> int | None:
    """Return how many ids a model knows, if its ``config.json`` says so."""
    if not (source.path / "config.json").is_file():
        return None
    config = source.config()
    # Models that see or hear as well keep the size with their text part.
    known = config.get("vocab_size") or _object(config.get("text_config")).get("vocab_size")
    return known if isinstance(known, int) else None


def vocabulary_size(folder: Path) -> int | None:
    """Return one more than the largest id of a tokenizer's own words, where its files tell."""
    if (folder / "tokenizer.json").is_file():
        words = _object(read_object(folder / "tokenizer.json").get("model")).get("vocab")
    elif (folder / "vocab.json").is_file():
        words = read_object(folder / "vocab.json")
    elif (folder / "vocab.txt").is_file():
        # A word a line: WordPiece's ids are the numbers of the lines.
        words = (folder / "vocab.txt").read_bytes().splitlines()
    else:
        return None
    if isinstance(words, list):
        # A unigram model's ids are the places in its list.
        return len(words)
    ids = [word for word in _object(words).values() if isinstance(word, int)]
    return max(ids) + 1 if ids else None


def _object(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}
