"""Files in ONNX's or OpenVINO's form that a model brings."""

from __future__ import annotations

from pathlib import Path

from llmserve.plugin import BuildContext, OptionError, file_of


def brought(context: BuildContext, name: str, suffixes: tuple[str, ...]) -> tuple[Path, list[Path]]:
    """Return a file that the model brings, and those beside it that hold its weights."""
    path = Path(name)
    if path.suffix in suffixes:
        needed = f"{name}*data*" if path.suffix == ".onnx" else str(path.with_suffix(".bin"))
        file = file_of(context.source, name, beside=[needed])
        if file.is_file():
            found = file.parent.glob(Path(needed).name)
            return file, [each for each in found if each.is_file()]
    form = "ONNX's or OpenVINO's" if ".xml" in suffixes else "ONNX's"
    raise OptionError(
        f"{context.source.asked} has no file {name!r} in {form} form",
        hint="name one of its own with --set file=, such as onnx/model.onnx",
    )
