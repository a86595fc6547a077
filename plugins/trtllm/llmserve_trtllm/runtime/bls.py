"""The model ``tensorrt_llm_bls``: asks the engine itself, and so remembers what it has told.

It reads and answers as every model of llmserve does: pieces join to the whole, stop words never
show, and the last piece says why the answer ended and how many tokens it took.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from threading import Lock
from typing import Any

from llmserve.runtime.errors import RequestError
from llmserve.runtime.generation import Generation
from llmserve.runtime.job import Job
from llmserve.runtime.protocols import Parts
from llmserve_trtllm.runtime.asking import EngineModel
from llmserve_trtllm.runtime.remote import RemoteEngine
from llmserve_trtllm.runtime.wishes import Wishes, pad_of
from llmserve_trtllm.runtime.words import word_ids, word_tensor


class Orchestrator:
    """Answers every request in a thread of its own: the engine is what batches."""

    def __init__(self, settings: Mapping[str, Any], folder: Path) -> None:
        del folder
        self._settings = settings
        self._inside: Mapping[str, str] = settings["inside"]
        self._pool = ThreadPoolExecutor(settings["threads"], thread_name_prefix="asking")

    def start(self, parts: Parts) -> None:
        """Take the tokenizer, the formatter and the engine's limits."""
        self._parts = parts
        self._engine: RemoteEngine = parts.generator
        self._wishes = Wishes(self._settings["wishes"], max_beam_width=self._engine.max_beam_width)
        self._model = EngineModel(self._settings, parts.pb_utils)

    def execute(self, requests: Sequence[Any]) -> None:
        """Take requests; the answers leave through their responders."""
        for raw in requests:
            job = Job(raw, self._parts)
            try:
                job.admit(raw)
                asked = [self._values(generation) for generation in job.generations]
            except RequestError as error:
                job.responder.refuse(str(error))
            except Exception as error:
                job.responder.fail(error)
            else:
                turns = Lock()
                for generation, values in zip(job.generations, asked, strict=True):
                    self._pool.submit(self._answer, job, generation, values, turns)

    def finalize(self) -> None:
        """Wait for what is under way."""
        self._pool.shutdown(wait=True, cancel_futures=True)

    def _answer(
        self, job: Job, generation: Generation, values: Mapping[str, Any], turns: Lock
    ) -> None:
        """Ask for one prompt; the prompts of a request take turns to tell what came."""
        try:
            with closing(self._model.tokens(values, stream=self._settings["streams"])) as pieces:
                for tokens in pieces:
                    with turns:
                        for token in tokens:
                            generation.push(token)
                    if generation.done:
                        break
            with turns:
                generation.end()
        except Exception as error:
            with turns:
                if not job.responder.closed:
                    job.responder.fail(error)

    def _values(self, generation: Generation) -> dict[str, Any]:
        params, tokenizer = generation.params, self._parts.tokenizer
        self._engine.check_prompt(generation.prompt_ids)
        # The ends that matter are the generation's own; one of them goes to the engine, and what
        # comes after another is not read.
        ends = [] if params.ignore_eos else sorted(generation.eos_ids)
        end = ends[0] if ends else self._settings["no_end"]
        own = self._engine.pad_id
        pad = pad_of(params, own if own is not None else max(end, 0))
        wishes = self._wishes.values(params, end_id=end, pad_id=pad)
        stops = word_ids(params.stop_words, tokenizer) + [[other] for other in ends[1:]]
        return {
            "input_ids": generation.prompt_ids,
            "input_lengths": len(generation.prompt_ids),
            "request_output_len": generation.max_tokens,
            "stop_words_list": word_tensor([stops]),
            "bad_words_list": word_tensor([word_ids(params.bad_words, tokenizer)]),
            **{self._inside[name]: value for name, value in wishes.items()},
        }
