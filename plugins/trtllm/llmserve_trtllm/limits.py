"""What a model's own files say of its vocabulary and of where its answers end."""

from __future__ import annotations

from typing import Any

from llmserve.sources import ModelSource
from llmserve.sources.intact import read_object


def vocabulary_of(source: ModelSource) -> int:
    """Return the size of the model's vocabulary, 0 where it does not say."""
    config = source.config()
    inner = config.get("text_config")
    size = config.get("vocab_size") or (inner.get("vocab_size") if isinstance(inner, dict) else 0)
    return size if isinstance(size, int) else 0


def largest_id(source: ModelSource) -> int:
    """Return the largest id that the tokenizer makes, -1 where its files do not tell."""
    path = source.path / "tokenizer.json"
    if not path.is_file():
        return -1
    content = read_object(path)
    model = content.get("model")
    vocab = model.get("vocab") if isinstance(model, dict) else None
    added = [t.get("id") for t in content.get("added_tokens") or [] if isinstance(t, dict)]
    ids = vocab.values() if isinstance(vocab, dict) else range(len(vocab or ()))
    return max((i for i in (*ids, *added) if isinstance(i, int)), default=-1)


def ends_of(source: ModelSource) -> tuple[list[int], int | None]:
    """Return the ids that end an answer, and the one for padding, if the model names it."""
    found: dict[str, Any] = {}
    for name in ("config.json", "generation_config.json"):
        path = source.path / name
        if path.is_file():
            found |= {k: v for k, v in read_object(path).items() if v is not None}
    eos = found.get("eos_token_id")
    ends = eos if isinstance(eos, list) else [eos]
    pad = found.get("pad_token_id")
    return [e for e in ends if isinstance(e, int)], pad if isinstance(
        pad, int
    ) and pad >= 0 else None
