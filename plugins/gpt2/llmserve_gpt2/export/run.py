"""Runs an export: inspects the model, exports it, checks the graph, and only then keeps it."""

from __future__ import annotations

import contextlib
import io
import logging
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from llmserve.plugin import ModelSourceError
from llmserve.runtime.causal import eos_ids
from llmserve_gpt2.export import onnx_file, torchscript_file
from llmserve_gpt2.export.check import check
from llmserve_gpt2.export.model import Shape, Step, shape_of

FORMATS = {"onnx": onnx_file, "torchscript": torchscript_file}


@dataclass(frozen=True)
class Exported:
    """An exported graph, and its difference from the model."""

    file: Path
    shape: Shape
    eos_ids: tuple[int, ...]
    difference: float


def export(
    model: Any, form: str, folder: Path, *, name: str, report: Callable[[str], None]
) -> Exported:
    """Write a model's graph into a folder, or refuse it with the reason."""
    exporter = FORMATS[form]
    try:
        shape = shape_of(model)
        report(f"exporting {name} to {form}")
        with quietly(), torch.no_grad():
            run = exporter.write(Step(model).eval(), shape, folder)
        report(f"comparing {exporter.FILE} with PyTorch")
        with quietly(), torch.no_grad():
            difference = check(run, model, shape)
    except Exception as error:
        for file in folder.glob(f"*{exporter.FILE}*"):
            file.unlink()
        raise ModelSourceError(
            f"{name} cannot be exported to {form}: {_reason(error)}",
            hint="serve it with --plugin hf or --plugin iterative",
        ) from error
    report(f"{exporter.FILE} is off by {difference:.1e} at most, and chooses the same tokens")
    return Exported(folder / exporter.FILE, shape, tuple(sorted(eos_ids(model))), difference)


def _reason(error: BaseException) -> str:
    """Return the first line of the original error, which the exporters wrap in others."""
    while error.__cause__ is not None:
        error = error.__cause__
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


@contextlib.contextmanager
def quietly() -> Iterator[None]:
    """Hide the output and warnings of libraries from the user."""
    before = logging.root.manager.disable
    logging.disable(logging.ERROR)
    try:
        with (
            contextlib.redirect_stdout(io.StringIO()),
            contextlib.redirect_stderr(io.StringIO()),
            warnings.catch_warnings(),
        ):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)
