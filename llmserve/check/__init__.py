"""What would not load in a model repository, found without a server and said in plain words."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from llmserve import modelconfig
from llmserve.check.configs import check_config
from llmserve.check.ensembles import check_ensemble
from llmserve.check.needs import check_environment
from llmserve.check.papers import check_papers
from llmserve.check.problem import Problem
from llmserve.check.tensorrtllm import check_tensorrtllm
from llmserve.errors import ConfigError
from llmserve.modelconfig import ModelConfig

__all__ = ["Problem", "check_environment", "check_repository"]

_PLACEHOLDER = re.compile(r"\$\{(\w*)\}?")
_UNSET = "take it out if the default is meant, else give it a value"


def check_repository(repository: Path) -> list[Problem]:
    """Return everything that is wrong with a repository, model by model.

    >>> check_repository(Path("/nowhere"))[0].what
    'there is no such folder'
    """
    if not repository.is_dir():
        return [Problem(str(repository), "there is no such folder", "llmserve build makes one")]
    folders = [path for path in sorted(repository.iterdir()) if path.is_dir()]
    if not folders:
        return [Problem(str(repository), "it holds no model", "llmserve build makes one")]
    problems: list[Problem] = []
    configs: dict[str, ModelConfig] = {}
    for folder in folders:
        config, found = _read(folder)
        problems += found
        if config is not None:
            configs[folder.name] = config
    for folder in folders:
        if (config := configs.get(folder.name)) is not None:
            problems += check_config(folder, config)
            problems += check_ensemble(folder.name, config, configs, {f.name for f in folders})
            problems += check_tensorrtllm(folder, config, configs)
        problems += check_papers(folder)
    return problems


def _read(folder: Path) -> tuple[ModelConfig | None, list[Problem]]:
    path = folder / modelconfig.FILE
    if not path.is_file():
        versions = any(child.is_dir() and child.name.isdigit() for child in folder.iterdir())
        what = f"it has no {modelconfig.FILE}" if versions else "it is no model"
        mend = "build it again" if versions else "move the folder out: Triton stops over it"
        return None, [Problem(folder.name, what, mend)]
    text = path.read_text(encoding="utf-8", errors="replace")
    if unfilled := ", ".join(dict.fromkeys(_unfilled(text, quoted=False))):
        return None, [
            Problem(folder.name, f"placeholders are not filled in: {unfilled}", "give each a value")
        ]
    # As text, one can be read: TensorRT-LLM takes it for a parameter that is not set.
    unset = ", ".join(dict.fromkeys(_unfilled(text, quoted=True)))
    told = [Problem(folder.name, f"{unset} is not filled in", _UNSET, fatal=False)] if unset else []
    try:
        return modelconfig.read(folder), told
    except ConfigError as error:
        return None, [Problem(folder.name, error.problem, "write it as Triton's ModelConfig says")]


def _unfilled(text: str, *, quoted: bool) -> Iterator[str]:
    """Find template placeholders outside of comments: those within quotes, or the others."""
    for number, line in enumerate(text.splitlines(), start=1):
        code = line.split("#", 1)[0]
        for match in _PLACEHOLDER.finditer(code):
            if quoted == bool(code[: match.start()].count('"') % 2):
                yield f"${{{match[1]}}} in line {number}"
