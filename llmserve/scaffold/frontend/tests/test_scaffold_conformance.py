"""What `serve` expects of the frontend, which runs as a process; no Triton is needed."""

from __future__ import annotations

from llmserve.testing import FrontendConformance


class TestScaffold(FrontendConformance):
    frontend = "scaffold"
