"""One request in flight: the generations of its prompts and the responder for their answers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from llmserve.contract.options import OPEN_SHARED_STREAM, is_carried
from llmserve.contract.tasks import TOKENS
from llmserve.runtime.answer.generation import Generation
from llmserve.runtime.answer.params import Params
from llmserve.runtime.answer.request import Prompt, about_prompt, answer_limit, read_prompts
from llmserve.runtime.answer.responder import Responder
from llmserve.runtime.answer.shared_streams import Preview, SharedStreams
from llmserve.runtime.errors import RequestError, panics_as_errors
from llmserve.runtime.protocols import Parts


class Job:
    """A request from its arrival to its last response.

    An ``eager`` job checks its client and sends new text whenever a generator pushes a token. For
    other jobs, the driver decides when to check and to call :meth:`send`.
    """

    def __init__(self, raw: Any, parts: Parts, *, eager: bool = True) -> None:
        self.responder = Responder(raw, parts)
        self._parts = parts
        self._eager = eager
        self._sent = False
        self._preview: Preview | None = None
        self.generations: list[Generation] = []

    def admit(self, raw: Any, *, renamed: Mapping[str, str] = MappingProxyType({})) -> None:
        """Read the request; raise :class:`RequestError` if it is invalid.

        ``renamed`` maps the model's tensor names to those of the contract. A request with
        ``prompt_only`` is answered and :attr:`done` at once.
        """
        self._prompts = read_prompts(raw, self._parts, renamed=renamed)
        # Only some formatters have this method.
        if check := getattr(self._parts.formatter, "check", None):
            for prompt in self._prompts:
                check(prompt.params)
        self.restart()
        if self._prompts[0].params.open_shared_stream is not None:
            raise RequestError(
                "this model has no shared streams",
                code="unsupported_option",
                param=OPEN_SHARED_STREAM,
            )
        stream = self._prompts[0].params.stream
        streams = bool(self._parts.defaults.get("stream")) if stream is None else stream
        if stream and not self._parts.decoupled:
            raise RequestError(
                "this model answers in one piece: leave out stream, or build it with "
                "--set decoupled=true",
                code="unsupported_option",
                param="stream",
            )
        self.streams = streams and self._parts.decoupled
        if self.streams:
            self._preview = self._previewed(raw, self._prompts[0].params)
        if self.done:
            self.send()

    def restart(self) -> None:
        self.generations = [self._generation(prompt) for prompt in self._prompts]

    @property
    def can_restart(self) -> bool:
        """Whether no part of the answer has been sent yet."""
        return not self._sent

    def _generation(self, prompt: Prompt) -> Generation:
        parts, responder = self._parts, self.responder
        limit = 0
        if parts.answers == TOKENS:
            context = parts.generator.context_length
            limit = answer_limit(prompt, context, parts.defaults["max_tokens"])
        generation = Generation(
            prompt.ids,
            prompt.params,
            max_tokens=limit,
            eos_ids=prompt.params.ends(
                parts.generator.eos_ids | parts.tokenizer.eos_ids | prompt.ends
            ),
            decode=parts.tokenizer.decode,
            prompt=prompt.text,
            segments=prompt.segments,
            images=prompt.images,
            scored=prompt.scored,
            is_cancelled=responder.cancelled if self._eager else lambda: responder.gone,
        )
        if prompt.params.prompt_only:
            generation.tell(about_prompt(prompt, parts))
            return generation
        # Only some formatters have this method.
        if constrain := getattr(parts.formatter, "constrain", None):
            generation.constraint = constrain(generation, parts.tokenizer)
        if self._eager:
            generation.on_text = self.send
        return generation

    def _previewed(self, raw: Any, params: Params) -> Preview | None:
        """Join the shared stream that the request names, if this process has it."""
        streams: SharedStreams | None = self._parts.shared
        name = params.shared_stream
        if streams is None or not name or not is_carried(lambda option: getattr(params, option)):
            return None
        request = raw.request_id()
        return streams.preview(name, self.responder, request) if request else None

    @property
    def previewed(self) -> bool:
        """Whether a shared stream carries the pieces, so that sending one costs next to nothing."""
        return self._preview is not None and self._preview.is_open

    @property
    def done(self) -> bool:
        return all(generation.done for generation in self.generations)

    @property
    def pending(self) -> bool:
        """Whether a constraint of it is not ready yet."""
        return any(generation.pending for generation in self.generations)

    @property
    def has_news(self) -> bool:
        return any(generation.has_news for generation in self.generations)

    def send(self) -> None:
        """Send new text if the request streams, or the whole answer once it is complete."""
        if not (self.streams or self.done):
            return
        self._sent = True
        if error := next(filter(None, (generation.error for generation in self.generations)), None):
            if not self.responder.closed:
                self.responder.fail(error)
            return
        if self._preview is not None:
            if self._preview.is_open:
                self._preview.send(self.generations)
                return
            # The stream broke. What it has carried may not have arrived.
            self._preview = None
            for generation in self.generations:
                generation.rewind()
        self.responder.send(self.generations, whole=not self.streams)


def begin(requests: Sequence[Any], parts: Parts, *, eager: bool = True) -> Iterator[Job]:
    """Read requests and yield those that need a generator; an invalid request fails alone.

    Constraints are ready if the jobs are ``eager``. A driver that passes others to a generator has
    to settle their generations.
    """
    jobs = [Job(raw, parts, eager=eager) for raw in requests]
    # All are read first, so that their constraints are compiled meanwhile.
    accepted = [job for job, raw in zip(jobs, requests, strict=True) if _try(job, job.admit, raw)]
    for job in accepted:
        if not job.done and not (eager and not all(_try(job, g.settle) for g in job.generations)):
            yield job


def _try(job: Job, action: Callable[..., None], *arguments: Any) -> bool:
    """Return whether an action succeeded; if not, its job gets the error."""
    try:
        with panics_as_errors():
            action(*arguments)
    except Exception as error:
        job.responder.fail(error)
        return False
    return True
