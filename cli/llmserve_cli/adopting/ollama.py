"""Reads Ollama's Modelfiles, and the store that it keeps models in."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llmserve.errors import ConfigError
from llmserve_cli.adopting.adopted import Adopted, AdoptedModel, Origin, Remark, Value, shown
from llmserve_cli.adopting.launch import locate, model_name
from llmserve_cli.adopting.source_text import (
    SourceText,
    exists,
    files_below,
    is_inside,
    read_json,
    read_source,
)

_INSTRUCTIONS = (
    "FROM", "PARAMETER", "TEMPLATE", "SYSTEM", "ADAPTER", "LICENSE", "MESSAGE", "RENDERER",
    "PARSER", "REQUIRES", "DRAFT",
)  # fmt: skip
_LINE = re.compile(rf"\s*({'|'.join(_INSTRUCTIONS)})[ \t]+(.*)", re.IGNORECASE | re.DOTALL)
_FROM = re.compile(r"(?im)^\s*FROM[ \t]+\S")
_DIGEST = re.compile(r"sha256[:-][0-9a-f]{64}")
_HUB = re.compile(r"(?:hf\.co|huggingface\.co)/([\w.-]+/[\w.-]+)(?::([\w.-]+))?", re.IGNORECASE)
_PORT = 11434
_MOST_MODELS = 500
_PARAMETERS = {
    "num_ctx": "max_model_len",
    "num_predict": "max_tokens",
    "num_thread": "threads",
}
"""Parameters that are options of a build."""
_REQUESTS = {
    "temperature": "temperature", "top_k": "top_k", "top_p": "top_p", "min_p": "min_p",
    "seed": "seed", "stop": "stop", "repeat_penalty": "repetition_penalty",
    "presence_penalty": "presence_penalty", "frequency_penalty": "frequency_penalty",
}  # fmt: skip
"""Parameters that are fields of each request."""
_MACHINE = frozenset(
    {
        "num_gpu", "main_gpu", "num_batch", "num_keep", "low_vram", "use_mmap", "use_mlock", "numa",
        "num_gqa", "f16_kv",
    }
)  # fmt: skip


@dataclass(frozen=True)
class _Instruction:
    name: str
    text: str
    line: int


def is_modelfile(source: SourceText) -> bool:
    """Return whether this is a Modelfile, and no Dockerfile."""
    found = list(_instructions(source))
    others = re.search(r"(?m)^\s*(RUN|CMD|COPY|ENTRYPOINT|WORKDIR|EXPOSE)\b", source.text)
    is_first = bool(found) and found[0].name in _INSTRUCTIONS
    return bool(_FROM.search(source.text)) and is_first and not others


def _instructions(source: SourceText) -> Iterator[_Instruction]:
    lines = source.text.splitlines()
    at = 0
    while at < len(lines):
        match, start = _LINE.match(lines[at]), at
        at += 1
        if match is None:
            continue
        text = match[2].strip()
        for quotes in ('"""', '"'):
            opened = text.startswith(quotes) or (
                match[1].upper() in ("PARAMETER", "MESSAGE") and f" {quotes}" in text
            )
            if not opened:
                continue
            while text.count(quotes) < 2 and at < len(lines):
                text += f"\n{lines[at]}"
                at += 1
            break
        yield _Instruction(match[1].upper(), text, start + 1)


