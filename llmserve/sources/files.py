"""Which of a model's files belong to its tokenizer and which to its weights."""

from __future__ import annotations

from pathlib import Path

from llmserve.errors import ModelSourceError
from llmserve.sources import PICKLED, WEIGHTS, ModelSource
from llmserve.sources.intact import read_object

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
    return [source.path / "config.json", *files]


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
    return sorted(path for path in source.path.iterdir() if path.is_file())
