"""Adapters of a model: placed by a build, and added, removed and listed afterwards."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmserve.builder.progress import Note
from llmserve.builder.source_files import check_links
from llmserve.errors import ModelSourceError, OptionError
from llmserve.plugins.options import Option
from llmserve.runtime.lora import (
    ADAPTERS,
    CONFIG,
    DEFAULT_ADAPTER_MB,
    WEIGHTS,
    Lora,
    LoraError,
    adapters_of,
    is_adapter_name,
    read_lora,
)

if TYPE_CHECKING:
    from llmserve.builder.context import BuildContext
    from llmserve.runtime.lora_weights import ProductShapes

ADAPTER_OPTIONS = (
    Option(
        "adapters",
        "",
        "LoRA adapters that requests can name, as NAME=FOLDER,NAME=FOLDER; `llmserve adapter` adds "
        "and removes others.",
    ),
    Option(
        "adapter_mb",
        DEFAULT_ADAPTER_MB,
        "Most memory for adapters, in megabytes: the least recently used are loaded again.",
        minimum=1,
    ),
)
"""The options of a generator that has adapters; ``place_adapters`` reads them."""


def check_adapters(options: Mapping[str, Any]) -> None:
    """Refuse adapters that no model could have, before a long build begins."""
    for name, folder in _named(str(options.get(ADAPTER_OPTIONS[0].name, ""))).items():
        _check_files(folder)
        with _refusing(name, folder):
            read_lora(folder)


def place_adapters(context: BuildContext, runtime: str, settings: Mapping[str, Any]) -> None:
    """Copy the adapters of a build into the model; ``settings`` say where that is.

    ``runtime`` is the generator's, whose ``adapter_shapes`` says to what adapters may add.
    """
    named = _named(str(context.options[ADAPTER_OPTIONS[0].name]))
    # A server that runs has to find it when the first one is added.
    (context.folder / ADAPTERS).mkdir(parents=True, exist_ok=True)
    if not named:
        return
    shapes = _shapes(runtime, settings, context.folder)
    for name, folder in named.items():
        with _checked(name, folder, shapes, context.folder) as (copy, lora):
            copy.rename(context.folder / ADAPTERS / name)
        if note := _other_base(lora, context.source.asked):
            context.report(Note(f"note: the adapter {name} {note}"))


def add_adapter(version: Path, generator: Mapping[str, Any], name: str, folder: Path) -> Lora:
    """Add an adapter to a built model, or replace it; requests in flight keep the one before.

    ``generator`` is the entry of the manifest.
    """
    shapes = _shapes(generator["runtime"], generator["settings"], version)
    with _checked(name, folder, shapes, version) as (copy, lora):
        target = version / ADAPTERS / name
        with tempfile.TemporaryDirectory(dir=version / ADAPTERS, prefix=".") as old:
            if target.exists():
                target.rename(Path(old) / name)
            copy.rename(target)
    return lora


def remove_adapter(version: Path, name: str) -> None:
    """Remove an adapter; requests that name it are refused from now on."""
    folder = version / ADAPTERS / _checked_name(name)
    if not folder.is_dir():
        raise ModelSourceError(f"there is no adapter {name!r}", hint=_known(version))
    with tempfile.TemporaryDirectory(dir=version / ADAPTERS, prefix=".") as old:
        folder.rename(Path(old) / name)


def _named(text: str) -> dict[str, Path]:
    named: dict[str, Path] = {}
    for part in filter(None, map(str.strip, text.split(","))):
        name, equals, folder = part.partition("=")
        if not equals or not folder:
            raise OptionError(f"adapters has {part!r}", hint="write NAME=FOLDER,NAME=FOLDER")
        if named.setdefault(_checked_name(name), Path(folder)) != Path(folder):
            raise OptionError(f"two adapters are called {name!r}", hint="give them two names")
    return named


def _checked_name(name: str) -> str:
    if not is_adapter_name(name):
        raise OptionError(
            f"an adapter cannot be called {name[:80]!r}",
            hint="use up to 64 letters, digits, dots and dashes, a letter or digit first",
        )
    return name


@contextmanager
def _checked(
    name: str, folder: Path, shapes: ProductShapes, version: Path
) -> Iterator[tuple[Path, Lora]]:
    """Copy an adapter's files to a place that goes with the block, and check the copy."""
    from llmserve.runtime.lora_weights import check_lora, read_lora_weights

    files = _check_files(folder)
    home = version / ADAPTERS
    home.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=home, prefix=".") as draft:
        copy = Path(draft) / _checked_name(name)
        copy.mkdir()
        for file in files:
            shutil.copyfile(file, copy / file.name)
        with _refusing(name, folder):
            lora = read_lora(copy)
            check_lora(lora, shapes)
            for _ in read_lora_weights(lora):
                pass
        yield copy, lora


def _check_files(folder: Path) -> list[Path]:
    """Return the files of an adapter that are in its folder, none of which is one elsewhere."""
    if not folder.is_dir():
        raise ModelSourceError(f"there is no folder {folder}", hint="name an adapter's folder")
    files = [file for file in (folder / CONFIG, folder / WEIGHTS) if file.is_file()]
    check_links(files, folder)
    return files


@contextmanager
def _refusing(name: str, folder: Path) -> Iterator[None]:
    try:
        yield
    except LoraError as error:
        raise ModelSourceError(
            f"the adapter {name} in {folder} {error}",
            hint="save it with PEFT's save_pretrained, for this model, or merge it",
        ) from None


def _shapes(runtime: str, settings: Mapping[str, Any], version: Path) -> ProductShapes:
    module, _, name = runtime.partition(":")
    shapes: ProductShapes = getattr(import_module(module), name).adapter_shapes(settings, version)
    return shapes


def _other_base(lora: Lora, asked: str) -> str:
    """Say that an adapter was trained on another model, as far as names tell."""
    names = [name.rstrip("/").split("/")[-1].lower() for name in (lora.base, asked)]
    return f"was trained on {lora.base}" if lora.base != "None" and len({*names}) > 1 else ""


def _known(version: Path) -> str:
    names = [*adapters_of(version)]
    return f"there are {', '.join(names)}" if names else "the model has none"
