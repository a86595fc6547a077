"""Other tools against the same model, with the same requests, folded into the same result."""

from __future__ import annotations

import tempfile
from dataclasses import replace
from pathlib import Path

from llmserve.measure.bench import Target
from llmserve.measure.plan import Prompts, plan_requests
from llmserve.measure.runs import Run, ToolFigures

NAMES = ("perf-analyzer", "aiperf")


def check_tool(name: str) -> None:
    """Raise where a tool is missing or cannot be run, before anything is measured."""
    from llmserve.measure.tools import aiperf, perf_analyzer

    (perf_analyzer.check if name == "perf-analyzer" else aiperf.check)()


def run_tool(name: str, target: Target, run: Run, prompts: Prompts) -> ToolFigures:
    """Measure what a run has measured, with another tool.

    One line says so where the tool is missing or cannot do what the run did.
    """
    from llmserve.measure.tools import aiperf, perf_analyzer

    info = target.info()
    ours = info.made_by_llmserve is not None
    _, asks = plan_requests(run.load, prompts, target.counter(), ours=ours)
    measure = perf_analyzer.measure if name == "perf-analyzer" else aiperf.measure
    # They have no end by the clock that we could share; as many requests as we had are the same.
    load = replace(run.load, requests=len(run.records), duration=None)
    with tempfile.TemporaryDirectory(prefix="llmserve-tool-") as folder:
        return measure(target, info, load, asks, Path(folder))
