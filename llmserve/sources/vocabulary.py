"""Whether a tokenizer belongs to its model, as far as their files say."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from llmserve.errors import ModelSourceError
from llmserve.sources import ModelSource
from llmserve.sources.intact import read_object


def check_vocabulary(source: ModelSource) -> None:
    """Refuse a tokenizer with more words than the model: the first of them would crash it.

    Words that were added later are left out: models are met that never got their padding token.
    """
    config = source.config()
    # Models that see or hear as well keep the size with their text part.
    known = config.get("vocab_size") or _object(config.get("text_config")).get("vocab_size")
    words = vocabulary_size(source.path)
    if isinstance(known, int) and words is not None and words > known:
        raise ModelSourceError(
            f"the tokenizer of {source.asked} has {words} words and the model knows {known}",
            mend="put the tokenizer beside the model that it was made with",
        )


def vocabulary_size(folder: Path) -> int | None:
    """Return one more than the largest id of a tokenizer's own words, where its files tell."""
    if (folder / "tokenizer.json").is_file():
        words = _object(read_object(folder / "tokenizer.json").get("model")).get("vocab")
    elif (folder / "vocab.json").is_file():
        words = read_object(folder / "vocab.json")
    else:
        return None
    if isinstance(words, list):
        # A unigram model's ids are the places in its list.
        return len(words)
    ids = [word for word in _object(words).values() if isinstance(word, int)]
    return max(ids) + 1 if ids else None


def _object(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}
