"""The session's interface to the generator, a model of the same server called once per step."""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from llmserve.runtime import error_of_model
from llmserve_gpt2.export import names
from llmserve_gpt2.session.sequences import Cache, next_lengths

START, END = 1, 2


@dataclass
class StepInput:
    """The input of one sequence to a step; ``ends`` marks the last step of the sequence."""

    sequence: int
    cache: Cache
    tokens: list[int]
    ends: bool = False


class Graph:
    """The runtime of this plugin's generators, which run as a separate model.

    Every sequence of the session is also a Triton sequence of that model, so its cache is in the
    generator's implicit state. All sequences are sent at once, so that Triton can batch them.
    """

    def __init__(self, settings: Mapping[str, Any], folder: Path) -> None:
        del settings
        settings = json.loads((folder / "graph.json").read_text(encoding="utf-8"))
        self.context_length: int | None = settings["context"]
        self.eos_ids = frozenset(settings["eos_ids"])
        self._model: str = settings["model"]
        self._longest: int = settings["longest"]
        self._gap: int = settings["gap"]
        self._pool = ThreadPoolExecutor(settings["slots"])
        self._next = secrets.randbits(48)

    def sequence(self) -> int:
        self._next += 1
        return self._next

    def step(self, inputs: Sequence[StepInput], pb: Any) -> list[npt.NDArray[Any] | Exception]:
        """Run a step and return the logits of each sequence's last position, or its error."""
        counts = [len(step_input.tokens) for step_input in inputs]
        caches = [step_input.cache for step_input in inputs]
        lengths = next_lengths(caches, counts, longest=self._longest, gap=self._gap)

        # All requests are created before the first is sent, so that they reach Triton together.
        requests = [self._request(*pair, pb) for pair in zip(inputs, lengths, strict=True)]
        if len(inputs) == 1:
            responses = [requests[0].exec()]
        else:
            responses = list(self._pool.map(lambda request: request.exec(), requests))
        return [
            self._logits(step_input, length, response, pb)
            for step_input, length, response in zip(inputs, lengths, responses, strict=True)
        ]

    def close(self) -> None:
        self._pool.shutdown()

    def _request(self, step_input: StepInput, length: int, pb: Any) -> Any:
        cache, new = step_input.cache, len(step_input.tokens)
        feeds = {
            names.INPUT_IDS: np.array(step_input.tokens, np.int64),
            names.POSITION_IDS: cache.positions(new),
            names.ATTENTION_MASK: cache.mask(new, length),
            names.PAST_MASK: np.zeros(cache.length, np.int64),
        }
        return pb.InferenceRequest(
            model_name=self._model,
            requested_output_names=[names.LOGITS],
            inputs=[pb.Tensor(name, values[None]) for name, values in feeds.items()],
            correlation_id=step_input.sequence,
            flags=(0 if cache.tokens else START) | (END if step_input.ends else 0),
        )

    def _logits(
        self, step_input: StepInput, length: int, response: Any, pb: Any
    ) -> npt.NDArray[Any] | Exception:
        if response.has_error():
            return error_of_model(response.error().message())
        tensor = pb.get_output_tensor_by_name(response, names.LOGITS)
        logits = tensor.as_numpy() if tensor.is_cpu() else _from_device(tensor)
        step_input.cache.grow(len(step_input.tokens), length)
        row: npt.NDArray[Any] = logits[0]
        return row


def _from_device(tensor: Any) -> npt.NDArray[Any]:
    from torch.utils.dlpack import from_dlpack

    values: npt.NDArray[Any] = from_dlpack(tensor.to_dlpack()).cpu().numpy()
    return values
