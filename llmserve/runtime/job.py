"""One request under way: its prompts' generations and where their answers go."""

from __future__ import annotations

from typing import Any

from llmserve.runtime.errors import RequestError
from llmserve.runtime.generation import Generation
from llmserve.runtime.protocols import Parts
from llmserve.runtime.request import Prompt, read_prompts, room_for
from llmserve.runtime.responder import Responder


class Job:
    """A request from its arrival to its last response.

    An ``eager`` job sends what is new as soon as a generator pushes it; the driver of another
    calls :meth:`tell` when it is time.
    """

    def __init__(self, raw: Any, parts: Parts, *, eager: bool = True) -> None:
        self.responder = Responder(raw, parts)
        self._parts = parts
        self._eager = eager
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
        # Only some formatters can, and only some requests ask for it.
        if constrain := getattr(parts.formatter, "constrain", None):
            generation.constraint = constrain(generation, parts.tokenizer)
        if self._eager:
            generation.on_text = self.tell
        return generation

    @property
    def done(self) -> bool:
        """Whether every answer is complete."""
        return all(generation.done for generation in self.generations)

    def tell(self) -> None:
        """Send what is new, if the request wants pieces or everything is complete."""
        if self.streams or self.done:
            self._told = True
            self.responder.send(self.generations, whole=not self.streams)
