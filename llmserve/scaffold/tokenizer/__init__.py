"""The plugin ``scaffold``: a tokenizer, and its recipe."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from llmserve.plugin import (
    BuildContext,
    ModelSourceError,
    OptionError,
    Recipe,
    Tokenizer,
    check_vocabulary,
    hookimpl,
)


@hookimpl
def llmserve_register_tokenizers() -> Sequence[Tokenizer]:
    """Register the tokenizer; its class is imported in Triton, not here."""
    return [
        Tokenizer(
            name="scaffold",
            summary="The model's tokenizer.json, without transformers",
            runtime="llmserve.scaffold.tokenizer.tokenizer:ScaffoldTokenizer",
            prepare=_prepare,
            requires=("tokenizers",),
        )
    ]


@hookimpl
def llmserve_register_recipes() -> Sequence[Recipe]:
    return [
        Recipe(
            name="scaffold",
            summary="Hugging Face models with the tokenizer scaffold",
            tokenizer="scaffold",
            generator="transformers",
        )
    ]


def _prepare(context: BuildContext) -> Mapping[str, Any]:
    """Put the tokenizer's files into the model's folder; this runs where the model is built."""
    if context.options["chat"]:
        raise OptionError("this tokenizer has no chat template", hint="leave out --chat")
    file = context.source.path / "tokenizer.json"
    if not file.is_file():
        raise ModelSourceError(f"{context.model} has no tokenizer.json")
    check_vocabulary(context.source, context.report)
    return context.place([file], "tokenizer", copy=True)
