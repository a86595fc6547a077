"""Which files of a model on the hub are downloaded: one form of its weights, and no other."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from fnmatch import fnmatchcase
from pathlib import Path

from llmserve.builder.weights.stored import INDEX, WHOLE, index_of, shards_of
from llmserve.errors import ModelSourceError

_BESIDE = ("*.json", "*.jinja", "*.model", "*.txt", "*.tiktoken", "*.py")
"""What a model needs beside its weights; configurations, tokenizers and code."""
_WHOLE = {"*.safetensors": WHOLE, "*.bin": "pytorch_model.bin"}
"""The file of all weights in a form, if they are not in several."""
_ADAPTER = "adapter_config.json"


def needed_files(
    names: Collection[str], weights: Sequence[str], read: Callable[[str], Path]
) -> list[str]:
    """Return the files of a model that a build needs; ``read`` returns one of them.

    Files in folders are other forms of the model: a generator that can use one names it.
    """
    own = [name for name in names if "/" not in name]
    beside = [name for name in own if _matches(name, _BESIDE)]
    return sorted({*beside, *needed_weights(own, weights, read)})


def needed_weights(
    names: Collection[str], weights: Sequence[str], read: Callable[[str], Path]
) -> list[str]:
    """Return the files of weights that are loaded, of those that match a generator's patterns.

    What a generator names without a pattern is ready for it, and taken first; then the first
    pattern that has files.
    """
    own = [name for name in names if "/" not in name]
    ready = [pattern for pattern in weights if "*" not in pattern]
    if ready and all(name in own for name in ready):
        return ready
    for pattern in weights:
        found = [name for name in own if fnmatchcase(name, pattern)]
        if found and pattern in _WHOLE:
            return _loaded(own, found, _WHOLE[pattern], read)
        if found and not any("/" in each for each in weights):
            return found
    return []


def _loaded(
    own: Collection[str], found: Sequence[str], whole: str, read: Callable[[str], Path]
) -> list[str]:
    """Return what transformers loads, as ``loaded_files`` does of a folder."""
    adapters = [name for name in found if _ADAPTER in own and name.startswith("adapter_model.")]
    if whole in own:
        return [whole, *adapters]
    index = index_of([name for name in own if name.endswith(INDEX)], whole)
    if index is None:
        return list(found)
    shards = [file.name for file in shards_of(read(index))]
    if missing := [name for name in shards if name not in own]:
        raise ModelSourceError(
            f"the model has no {missing[0]}, which {index} names", hint="choose another model"
        )
    return [*shards, *adapters]


def _matches(name: str, patterns: Sequence[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)
