"""The input and output of model repository checks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from llmserve.repository.config import ModelConfig


@dataclass(frozen=True)
class Problem:
    """A problem of a model, and how to fix it.

    ``fatal`` problems keep the model from loading; the others are notes.
    """

    model: str
    what: str
    mend: str
    fatal: bool = True

    def __str__(self) -> str:
        return f"{self.model}: {self.what}: {self.mend}"


@dataclass(frozen=True)
class CheckedModel:
    """A model of a repository, as it is passed to the hook ``llmserve_check_model``.

    ``folder`` is the model's folder, ``config`` its ``config.pbtxt``, and ``configs`` those of all
    models of the repository by name.
    """

    folder: Path
    config: ModelConfig
    configs: Mapping[str, ModelConfig]

    @property
    def name(self) -> str:
        return self.folder.name
