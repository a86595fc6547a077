"""Helpers that build for a version, and write the configurations of engines for it."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import llmserve
from llmserve.plugin import ADAPTER_OPTIONS, IMAGE_OPTIONS, ModelConfig
from llmserve.testing import read_config
from llmserve_trtllm.options import OPTIONS
from llmserve_trtllm.versions import Version

_JSON = re.compile(r"\{.*\}|true|false")
ENGINES = Path(__file__).with_name("engines")
_OPTIONS = (*OPTIONS, *ADAPTER_OPTIONS, *IMAGE_OPTIONS)
DEFAULTS = {option.name: option.default for option in _OPTIONS} | {"max_batch_size": 16}


def cases(heading: str) -> list[list[Any]]:
    """Return the lines of a section of ``cases.txt``, with values in JSON parsed."""
    text = Path(__file__).with_name("cases.txt").read_text(encoding="utf-8")
    section = text.partition(f"[{heading}]\n")[2].partition("\n\n")[0]
    columns = ([word.strip() for word in line.split(" | ")] for line in section.splitlines())
    return [
        [json.loads(word) if _JSON.fullmatch(word) else word for word in row] for row in columns
    ]


def engine_of(
    folder: Path, version: str, changes: Mapping[str, Any] = MappingProxyType({})
) -> Path:
    """Write a version's engine in the format of that version, with changes by ``outer.inner``."""
    release = Version.parse(version)
    forms = sorted(ENGINES.iterdir(), key=lambda form: Version.parse(form.name))
    form = [form for form in forms if Version.parse(form.name) <= release][-1]
    content = json.loads((form / "config.json").read_text(encoding="utf-8"))
    if "version" in content:
        content["version"] = str(release)
    for keys, value in changes.items():
        *outer, last = keys.split(".")
        inner = content
        for key in outer:
            inner = inner[key]
        inner[last] = value
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(content), encoding="utf-8")
    return folder


def build(output: Path, version: str, **options: Any) -> dict[str, ModelConfig]:
    """Build for a version and return the configurations by NVIDIA's names."""
    if options.get("layout") != "llmapi" and "engine" not in options:
        options["engine"] = str(engine_of(output / f"engine-{version}", version))
    repository = output / version
    llmserve.build(
        "trtllm", "demo", name="ensemble", output=repository, trtllm_version=version, **options
    )
    folders = [path for path in repository.iterdir() if path.is_dir()]
    return {folder.name: read_config(folder) for folder in folders}


def steps(configs: dict[str, ModelConfig]) -> dict[str, Any]:
    """Return the ensemble's steps by the names of their models."""
    return {step.model_name: step for step in configs["ensemble"].ensemble_scheduling.step}
