"""The driver for batching strategies that pass whole batches to the generator.

Triton's dynamic batcher groups requests. Each request keeps its own parameters and is answered as
soon as it is done, and a request that cannot be served fails alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from llmserve.runtime.answer.generation import Generation
from llmserve.runtime.drivers.job import Job, begin
from llmserve.runtime.errors import panics_as_errors
from llmserve.runtime.protocols import Parts, Stepper


class BatchDriver:
    """Answers Triton's batches with a generator of mode ``"batch"``."""

    def __init__(self, settings: Mapping[str, Any], folder: Path) -> None:
        del settings, folder

    def start(self, parts: Parts) -> None:
        self._parts = parts

    def execute(self, requests: Sequence[Any]) -> None:
        if jobs := list(begin(requests, self._parts)):
            self._generate(jobs)

    def finalize(self) -> None:
        """Do nothing: no state outlives a batch."""

    def _generate(self, jobs: list[Job]) -> None:
        generations = [g for job in jobs for g in job.generations]
        try:
            with panics_as_errors():
                self._parts.generator.generate(generations, self._parts.tokenizer)
        except Exception as error:
            self._isolate(jobs, error)
        for job in jobs:
            if not job.responder.closed:
                job.responder.fail(RuntimeError("the generator stopped before the end"))

    def _isolate(self, jobs: list[Job], error: Exception) -> None:
        """Serve each request of a failed batch alone, so that only the culprit fails."""
        for job in jobs:
            if job.responder.closed:
                continue
            if len(jobs) > 1 and job.can_restart:
                job.restart()
                self._generate([job])
            else:
                job.responder.fail(error)


def run_batch(engine: Stepper, generations: Sequence[Generation]) -> None:
    """Run steps until every generation is done; if one generation fails, all of them fail."""
    try:
        for generation in generations:
            engine.admit(generation)
        while engine.busy:
            for _, error in engine.step().failed:
                raise error
    finally:
        for generation in generations:
            engine.drop(generation)
