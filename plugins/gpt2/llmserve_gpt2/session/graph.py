"""The generator as the session sees it: a model of this server, asked for a step at a time."""

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

from llmserve_gpt2.export import names
from llmserve_gpt2.session.sequences import Lane, rooms

START, END = 1, 2


@dataclass
class Turn:
    """What one sequence feeds in a step; the last step of a sequence says so."""

    sequence: int
    lane: Lane
    tokens: list[int]
    ends: bool = False


class Graph:
    """The runtime of the generators of this plugin; they run as a model beside the session's.

    Every sequence here is one of Triton's own there, so its cache lies in the generator's
    implicit state. All sequences are asked at once, which lets Triton make a batch of them.
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

    def step(self, turns: Sequence[Turn], pb: Any) -> list[npt.NDArray[Any] | Exception]:
        """Feed every sequence and return the logits of its last position, or what went wrong."""
        news = [len(turn.tokens) for turn in turns]
        lanes = [turn.lane for turn in turns]
        lengths = rooms(lanes, news, longest=self._longest, gap=self._gap)

        # All of them are made before the first is sent: they come to Triton closer together.
        requests = [self._request(*asked, pb) for asked in zip(turns, lengths, strict=True)]
        if len(turns) == 1:
            answers = [requests[0].exec()]
        else:
            answers = list(self._pool.map(lambda request: request.exec(), requests))
        return [
            self._logits(turn, room, answer, pb)
            for turn, room, answer in zip(turns, lengths, answers, strict=True)
        ]

    def close(self) -> None:
        self._pool.shutdown()

    def _request(self, turn: Turn, room: int, pb: Any) -> Any:
        lane, new = turn.lane, len(turn.tokens)
        feeds = {
            names.INPUT_IDS: np.array(turn.tokens, np.int64),
            names.POSITION_IDS: lane.positions(new),
            names.ATTENTION_MASK: lane.mask(new, room),
            names.PAST_MASK: np.zeros(lane.held, np.int64),
        }
        return pb.InferenceRequest(
            model_name=self._model,
            requested_output_names=[names.LOGITS],
            inputs=[pb.Tensor(name, values[None]) for name, values in feeds.items()],
            correlation_id=turn.sequence,
            flags=(0 if lane.real else START) | (END if turn.ends else 0),
        )

    def _logits(
        self, turn: Turn, room: int, response: Any, pb: Any
    ) -> npt.NDArray[Any] | Exception:
        if response.has_error():
            return RuntimeError(response.error().message())
        tensor = pb.get_output_tensor_by_name(response, names.LOGITS)
        logits = tensor.as_numpy() if tensor.is_cpu() else _from_device(tensor)
        turn.lane.grow(len(turn.tokens), room)
        row: npt.NDArray[Any] = logits[0]
        return row


def _from_device(tensor: Any) -> npt.NDArray[Any]:
    from torch.utils.dlpack import from_dlpack

    values: npt.NDArray[Any] = from_dlpack(tensor.to_dlpack()).cpu().numpy()
    return values
