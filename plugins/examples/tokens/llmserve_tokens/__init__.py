"""The plugin ``tokens``: a model's ``tokenizer.json``, read without transformers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from llmserve.plugin import BuildContext, Tokenizer, contract, hookimpl


@hookimpl
def llmserve_register_tokenizers() -> Sequence[Tokenizer]:
    """Register the tokenizer that ``--tokenizer tokenizers`` selects."""
    return [
        Tokenizer(
            name="tokenizers",
            summary="tokenizer.json, read by tokenizers alone",
            runtime="llmserve_tokens.runtime:FileTokenizer",
            prepare=_prepare,
            # Declared here, because only a tokenizer that can write a conversation takes one.
            inputs=(contract.MESSAGES,),
        )
    ]


def _prepare(context: BuildContext) -> Mapping[str, Any]:
    # Imported here: listing plugins must not load what only a build needs.
    from llmserve_tokens.prepare import prepare

    return prepare(context)
