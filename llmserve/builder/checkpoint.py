"""A model as transformers reads it, for a program that runs it itself."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from llmserve.builder.source import ModelSource, resolve
from llmserve.builder.source_files import check_code, config_files


@contextmanager
def open_checkpoint(model: str, report: Callable[[str], None]) -> Iterator[ModelSource]:
    """Locate a model as ``build --model`` does; a GGUF file is made a folder while this is open.

    A checkpoint that needs code of its own is refused.
    """
    source = resolve(model, report=report)
    with tempfile.TemporaryDirectory(prefix="llmserve-checkpoint-") as scratch:
        if source.path.is_file():
            from llmserve.builder.gguf.conversion import converted

            source = converted(source, Path(scratch), report)
        check_code(config_files(source.folder), trusted=False)
        yield source
