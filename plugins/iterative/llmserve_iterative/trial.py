"""Tries whether a kind of model can be decoded step by step, with a small random one of it.

It runs as a separate program, since what it imports takes seconds and memory, and is run by
``refuse_unserved`` before any weight is read.
"""

from __future__ import annotations

import sys
from functools import lru_cache
from pathlib import Path
from typing import Any

from llmserve.plugin import BuildContext, IncompatibleError, UnservedError, run_program

UNSERVED = 69
"""The exit status if the model has a part that cannot be computed; the last line says which."""
_DIFFERS = "is computed differently step by step: log-probabilities are off by {:.2g}"
_TOLERANCE = 0.02


def refuse_unserved(context: BuildContext) -> None:
    """Raise an :class:`UnservedError` for a model that cannot be decoded step by step."""
    source = context.source
    if source.is_demo:
        return
    config = (source.path / "config.json").read_text(encoding="utf-8")
    if words := _tried(config, source.path, trusted=bool(context.options["trust_remote_code"])):
        raise UnservedError(f"iterative cannot serve {source.asked}: it {words}")


@lru_cache(maxsize=16)
def _tried(config: str, folder: Path, *, trusted: bool) -> str:
    """Return what cannot be computed, or nothing; a configuration gets the same answer again."""
    del config
    ended = run_program(
        [sys.executable, "-m", "llmserve_iterative.trial", str(folder), *(["code"] * trusted)],
        words="trying a small model of its kind",
        report=lambda _: None,
    )
    # One that fails otherwise says nothing of the model.
    return ended.words if ended.code == UNSERVED else ""


def try_small(config: Any) -> None:
    """Decode texts with a small model of a configuration; raise if it answers differently."""
    import torch

    from llmserve.runtime.causal import (
        NEAR,
        off_by,
        original_length,
        pages_of,
        random_texts,
        scores,
        small_model,
    )  # fmt: skip
    from llmserve_iterative.runner import make_runner

    text_config = config.get_text_config()
    if (model := small_model(config)) is None:
        return
    # Beyond it, only a part of the context is served.
    longest = NEAR if original_length(text_config.to_dict()) else 2 * NEAR + 54
    texts = random_texts(model.config, [longest, min(longest, NEAR + 20), 13])
    with torch.inference_mode():
        expected = [model(input_ids=torch.tensor([text])).logits[0] for text in texts]
    try:
        runner = make_runner(model, 32 * (pages_of(texts, 32) + 2))
    except IncompatibleError:
        raise UnservedError("has no cache that can be kept for each sequence") from None
    found = scores(runner, texts)
    worst = max(off_by(*each) for each in zip(found, expected, strict=True))
    if worst > _TOLERANCE:
        raise UnservedError(_DIFFERS.format(worst))


def main(folder: str, *, trusted: bool) -> None:
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(folder, trust_remote_code=trusted, local_files_only=True)
    try:
        try_small(config)
    except UnservedError as error:
        sys.stderr.write(f"\n{error.problem}\n")
        sys.exit(UNSERVED)


if __name__ == "__main__":
    main(sys.argv[1], trusted=len(sys.argv) > 2)
