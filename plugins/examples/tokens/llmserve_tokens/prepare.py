"""Runs on the build machine: chooses the tokenizer's files and tests that they load."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from llmserve.plugin import BuildContext, LLMServeError, ModelSourceError, OptionError
from llmserve_tokens.runtime import FileTokenizer

_FOLDER = "tokens"
_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "chat_template.json")
_HINT = "choose --tokenizer transformers"


def prepare(context: BuildContext) -> Mapping[str, Any]:
    """Copy the tokenizer's files into the model, and load them once, as Triton will."""
    source = context.source
    files = [source.path / name for name in _FILES if (source.path / name).is_file()]
    if source.path / "tokenizer.json" not in files:
        raise ModelSourceError(f"{source.asked} has no tokenizer.json", hint=_HINT)
    # Always a copy: these files are small, and reading the hub's cache would need its client.
    settings = context.place(files, _FOLDER, copy=True)
    try:
        tokenizer = FileTokenizer(settings, context.folder)
    except LLMServeError:
        raise
    except Exception as error:
        # The library raises bare exceptions; all of them mean that it cannot use the files.
        reason = " ".join(str(error).split())[:200]
        raise ModelSourceError(
            f"the tokenizer of {source.asked} cannot be used: {reason}", hint=_HINT
        ) from None
    if context.options["chat"] and not tokenizer.has_chat_template:
        raise OptionError(
            f"{context.model} has no chat template", hint="leave out --chat, or use a chat model"
        )
    return settings
