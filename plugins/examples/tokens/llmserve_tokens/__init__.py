"""The plugin ``tokens``: reads a model's ``tokenizer.json`` without transformers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from llmserve.plugin import BuildContext, Tokenizer, contract, hookimpl


@hookimpl
def llmserve_register_tokenizers() -> Sequence[Tokenizer]:
    return [
        Tokenizer(
            name="tokenizers",
            summary="tokenizer.json, read by the tokenizers library alone",
            runtime="llmserve_tokens.runtime:FileTokenizer",
            prepare=_prepare,
            # Declared here, because not every tokenizer can format conversations.
            inputs=(contract.MESSAGES,),
        )
    ]


def _prepare(context: BuildContext) -> Mapping[str, Any]:
    # Imported here because listing plugins must not load what only a build needs.
    from llmserve_tokens.prepare import prepare

    return prepare(context)
