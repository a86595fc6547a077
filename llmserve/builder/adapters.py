"""Adapters of a model: placed by a build, and added, removed and listed afterwards."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmserve.builder.hub.lookup import cached
from llmserve.builder.progress import Note
from llmserve.builder.source import fetch_file, names_model, path_of
from llmserve.builder.source_files import check_links
from llmserve.contract.options import ADAPTER
from llmserve.errors import ConfigError, IncompatibleError, ModelSourceError, OptionError
from llmserve.plugins.options import Option, Value
from llmserve.plugins.size import AdapterSize, ModelSize
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
from llmserve.texts import printable

if TYPE_CHECKING:
    from llmserve.builder.context import BuildContext
    from llmserve.repository.repository import Model
    from llmserve.runtime.lora_weights import ProductShapes

ADAPTER_OPTIONS = (
    Option(
        "adapters",
        "",
        "LoRA adapters that requests can name, as NAME=FOLDER,NAME=FOLDER, or a model's id on the "
        "Hugging Face hub as FOLDER; `llmserve adapter` adds and removes others.",
    ),
    Option(
        "adapter_mb",
        DEFAULT_ADAPTER_MB,
        "Most memory for adapters, in megabytes: the least recently used are loaded again.",
        minimum=1,
    ),
)
"""The options of a generator that has adapters; ``place_adapters`` reads them."""


def check_adapters(options: Mapping[str, Any], report: Callable[[str], None]) -> list[Lora]:
    """Refuse adapters that no model could have, before a long build; those on the hub come here."""
    found = []
    for name, source in named_adapters(options).items():
        folder = locate_adapter(source, report)
        _check_files(folder)
        with _refusing(name):
            found.append(read_lora(folder))
    return found


def with_adapters(
    size: ModelSize, options: Mapping[str, Any], *, report: Callable[[str], None] = lambda _: None
) -> ModelSize:
    """Return a model's size with that of the adapters that its options name."""
    return replace(size, adapters=tuple(map(AdapterSize.of, check_adapters(options, report))))


def adapter_bytes(size: ModelSize, options: Mapping[str, Value], width: int) -> int:
    """Return what a model's adapters take whose numbers have so many bytes each.

    Those are all of them, or as many as the option ``adapter_mb`` allows, and one at least.
    """
    each = [width * adapter.parameters for adapter in size.adapters]
    # Models that were built before there were adapters have no such option.
    budget = int(options.get(ADAPTER_OPTIONS[1].name, DEFAULT_ADAPTER_MB)) * 1_000_000
    return max([min(sum(each), budget), *each])


def place_adapters(context: BuildContext, runtime: str, settings: Mapping[str, Any]) -> None:
    """Copy the adapters of a build into the model; ``settings`` say where that is.

    ``runtime`` is the generator's, whose ``adapter_shapes`` says to what adapters may add.
    """
    named = named_adapters(context.options)
    # A server that runs has to find it when the first one is added.
    (context.folder / ADAPTERS).mkdir(parents=True, exist_ok=True)
    if not named:
        return
    shapes = _shapes(runtime, settings, context.folder)
    for name, source in named.items():
        # What is on the hub was downloaded before the build began.
        folder = path_of(source)
        folder = folder if folder.is_dir() else cached(source, "", CONFIG) or folder
        with _checked(name, folder, shapes, context.folder) as (copy, lora):
            copy.rename(context.folder / ADAPTERS / name)
        _note_other_base(name, lora, context.source.asked, context.report)


def locate_adapter(source: str, report: Callable[[str], None]) -> Path:
    """Return the folder of an adapter; one that the hub has is downloaded first, as a model is."""
    folder = path_of(source)
    if folder.exists() or source.startswith((".", "/", "~")) or not names_model(source):
        return folder
    return fetch_file(source, CONFIG, revision="", report=report, beside=[WEIGHTS]).parent


def add_adapter(
    model: Model, name: str, folder: Path, report: Callable[[str], None] = lambda _: None
) -> Lora:
    """Add an adapter to a built model, or replace it; requests in flight keep the one before."""
    generator, version = _generator(model), _version(model)
    shapes = _shapes(generator["runtime"], generator["settings"], version)
    with _checked(name, folder, shapes, version) as (copy, lora):
        target = version / ADAPTERS / name
        with tempfile.TemporaryDirectory(dir=version / ADAPTERS, prefix=".") as old:
            if target.exists():
                target.rename(Path(old) / name)
            copy.rename(target)
    _note_other_base(name, lora, _built_from(model), report)
    return lora


def remove_adapter(model: Model, name: str) -> None:
    """Remove an adapter; requests that name it are refused from now on."""
    version = _version(model)
    folder = version / ADAPTERS / _checked_name(name)
    if not folder.is_dir():
        raise ModelSourceError(f"there is no adapter {name!r}", hint=_known(version))
    with tempfile.TemporaryDirectory(dir=version / ADAPTERS, prefix=".") as old:
        folder.rename(Path(old) / name)


def model_adapters(model: Model) -> dict[str, Lora | LoraError]:
    """Return the adapters of a built model by name, or what is wrong with one."""
    return adapters_of(_version(model))


def _version(model: Model) -> Path:
    """Return the folder that has a model's adapters, if it can have any."""
    if model.config is None or ADAPTER.name not in {tensor.name for tensor in model.config.input}:
        raise IncompatibleError(
            f"{model.name} takes no adapters",
            hint="build it with a plugin that serves adapters; an older build, again",
        )
    return model.folder / "1"


def _generator(model: Model) -> Mapping[str, Any]:
    generator = model.manifest.components.get("generator") if model.manifest else None
    if generator is None:
        raise ConfigError(f"{model.folder} was not built by llmserve")
    entry: Mapping[str, Any] = generator
    return entry


def _built_from(model: Model) -> str:
    source = model.manifest.source if model.manifest else {}
    return str(source.get("id") or source.get("folder") or source.get("file") or source.get("kind"))


def named_adapters(options: Mapping[str, Any]) -> dict[str, str]:
    """Return where the adapters are that a build's options name."""
    return _named(str(options.get(ADAPTER_OPTIONS[0].name, "")))


def _named(text: str) -> dict[str, str]:
    named: dict[str, str] = {}
    for part in filter(None, map(str.strip, text.split(","))):
        name, equals, folder = part.partition("=")
        if not equals or not folder:
            raise OptionError(f"adapters has {part!r}", hint="write NAME=FOLDER,NAME=FOLDER")
        if named.setdefault(_checked_name(name), folder) != folder:
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
        with _refusing(name):
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
def _refusing(name: str) -> Iterator[None]:
    try:
        yield
    except LoraError as error:
        raise ModelSourceError(
            f"the adapter {name} {error}",
            hint="save it with PEFT's save_pretrained, for this model, or merge it",
        ) from None


def _shapes(runtime: str, settings: Mapping[str, Any], version: Path) -> ProductShapes:
    module, _, name = runtime.partition(":")
    shapes: ProductShapes = getattr(import_module(module), name).adapter_shapes(settings, version)
    return shapes


def _note_other_base(name: str, lora: Lora, asked: str, report: Callable[[str], None]) -> None:
    """Say that an adapter was trained on another model, as far as names tell."""
    names = {each.rstrip("/").split("/")[-1].lower() for each in (lora.base, asked)}
    if lora.base != "None" and len(names) > 1:
        report(Note(f"note: the adapter {name} was trained on {printable(lora.base)[:200]}"))


def _known(version: Path) -> str:
    names = [*adapters_of(version)]
    return f"there are {', '.join(names)}" if names else "the model has none"
