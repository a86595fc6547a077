"""Writes ``llmserve.toml``, each line with what it comes from."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from llmserve.commands import printable
from llmserve_cli.adopting.adopted import Adopted, AdoptedModel, Origin, Remark, Value

_BARE = re.compile(r"[A-Za-z0-9_-]+")
_TRICKY = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]")


def toml_value(value: Any) -> str:
    r"""Return a value as TOML.

    >>> toml_value(True), toml_value(0.5), toml_value('a"b\n')
    ('true', '0.5', '"a\\"b\\n"')
    """
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, (int, float)):
        return repr(value)
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(toml_value, value))}]"
    text = json.dumps(str(value), ensure_ascii=False)
    # What TOML takes only as an escape, and halves of characters, which it does not take at all.
    return _TRICKY.sub(
        lambda match: "\ufffd" if "\ud800" <= match[0] <= "\udfff" else f"\\u{ord(match[0]):04x}",
        text,
    )


def _key(name: str) -> str:
    return name if _BARE.fullmatch(name) else toml_value(name)


def _comment(text: object) -> str:
    return "# " + printable(" ".join(str(text).split()))


def _entry(key: str, value: Value, shown: Any = None) -> str:
    return f"{_key(key)} = {toml_value(value.value if shown is None else shown)}  " + _comment(
        value.origin
    )


def server_file_text(adopted: Adopted, folder: Path) -> str:
    """Return the file that serves what was adopted; its paths are from the folder it will be in."""
    lines = [f"{_comment(f'llmserve adopt: {adopted.what}')}"]
    if adopted.repository is not None:
        path = _from_folder(str(adopted.repository.value), folder)
        lines += ["", _entry("repository", adopted.repository, path)]
    names = _different_names(adopted.models)
    for model, name in zip(adopted.models, names, strict=True):
        lines += ["", *_model_lines(model, name, folder)]
    for kept, (text, answer) in adopted.texts.items():
        lines += ["", f"[models.{_key(kept)}]", _entry("input", text), _entry("output", answer)]
    gateway = {**adopted.gateway, **_aliases(adopted.models, names)}
    for section, table in (("serve", adopted.serve), ("gateway", gateway)):
        if table:
            lines += ["", f"[{section}]", *(_entry(key, value) for key, value in table.items())]
    lines += _remark_lines("No equal here, and what comes next to it:", adopted.unmatched)
    lines += _remark_lines("Not needed here:", adopted.unneeded)
    return "\n".join(lines) + "\n"


def _remark_lines(title: str, remarks: list[Remark]) -> list[str]:
    unique = dict.fromkeys(map(str, remarks))
    return ["", _comment(title), *(_comment(f"- {each}") for each in unique)] if unique else []


def _different_names(models: Sequence[AdoptedModel]) -> list[str]:
    names: list[str] = []
    for model in models:
        name, number = model.name, 2
        while name in names:
            name, number = f"{model.name[:120]}-{number}", number + 1
        names.append(name)
    return names


def _aliases(models: Sequence[AdoptedModel], names: Sequence[str]) -> dict[str, Value]:
    """Return what the old server's clients call models whose names here are others."""
    called: dict[str, str] = {}
    for model, name in zip(models, names, strict=True):
        for each in (model.called, *model.also_called):
            if each and each != name:
                called.setdefault(each, name)
    words = [f"{each}={name}" for each, name in called.items()]
    return {"aliases": Value(words, Origin("its clients", 0, "what they send"))} if words else {}


def _model_lines(model: AdoptedModel, name: str, folder: Path) -> Iterator[str]:
    table = f"models.{_key(name)}"
    yield f"[{table}]"
    yield _entry("source", model.source, _from_folder(str(model.source.value), folder))
    for key, value in (("plugin", model.plugin), ("batching", model.batching)):
        if value is not None:
            yield _entry(key, value)
    if model.options:
        yield ""
        yield f"[{table}.options]"
        yield from (_entry(key, value) for key, value in model.options.items())


def _from_folder(path: str, folder: Path) -> str:
    """Return a path as it is written in a file of a folder; an id stays."""
    if not path.startswith("/"):
        return path
    with_links = Path(path)
    if with_links == folder:
        return "."
    return f"./{with_links.relative_to(folder)}" if with_links.is_relative_to(folder) else path


def secret_lines(adopted: Adopted) -> Iterator[str]:
    """Say which secrets were found, without their values, and what to do with each."""
    for secret in adopted.secrets:
        if secret.is_key:
            file = adopted.gateway["keys"].value
            yield (
                f"{secret.origin}: a key that clients send, not written: put it into "
                f"{secret.variable}, and llmserve key new clients --from-env {secret.variable} "
                f"--file {file}"
            )
        elif secret.variable == "HF_TOKEN":
            yield f"{secret.origin}: a secret, not written: a build reads HF_TOKEN"
        else:
            yield (
                f"{secret.origin}: a secret, not written: set {secret.variable} in the "
                "environment, if anything reads it"
            )


def remark_lines(adopted: Adopted) -> Iterator[str]:
    for each in dict.fromkeys(map(str, adopted.unmatched)):
        yield f"no equal: {each}"