def read_modelfile(source: SourceText) -> Adopted:
    """Read one Modelfile: the model that its FROM names."""
    adopted = Adopted("a Modelfile of Ollama")
    model: AdoptedModel | None = None
    parameters: list[tuple[str, str, Origin]] = []
    for each in _instructions(source):
        value = _unquoted(each.text)
        origin = Origin(source.name, each.line, shown(each.name, value))
        if each.name == "FROM":
            if model is not None:
                adopted.miss(origin, "a model is built from one source: the first one is taken")
                continue
            where = _from(source, value, origin, adopted)
            stem = source.name.rsplit("/", 1)[-1].partition(".")[2] or _short(value)
            model = AdoptedModel(model_name(stem), Value(where, origin))
        elif each.name == "PARAMETER":
            name, _, given = value.partition(" ")
            parameters.append((name, given.strip(), origin))
        else:
            _take_part(each.name, value, origin, adopted, model, source)
    if model is None:
        raise ConfigError(f"{source.name} has no FROM", hint="a Modelfile names its model there")
    for name, given, origin in parameters:
        _take_parameter(name, given, origin, adopted, model)
    adopted.models.append(model)
    _add_port(adopted, source.name)
    return adopted


def _short(text: str) -> str:
    return text.rstrip("/").rsplit("/", 1)[-1].partition(":")[0].removesuffix(".gguf")


def _unquoted(text: str) -> str:
    for quotes in ('"""', '"'):
        if text.startswith(quotes):
            return text[len(quotes) :].removesuffix(quotes).strip()
    return text.strip()


def _from(source: SourceText, text: str, origin: Origin, adopted: Adopted) -> str:
    """Return what a FROM means here."""
    if match := _HUB.fullmatch(text):
        if match[2]:
            adopted.miss(origin, f"name the GGUF file of {match[2]}, as {match[1]}:FILE.gguf")
        return match[1]
    is_path = text.startswith(("/", ".", "~")) or exists(source.folder, text)
    if is_path:
        return locate(text, source.folder, miss=lambda words: adopted.miss(origin, words))
    adopted.miss(
        origin, "it is a name in Ollama's registry: adopt Ollama's store (~/.ollama/models), or "
        "name the model of the hub with --model OWNER/NAME",
    )  # fmt: skip
    return text


def _take_part(
    name: str,
    value: str,
    origin: Origin,
    adopted: Adopted,
    model: AdoptedModel | None,
    source: SourceText,
) -> None:
    match name:
        case "SYSTEM":
            adopted.miss(origin, "a system message of each request, or run --system")
        case "TEMPLATE":
            adopted.miss(
                origin, "the chat template of the model itself is used, in the language of "
                "transformers: chat_template.jinja in its folder replaces it",
            )  # fmt: skip
        case "ADAPTER":
            if value.lower().endswith(".gguf") or model is None:
                adopted.miss(
                    origin, "adapters of llama.cpp are GGUF files: name the PEFT folder that it "
                    "was converted from, with llmserve adapter add",
                )  # fmt: skip
            else:
                where = locate(value, source.folder, miss=lambda w: adopted.miss(origin, w))
                model.options["adapters"] = Value(f"{model_name(_short(value))}={where}", origin)
        case "MESSAGE":
            adopted.miss(origin, "a message of each request")
        case "DRAFT" if model is not None:
            where = locate(value, source.folder, miss=lambda w: adopted.miss(origin, w))
            model.options["draft_model"] = Value(where, origin)
        case _:
            adopted.unneeded.append(Remark(origin, "it changes nothing about the answers"))


def _take_parameter(
    name: str, given: str, origin: Origin, adopted: Adopted, model: AdoptedModel
) -> None:
    if name in _PARAMETERS:
        if not (name == "num_predict" and given.startswith("-")):
            model.options[_PARAMETERS[name]] = Value(given, origin)
    elif name in _REQUESTS:
        adopted.miss(origin, f"{_REQUESTS[name]} of each request: without it, decoding is greedy")
    elif name in _MACHINE:
        adopted.unneeded.append(Remark(origin, "how it computes is the plugin's own affair"))
    else:
        adopted.miss(origin, "no field of a request is called so")


def _add_port(adopted: Adopted, name: str) -> None:
    adopted.gateway["port"] = Value(_PORT, Origin(name, 0, "Ollama's port"))


def is_store(folder: Path) -> bool:
    return _root(folder) is not None


