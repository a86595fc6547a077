"""The driver of batching strategies that hand the generator whole batches.

Triton's dynamic batcher brings requests together; each keeps its own parameters, each is
answered as soon as it is done, and one that cannot be served fails alone.
"""

from __future__ import annotations

import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from llmserve.runtime.errors import RequestError
from llmserve.runtime.generation import Generation
from llmserve.runtime.protocols import Parts
from llmserve.runtime.request import Prompt, read_prompts, room_for
from llmserve.runtime.responder import Responder


class Job:
    """One request under way: its prompts' generations and where their answers go."""

    def __init__(self, raw: Any, parts: Parts) -> None:
        self.responder = Responder(raw, parts)
        self._parts = parts
        self._told = False
        self.generations: list[Generation] = []

    def admit(self, raw: Any) -> None:
        """Read the request; what is wrong with it is raised as :class:`RequestError`."""
        self._prompts = read_prompts(raw, self._parts)
        self.restart()
        stream = self._prompts[0].params.stream
        wanted = bool(self._parts.defaults.get("stream")) if stream is None else stream
        if stream and not self._parts.decoupled:
            raise RequestError(
                "this model answers in one piece: leave out stream, or build it with "
                "--set decoupled=true"
            )
        self.streams = wanted and self._parts.decoupled

    def restart(self) -> None:
        """Begin all answers anew."""
        self.generations = [self._generation(prompt) for prompt in self._prompts]

    @property
    def can_restart(self) -> bool:
        """Whether nothing of the answer has left yet."""
        return not self._told

    def _generation(self, prompt: Prompt) -> Generation:
        parts = self._parts
        room = room_for(prompt, parts.generator.context_length, parts.defaults["max_tokens"])
        if prompt.params.min_tokens > room:
            raise RequestError(
                f"min_tokens {prompt.params.min_tokens} is over max_tokens {room}: lower it"
            )
        eos = parts.generator.eos_ids | parts.tokenizer.eos_ids
        if prompt.params.end_id is not None and prompt.params.end_id >= 0:
            eos = frozenset({prompt.params.end_id})
        generation = Generation(
            prompt.ids,
            prompt.params,
            max_tokens=room,
            eos_ids=eos,
            decode=parts.tokenizer.decode,
            prompt=prompt.text,
            is_cancelled=self.responder.cancelled,
        )
        generation.on_text = self._tell
        return generation

    def _tell(self) -> None:
        done = all(generation.done for generation in self.generations)
        if self.streams or done:
            self._told = True
            self.responder.send(self.generations, whole=not self.streams)


class BatchDriver:
    """Answers Triton's batches through a generator of the mode ``"batch"``."""

    def __init__(self, settings: Mapping[str, Any], folder: Path) -> None:
        del settings, folder

    def start(self, parts: Parts) -> None:
        """Take the model's other parts."""
        self._parts = parts

    def execute(self, requests: Sequence[Any]) -> None:
        """Answer every request of a batch; the answers leave through their responders."""
        jobs = []
        for raw in requests:
            job = Job(raw, self._parts)
            try:
                job.admit(raw)
            except RequestError as error:
                job.responder.refuse(str(error))
            except Exception as error:
                self._fail(job, error)
            else:
                jobs.append(job)
        if jobs:
            self._generate(jobs)

    def finalize(self) -> None:
        """Nothing is held beyond a batch."""

    def _generate(self, jobs: list[Job]) -> None:
        generations = [g for job in jobs for g in job.generations]
        try:
            self._parts.generator.generate(generations, self._parts.tokenizer)
        except Exception as error:
            self._isolate(jobs, error)

    def _isolate(self, jobs: list[Job], error: Exception) -> None:
        """A batch failed: serve each request alone, so that only the culprit fails."""
        for job in jobs:
            if job.responder.closed:
                continue
            if len(jobs) > 1 and job.can_restart:
                job.restart()
                self._generate([job])
            else:
                self._fail(job, error)

    def _fail(self, job: Job, error: Exception) -> None:
        self._parts.pb_utils.Logger.log_error("".join(traceback.format_exception(error)))
        first = (str(error).strip().splitlines() or [""])[0]
        job.responder.refuse(f"the model failed: {type(error).__name__}: {first}", internal=True)
