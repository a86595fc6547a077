"""What a model reads before anybody asks: system prompts that most conversations begin with."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class WarmPrompt:
    """A message of the system, and the name of the file that has it."""

    file: str
    text: str
