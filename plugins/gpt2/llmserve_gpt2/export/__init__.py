"""From a transformers model to one file that Triton's native backends run, checked first."""

from __future__ import annotations

from llmserve_gpt2.export.run import Exported, export

__all__ = ["Exported", "export"]