def _root(folder: Path) -> Path | None:
    """Return the folder of a store, which has manifests and blobs."""
    for root in (folder, folder / "models"):
        if (root / "manifests").is_dir() and (root / "blobs").is_dir():
            return root
    return None


def read_store(folder: Path) -> Adopted:
    """Read all models of a store: each manifest names a file by its hash."""
    root = _root(folder)
    if root is None:
        raise ConfigError(f"{folder} is no store of Ollama", hint="it has manifests and blobs")
    adopted = Adopted("Ollama's store")
    for path in files_below(root / "manifests", 5):
        if len(adopted.models) >= _MOST_MODELS:
            break
        parts = path.relative_to(root / "manifests").parts
        if len(parts) < 2:
            continue
        called = parts[-2] if parts[-1] == "latest" else f"{parts[-2]}:{parts[-1]}"
        where = str(path.relative_to(root))
        try:
            _read_manifest(root, path, where, called, adopted)
        except ConfigError as error:
            adopted.miss(Origin(where, 0, ""), error.problem)
    if not adopted.models and not adopted.unmatched:
        raise ConfigError(f"{folder} has no model", hint="ollama pull fetches one")
    _add_port(adopted, str(folder))
    return adopted


def _read_manifest(root: Path, path: Path, where: str, called: str, adopted: Adopted) -> None:
    content = read_json(read_source(path, where))
    layers = content.get("layers") if isinstance(content, dict) else None
    if not isinstance(layers, list):
        raise ConfigError(f"{where} has no layers")
    model: AdoptedModel | None = None
    rest: list[tuple[str, Path, Origin]] = []
    for layer in layers[:64]:
        digest = layer.get("digest") if isinstance(layer, dict) else None
        kind = str(layer.get("mediaType")).rsplit(".", 1)[-1] if isinstance(layer, dict) else ""
        if not isinstance(digest, str) or not _DIGEST.fullmatch(digest):
            raise ConfigError(f"{where} has a layer without a digest")
        blob = root / "blobs" / digest.replace(":", "-")
        origin = Origin(where, 0, f"{kind} {digest[:19]}…")
        if not blob.is_file() or not is_inside(blob, root):
            raise ConfigError(f"{where} names the blob {digest[:19]}…, which is not here")
        size = layer.get("size")
        if isinstance(size, int) and blob.stat().st_size != size:
            raise ConfigError(f"{where}: the blob {digest[:19]}… is not whole")
        if kind == "model" and model is None:
            name = model_name(called.replace(":", "-"))
            model = AdoptedModel(name, Value(str(blob.absolute()), origin), called=called)
        else:
            rest.append((kind, blob, origin))
    if model is None:
        raise ConfigError(f"{where} names no model, as one that Ollama has elsewhere")
    for kind, blob, origin in rest:
        _take_layer(kind, blob, origin, adopted, model)
    adopted.models.append(model)


def _take_layer(
    kind: str, blob: Path, origin: Origin, adopted: Adopted, model: AdoptedModel
) -> None:
    match kind:
        case "params":
            try:
                content: Any = read_json(read_source(blob, origin.file))
            except ConfigError as error:
                adopted.miss(origin, error.problem)
                return
            for name, given in content.items() if isinstance(content, dict) else ():
                values = given if isinstance(given, list) else [given]
                for value in values[:16]:
                    place = Origin(origin.file, 0, shown(f"{model.name}: {name}", str(value)))
                    _take_parameter(name, str(value), place, adopted, model)
        case "template":
            adopted.miss(origin, "the chat template in the GGUF file is used")
        case "system":
            adopted.miss(origin, "a system message of each request, or run --system")
        case "adapter":
            adopted.miss(origin, "adapters of llama.cpp are GGUF files, which no plugin takes")
        case "projector":
            adopted.miss(origin, "pictures are not served")
        case "model":
            adopted.miss(origin, "a model of several files is not taken")
        case _:
            adopted.unneeded.append(Remark(origin, "it changes nothing about the answers"))
